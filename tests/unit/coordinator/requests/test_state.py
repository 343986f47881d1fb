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
    progress = RequestState(choices)
    progress.place("disagg", P, D)
    progress.move(State.PREFILLING)
    return progress


def test_the_table_is_closed_and_ends_are_ends() -> None:
    assert set(MOVES) == set(State)
    assert all(not MOVES[state] for state in TERMINAL)
    assert all({State.ABORTED, State.FAILED} <= MOVES[state] for state in State if state not in TERMINAL)


def test_a_move_that_is_not_in_the_table_is_a_broken_invariant() -> None:
    with pytest.raises(InvariantBroken, match="QUEUED to DECODING"):
        RequestState(1).move(State.DECODING)


def test_the_usual_walk() -> None:
    progress = placed()
    assert progress.accept(0, 0, 0, [7], RUNNING) == Accepted(0, [7], RUNNING)
    progress.on_tokens(P)
    assert progress.state is State.SHIPPING
    assert progress.accept(0, 0, 0, [7, 8], RUNNING) == Accepted(1, [8], RUNNING)
    progress.on_tokens(D)
    assert progress.state is State.DECODING
    assert progress.accept(0, 0, 2, [9], STOP) == Accepted(0, [9], STOP)
    assert progress.finished and progress.output == [[7, 8, 9]]
    progress.move(State.DONE)
    assert progress.over


def test_decode_may_speak_before_prefill() -> None:
    progress = placed()
    progress.accept(0, 0, 0, [7, 8], RUNNING)
    progress.on_tokens(D)
    assert progress.state is State.DECODING
    assert progress.accept(0, 0, 0, [7], RUNNING) is None
    progress.on_tokens(P)
    assert progress.state is State.DECODING


def test_gap_names_missing_position_and_accepts_nothing() -> None:
    progress = placed()
    assert progress.accept(0, 0, 2, [9], RUNNING) == Gap(0)
    assert progress.output == [[]]


def test_an_end_may_come_without_new_tokens() -> None:
    progress = placed()
    progress.accept(0, 0, 0, [1, 2], RUNNING)
    assert progress.accept(0, 0, 1, [2], LENGTH) == Accepted(1, [], LENGTH)
    assert progress.finished


@pytest.mark.parametrize(("choice", "attempt"), [(0, 1), (1, 0), (-1, 0), (5, 0)])
def test_spans_of_unknown_choice_or_attempt_are_dropped(choice: int, attempt: int) -> None:
    assert placed().accept(choice, attempt, 0, [1], RUNNING) is None


def test_nothing_is_taken_after_the_end_of_a_choice() -> None:
    progress = placed(2)
    progress.accept(0, 0, 0, [1], STOP)
    assert progress.accept(0, 0, 1, [2], RUNNING) is None
    progress.end_choice(1)
    assert progress.finished
    assert progress.accept(1, 0, 0, [1], RUNNING) is None


def test_retry_rejects_old_attempt_and_keeps_output() -> None:
    progress = placed(2)
    progress.accept(0, 0, 0, [1, 2], RUNNING)
    assert progress.retry() == "retry"
    assert (progress.state, progress.attempt, progress.workers) == (State.QUEUED, 1, ())
    assert [unpack_tokens(each) for each in progress.emitted()] == [[1, 2], []]
    assert progress.accept(0, 0, 2, [3], RUNNING) is None
    progress.place("disagg", P, D)
    progress.move(State.PREFILLING)
    assert progress.accept(0, 0, 2, [3], RUNNING) is None
    assert progress.accept(0, 1, 2, [3], RUNNING) == Accepted(0, [3], RUNNING)


def test_retries_before_the_first_token_are_few() -> None:
    progress = placed()
    for _ in range(MAX_RETRIES):
        assert progress.retry() == "retry"
        progress.place("disagg", P, D)
    assert progress.retry() == "spent"


def test_free_retry_does_not_count_against_limits() -> None:
    progress = placed()
    for attempt in range(1, 2 * (MAX_RETRIES + MAX_MIGRATIONS)):
        assert progress.retry(free=True) == "retry"
        assert progress.attempt == attempt
        progress.place("disagg", P, D)
    assert progress.retries == progress.migrations == 0


def test_migrations_have_a_budget_of_their_own() -> None:
    progress = placed()
    assert progress.retry() == "retry"
    progress.place("disagg", P, D)
    progress.accept(0, 1, 0, [1], RUNNING)
    for _ in range(MAX_MIGRATIONS):
        assert progress.retry() == "retry"
        progress.place("disagg", P, D)
    assert progress.retry() == "spent"


def test_a_broken_connection_costs_something_when_the_worker_died() -> None:
    progress = placed()
    assert progress.on_worker_unconfirmed(P) and progress.retry(free=True) == "retry"
    progress.place("disagg", Q, D)
    progress.accept(0, 1, 0, [1], RUNNING)
    assert progress.on_worker_unconfirmed(D) and progress.retry(free=True) == "retry"
    assert progress.retries == progress.migrations == 0
    progress.on_worker_died(P)
    progress.on_worker_died(D)
    progress.on_worker_died(D)
    assert progress.retries == progress.migrations == 1, "each once, by what it had then"
    progress.on_worker_reconnected(P)
    assert progress.retries == 1 and not progress.breaks


def test_broken_connections_to_workers_that_live_are_free_up_to_a_bound() -> None:
    progress = placed()
    for _ in range(MAX_BREAKS - 1):
        assert progress.on_worker_unconfirmed(P)
        progress.on_worker_reconnected(P)
    assert progress.disconnected() and not progress.disconnected() and not progress.on_worker_unconfirmed(P)


def test_two_crashes_make_a_suspect() -> None:
    progress = placed()
    assert not progress.on_worker_lost(P)
    assert progress.retry() == "retry" and not progress.suspect
    progress.place("disagg", Q, D)
    progress.move(State.PREFILLING)
    assert progress.on_worker_lost(Q) and progress.suspect
    assert progress.retry(on_trial=True) == "retry" and progress.attempt == 2


def test_whether_one_that_is_on_trial_is_spent_is_asked_later() -> None:
    progress = placed()
    for _ in range(MAX_RETRIES):
        progress.retry()
        progress.place("disagg", P, D)
    assert progress.retry(on_trial=True) == "retry" and progress.spent
    assert progress.state is State.QUEUED, "it can still be refused, or go on to an end of its own"


def test_output_from_workers_that_live_clears_a_suspect() -> None:
    progress = placed()
    progress.crashes |= {P, Q}
    assert progress.suspect
    assert not progress.survives(CLEARED_TOKENS - 1)
    progress.retry()
    progress.place("disagg", P, D)
    assert not progress.survives(CLEARED_TOKENS - 1), "each attempt by itself"
    assert progress.survives(1) and not progress.suspect
    assert not progress.survives(1), "it is cleared once"


def test_death_of_worker_that_only_reserved_does_not_suspect_request() -> None:
    """A decode worker that dies while it only holds blocks for a request does not make the request a suspect."""
    progress = placed()
    assert not progress.on_worker_lost(P) and progress.retry() == "retry"
    progress.place("disagg", Q, D)
    progress.move(State.PREFILLING)
    assert not progress.on_worker_lost(D) and progress.crashes == {P}
    assert progress.retry() == "retry"
    progress.place("local", None, D)
    progress.move(State.PREFILLING)
    assert progress.on_worker_lost(D), "this one computed it"


def test_span_that_changes_known_tokens_is_contradiction() -> None:
    progress = placed()
    progress.accept(0, 0, 0, [7, 8], RUNNING)
    for start, ids in ((0, [7, 9]), (0, [6, 8, 9]), (1, [9, 9]), (0, [9])):
        assert isinstance(progress.accept(0, 0, start, ids, RUNNING), Contradiction)
    assert progress.output == [[7, 8]] and progress.accept(0, 0, 1, [8, 9], RUNNING) == Accepted(1, [9], RUNNING)


def test_prefill_is_needed_until_decode_has_the_kv() -> None:
    progress = placed()
    assert progress.needs(P) and progress.needs(D) and not progress.needs(Incarnation("other"))
    progress.accept(0, 0, 0, [1], RUNNING)
    progress.on_tokens(P)
    assert progress.needs(P)
    progress.decoding()
    assert not progress.needs(P) and progress.needs(D)


@given(
    spans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 6)), max_size=60),
    lost=st.sets(st.integers(0, 59), max_size=3),
)
def test_whatever_arrives_the_output_is_a_prefix_of_the_truth(
    spans: list[tuple[int, int, int]], lost: set[int]
) -> None:
    """Spans of any attempt, in any order and any number of times, give each correct token once."""
    truth = list(range(100, 120))
    progress, seen = placed(), list[int]()
    for index, (attempt, start, count) in enumerate(spans):
        if index in lost and progress.retry() == "retry":
            progress.place("disagg", P, D)
            progress.move(State.PREFILLING)
        news = progress.accept(0, attempt, start, truth[start : start + count], RUNNING)
        if isinstance(news, Accepted):
            assert attempt == progress.attempt and news.ids == truth[start + news.skip : start + count]
            seen += news.ids
        elif isinstance(news, Gap):
            assert news.start == len(seen) < start
    assert seen == progress.output[0] == truth[: len(seen)]
