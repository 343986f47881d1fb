"""Request state: one method moves between states, spans are taken once and in order, retries are bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.errors import InvariantBroken
from common.core.ids import Incarnation, unpack_tokens
from common.core.request import FinishReason
from coordinator.requests.state import (
    CLEARED_TOKENS,
    MAX_BREAKS,
    MAX_MIGRATIONS,
    MAX_RETRIES,
    MOVES,
    TERMINAL,
    Accepted,
    Contradiction,
    Gap,
    RequestState,
    State,
)

P, Q, D = Incarnation("p"), Incarnation("q"), Incarnation("d")
RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH


def placed(choices: int = 1) -> RequestState:
    life = RequestState(choices)
    life.place("disagg", P, D)
    life.move(State.PREFILLING)
    return life


def test_the_table_is_closed_and_ends_are_ends() -> None:
    assert set(MOVES) == set(State)
    assert all(not MOVES[state] for state in TERMINAL)
    assert all({State.ABORTED, State.FAILED} <= MOVES[state] for state in State if state not in TERMINAL)


def test_a_move_that_is_not_in_the_table_is_a_broken_invariant() -> None:
    with pytest.raises(InvariantBroken, match="QUEUED to DECODING"):
        RequestState(1).move(State.DECODING)


def test_the_usual_walk() -> None:
    life = placed()
    assert life.accept(0, 0, 0, [7], RUNNING) == Accepted(0, [7], RUNNING)
    life.spoke(P)
    assert life.state is State.SHIPPING
    assert life.accept(0, 0, 0, [7, 8], RUNNING) == Accepted(1, [8], RUNNING)
    life.spoke(D)
    assert life.state is State.DECODING
    assert life.accept(0, 0, 2, [9], STOP) == Accepted(0, [9], STOP)
    assert life.finished and life.output == [[7, 8, 9]]
    life.move(State.DONE)
    assert life.over


def test_decode_may_speak_before_prefill() -> None:
    life = placed()
    life.accept(0, 0, 0, [7, 8], RUNNING)
    life.spoke(D)
    assert life.state is State.DECODING
    assert life.accept(0, 0, 0, [7], RUNNING) is None
    life.spoke(P)
    assert life.state is State.DECODING


def test_a_gap_names_what_is_missing_and_takes_nothing() -> None:
    life = placed()
    assert life.accept(0, 0, 2, [9], RUNNING) == Gap(0)
    assert life.output == [[]]


def test_an_end_may_come_without_new_tokens() -> None:
    life = placed()
    life.accept(0, 0, 0, [1, 2], RUNNING)
    assert life.accept(0, 0, 1, [2], LENGTH) == Accepted(1, [], LENGTH)
    assert life.finished


@pytest.mark.parametrize(("choice", "attempt"), [(0, 1), (1, 0), (-1, 0), (5, 0)])
def test_spans_of_nobody_are_dropped(choice: int, attempt: int) -> None:
    assert placed().accept(choice, attempt, 0, [1], RUNNING) is None


def test_nothing_is_taken_after_the_end_of_a_choice() -> None:
    life = placed(2)
    life.accept(0, 0, 0, [1], STOP)
    assert life.accept(0, 0, 1, [2], RUNNING) is None
    life.end_choice(1)
    assert life.finished
    assert life.accept(1, 0, 0, [1], RUNNING) is None


def test_a_setback_fences_the_old_attempt_and_keeps_what_was_said() -> None:
    life = placed(2)
    life.accept(0, 0, 0, [1, 2], RUNNING)
    assert life.retry() == "retry"
    assert (life.state, life.attempt, life.workers) == (State.QUEUED, 1, ())
    assert [unpack_tokens(each) for each in life.emitted()] == [[1, 2], []]
    assert life.accept(0, 0, 2, [3], RUNNING) is None
    life.place("disagg", P, D)
    life.move(State.PREFILLING)
    assert life.accept(0, 0, 2, [3], RUNNING) is None
    assert life.accept(0, 1, 2, [3], RUNNING) == Accepted(0, [3], RUNNING)


def test_retries_before_the_first_token_are_few() -> None:
    life = placed()
    for _ in range(MAX_RETRIES):
        assert life.retry() == "retry"
        life.place("disagg", P, D)
    assert life.retry() == "spent"


def test_being_turned_away_at_the_door_costs_nothing() -> None:
    life = placed()
    for attempt in range(1, 2 * (MAX_RETRIES + MAX_MIGRATIONS)):
        assert life.retry(free=True) == "retry"
        assert life.attempt == attempt
        life.place("disagg", P, D)
    assert life.retries == life.migrations == 0


def test_migrations_have_a_budget_of_their_own() -> None:
    life = placed()
    assert life.retry() == "retry"
    life.place("disagg", P, D)
    life.accept(0, 1, 0, [1], RUNNING)
    for _ in range(MAX_MIGRATIONS):
        assert life.retry() == "retry"
        life.place("disagg", P, D)
    assert life.retry() == "spent"


def test_a_broken_connection_costs_something_when_the_worker_died() -> None:
    life = placed()
    assert life.on_worker_unconfirmed(P) and life.retry(free=True) == "retry"
    life.place("disagg", Q, D)
    life.accept(0, 1, 0, [1], RUNNING)
    assert life.on_worker_unconfirmed(D) and life.retry(free=True) == "retry"
    assert life.retries == life.migrations == 0
    life.on_worker_died(P)
    life.on_worker_died(D)
    life.on_worker_died(D)
    assert life.retries == life.migrations == 1, "each once, by what it had then"
    life.on_worker_reconnected(P)
    assert life.retries == 1 and not life.breaks


def test_broken_connections_to_workers_that_live_are_free_up_to_a_bound() -> None:
    life = placed()
    for _ in range(MAX_BREAKS - 1):
        assert life.on_worker_unconfirmed(P)
        life.on_worker_reconnected(P)
    assert life.disconnected() and not life.disconnected() and not life.on_worker_unconfirmed(P)


def test_two_crashes_make_a_suspect() -> None:
    life = placed()
    assert not life.on_worker_lost(P)
    assert life.retry() == "retry" and not life.suspect
    life.place("disagg", Q, D)
    life.move(State.PREFILLING)
    assert life.on_worker_lost(Q) and life.suspect
    assert life.retry(on_trial=True) == "retry" and life.attempt == 2


def test_whether_one_that_is_on_trial_is_spent_is_asked_later() -> None:
    life = placed()
    for _ in range(MAX_RETRIES):
        life.retry()
        life.place("disagg", P, D)
    assert life.retry(on_trial=True) == "retry" and life.spent
    assert life.state is State.QUEUED, "it can still be refused, or go on to an end of its own"


def test_output_from_workers_that_live_clears_a_suspect() -> None:
    life = placed()
    life.crashes |= {P, Q}
    assert life.suspect
    assert not life.survives(CLEARED_TOKENS - 1)
    life.retry()
    life.place("disagg", P, D)
    assert not life.survives(CLEARED_TOKENS - 1), "each attempt by itself"
    assert life.survives(1) and not life.suspect
    assert not life.survives(1), "it is cleared once"


def test_whoever_only_held_memory_for_it_was_not_killed_by_it() -> None:
    """A decode worker that dies while it only holds blocks for a request does not make the request a suspect."""
    life = placed()
    assert not life.on_worker_lost(P) and life.retry() == "retry"
    life.place("disagg", Q, D)
    life.move(State.PREFILLING)
    assert not life.on_worker_lost(D) and life.crashes == {P}
    assert life.retry() == "retry"
    life.place("local", None, D)
    life.move(State.PREFILLING)
    assert life.on_worker_lost(D), "this one computed it"


def test_a_span_that_tells_known_tokens_otherwise_is_a_contradiction() -> None:
    life = placed()
    life.accept(0, 0, 0, [7, 8], RUNNING)
    for start, ids in ((0, [7, 9]), (0, [6, 8, 9]), (1, [9, 9]), (0, [9])):
        assert isinstance(life.accept(0, 0, start, ids, RUNNING), Contradiction)
    assert life.output == [[7, 8]] and life.accept(0, 0, 1, [8, 9], RUNNING) == Accepted(1, [9], RUNNING)


def test_prefill_is_needed_until_decode_has_the_kv() -> None:
    life = placed()
    assert life.needs(P) and life.needs(D) and not life.needs(Incarnation("other"))
    life.accept(0, 0, 0, [1], RUNNING)
    life.spoke(P)
    assert life.needs(P)
    life.decoding()
    assert not life.needs(P) and life.needs(D)


@given(
    spans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 6)), max_size=60),
    lost=st.sets(st.integers(0, 59), max_size=3),
)
def test_whatever_arrives_the_output_is_a_prefix_of_the_truth(
    spans: list[tuple[int, int, int]], lost: set[int]
) -> None:
    """Spans of any attempt, in any order and any number of times, give each correct token once."""
    truth = list(range(100, 120))
    life, seen = placed(), list[int]()
    for index, (attempt, start, count) in enumerate(spans):
        if index in lost and life.retry() == "retry":
            life.place("disagg", P, D)
            life.move(State.PREFILLING)
        news = life.accept(0, attempt, start, truth[start : start + count], RUNNING)
        if isinstance(news, Accepted):
            assert attempt == life.attempt and news.ids == truth[start + news.skip : start + count]
            seen += news.ids
        elif isinstance(news, Gap):
            assert news.start == len(seen) < start
    assert seen == life.output[0] == truth[: len(seen)]
