"""Circuit breakers open after repeated failures, probe by themselves, and close once hand-offs work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.core.ids import Incarnation, RequestId
from coordinator.routing.breakers import (
    FAILURES,
    FIRST_COOL_DOWN_S,
    LONGEST_COOL_DOWN_S,
    WITHIN_S,
    Breakers,
    BreakerState,
    Pair,
)

PAIR = Pair(Incarnation("p"), Incarnation("d"))
OTHER = Pair(Incarnation("p"), Incarnation("e"))
ONE, TWO = RequestId(b"1" * 16), RequestId(b"2" * 16)


def opened(now: float = 0.0) -> Breakers:
    breakers = Breakers()
    for _ in range(FAILURES):
        assert breakers.allows(PAIR)
        breakers.failed(PAIR, ONE, now)
    assert breakers.state(PAIR) is BreakerState.OPEN
    return breakers


def test_a_pair_that_keeps_failing_is_left_alone_and_others_are_not() -> None:
    breakers = opened()
    assert not breakers.allows(PAIR) and breakers.allows(OTHER)
    assert breakers.open == 1
    assert not breakers.tick(FIRST_COOL_DOWN_S - 0.01) and not breakers.allows(PAIR)


def test_failures_that_are_far_apart_open_nothing() -> None:
    breakers = Breakers()
    for index in range(20):
        breakers.failed(PAIR, ONE, index * WITHIN_S)
        assert breakers.allows(PAIR)


def test_success_resets_failure_count() -> None:
    breakers = Breakers()
    for _ in range(10):
        for _ in range(FAILURES - 1):
            breakers.failed(PAIR, ONE, 0.0)
        breakers.succeeded(PAIR)
    assert breakers.allows(PAIR)


def test_after_the_cool_down_one_request_tries_it() -> None:
    breakers = opened()
    assert breakers.tick(FIRST_COOL_DOWN_S)
    assert breakers.state(PAIR) is BreakerState.HALF_OPEN
    breakers.placed(PAIR, ONE)
    assert not breakers.allows(PAIR), "the second of two simultaneous requests goes elsewhere"
    breakers.succeeded(PAIR)
    assert breakers.allows(PAIR) and breakers.open == 0


def test_a_probe_that_fails_doubles_the_cool_down_to_a_limit() -> None:
    breakers, now, waited = opened(), 0.0, []
    for _ in range(8):
        start = now
        while not breakers.tick(now):
            now += 0.25
        waited.append(now - start)
        breakers.placed(PAIR, ONE)
        breakers.failed(PAIR, ONE, now)
        assert not breakers.allows(PAIR)
    assert waited == [1, 2, 4, 8, 16, LONGEST_COOL_DOWN_S, LONGEST_COOL_DOWN_S, LONGEST_COOL_DOWN_S]


def test_a_probe_whose_client_leaves_lets_the_next_one_try() -> None:
    breakers = opened()
    breakers.tick(FIRST_COOL_DOWN_S)
    breakers.placed(PAIR, ONE)
    breakers.dropped(PAIR, ONE)
    assert breakers.allows(PAIR)


def test_late_failures_do_not_prolong_a_cool_down() -> None:
    breakers = opened()
    breakers.failed(PAIR, ONE, FIRST_COOL_DOWN_S / 2)
    assert breakers.tick(FIRST_COOL_DOWN_S)


def test_earlier_request_does_not_decide_half_open_breaker() -> None:
    breakers = opened()
    breakers.tick(FIRST_COOL_DOWN_S)
    breakers.failed(PAIR, TWO, FIRST_COOL_DOWN_S)
    assert breakers.state(PAIR) is BreakerState.HALF_OPEN and breakers.allows(PAIR)
    breakers.placed(PAIR, ONE)
    breakers.dropped(PAIR, TWO)
    breakers.failed(PAIR, TWO, FIRST_COOL_DOWN_S)
    assert not breakers.allows(PAIR) and breakers.state(PAIR) is BreakerState.HALF_OPEN, "it still tries"
    breakers.failed(PAIR, ONE, FIRST_COOL_DOWN_S)
    assert breakers.state(PAIR) is BreakerState.OPEN


def test_a_worker_that_is_gone_takes_its_breakers_along() -> None:
    breakers = opened()
    breakers.forget(Incarnation("e"))
    assert breakers.open == 1
    breakers.forget(PAIR.decode)
    assert breakers.open == 0 and breakers.allows(PAIR)


@given(st.lists(st.sampled_from(["placed", "failed", "succeeded", "dropped", "tick"]), max_size=60))
def test_whatever_happened_it_heals(events: list[str]) -> None:
    """After any history a pair is allowed again once the longest cool-down is over and its probe has ended."""
    breakers, now = Breakers(), 0.0
    for event in events:
        now += 0.3
        match event:
            case "tick":
                breakers.tick(now)
            case "failed":
                breakers.failed(PAIR, ONE, now)
            case "succeeded":
                breakers.succeeded(PAIR)
            case _:
                getattr(breakers, event)(PAIR, ONE)
    breakers.dropped(PAIR, ONE)
    breakers.tick(now + LONGEST_COOL_DOWN_S)
    assert breakers.allows(PAIR)
    breakers.succeeded(PAIR)
    assert breakers.open == 0
