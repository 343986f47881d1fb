"""Lanes: the retry time that a full lane names, and the limits of each lane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.core.errors import RequestError
from coordinator.requests.admission import RETRY_JITTER
from coordinator.text import lanes
from coordinator.text.lanes import (
    BODIES,
    INLINE_BYTES,
    INLINE_OBJECTS,
    INLINE_VALUES,
    LONG,
    SHORT,
    Bounds,
    Lane,
    is_small,
)

CHARS, STEP_S = 100, 2.0


class StepClock:
    """A stand-in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += STEP_S


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("test", Bounds(texts=2, chars=1 << 20))
    yield lane
    lane.close()


async def test_lane_retry_time_equals_time_of_queued_work(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock()
    monkeypatch.setattr(lanes, "time", clock)
    for _ in range(300):
        await lane.only_step(CHARS, clock.work)
    with lane.admitted(5 * CHARS), lane.admitted(2 * CHARS), pytest.raises(RequestError) as refused:
        await lane.only_step(CHARS, clock.work)
    assert refused.value.status == 429
    assert refused.value.retry_after_s == pytest.approx(7 * STEP_S / (1 - RETRY_JITTER), rel=0.01)


@pytest.mark.parametrize(
    ("body", "small"),
    [
        (b'{"prompt": "%s"}' % (b"a word, " * 900), True),
        (b'{"prompt": "%s"}' % (b"x" * INLINE_BYTES), False),
        (b'{"x": [%s]}' % (b"{}," * (INLINE_OBJECTS - 1)), True),
        (b'{"x": [%s]}' % (b"{}," * INLINE_OBJECTS), False),
        (b'{"x": [%s]}' % (b"1," * (INLINE_VALUES - 2)), True),
        (b'{"x": [%s]}' % (b"1," * INLINE_VALUES), False),
        (b'{"x": %s1,2%s}' % (b"[" * 60, b"]" * 60), True),
        (b'{"x": %s%s%s}' % (b"[" * 60, b"1," * 300, b"]" * 60), False),
        *((b'{"arguments": "%s"}' % sign, False) for sign in (rb"\u002c", rb"\u005B", rb"\u007b")),
        (rb'{"content": "\u00e9\u003c\u0026\u4f60"}', True),
    ],
)
def test_bodies_that_may_be_much_work_leave_the_event_loop(body: bytes, small: bool) -> None:
    assert is_small(body) == small


@pytest.mark.parametrize(
    ("body", "small"),
    [
        (b'{"prompt": [%s1]}' % (b"1," * 5 * INLINE_VALUES), True),
        (rb'{"prompt": "\u002c"}', True),
        (b'{"prompt": [%s1]}' % (b"1," * (INLINE_BYTES // 2)), False),
        (b'{"prompt": [%s]}' % (b"{}," * INLINE_OBJECTS), False),
        (b'{"prompt": [%s]}' % (b"[]," * INLINE_VALUES), False),
    ],
)
def test_bodies_without_a_template_may_have_more_values(body: bytes, small: bool) -> None:
    assert is_small(body, templated=False) == small


def test_the_bounds_of_lanes() -> None:
    """The limits are those that the threat model names."""
    assert (Bounds(256, 4 << 20, by_size=True), Bounds(256, 16 << 20, by_size=True)) == (SHORT, BODIES)
    assert Bounds(64, 16 << 20) == LONG
