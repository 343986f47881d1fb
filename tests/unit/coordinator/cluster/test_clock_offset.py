"""The difference between clocks of two hosts, from heartbeats that arrive late by various delays."""

from __future__ import annotations

import pytest

from coordinator.cluster.clock_offset import KEPT, ClockOffset


@pytest.mark.parametrize("ahead_ms", [0, 2500, -40])
def test_the_heartbeat_with_the_shortest_delay_counts(ahead_ms: int) -> None:
    offset = ClockOffset()
    assert offset.ms is None
    for at, delay in enumerate((30, 2, 400, 5)):
        offset.took(1000 * at + ahead_ms + 10**12, 1000 * at + 10**12 + delay)
    assert offset.ms == ahead_ms - 2


def test_a_clock_that_is_set_is_noticed_after_some_heartbeats() -> None:
    offset = ClockOffset()
    offset.took(10**12 + 9000, 10**12)
    for at in range(KEPT):
        offset.took(10**12 + at, 10**12 + at + 1)
    assert offset.ms == -1


def test_a_heartbeat_without_a_time_says_nothing() -> None:
    offset = ClockOffset()
    offset.took(0, 10**12)
    assert offset.ms is None
