"""When a lane that is full says to come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.core.errors import RequestError
from coordinator.requests.admission import RETRY_JITTER
from coordinator.text import lanes
from coordinator.text.lanes import BODIES, LONG, SHORT, Bounds, Lane

CHARS, STEP_S = 100, 2.0


class Clock:
    """Stands in for the module ``time``."""

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


async def test_retry_times_are_what_the_lane_takes_for_what_it_holds(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(lanes, "time", clock)
    for _ in range(300):
        await lane.only_step(CHARS, clock.work)
    with lane.admitted(5 * CHARS), lane.admitted(2 * CHARS), pytest.raises(RequestError) as refused:
        await lane.only_step(CHARS, clock.work)
    assert refused.value.status == 429
    assert refused.value.retry_after_s == pytest.approx(7 * STEP_S / (1 - RETRY_JITTER), rel=0.01)


def test_the_bounds_of_lanes() -> None:
    """Those that the threat model names."""
    assert (Bounds(256, 4 << 20, by_size=True), Bounds(256, 16 << 20, by_size=True)) == (SHORT, BODIES)
    assert Bounds(64, 16 << 20) == LONG
