"""What is kept for a listener that is behind."""

from __future__ import annotations

from typing import Any

from common.core.ids import RequestId
from coordinator.live.feed import MAX_PENDING, Listener
from coordinator.requests.timeline import Timeline
from tests.unit.coordinator.requests.test_timeline import FakeRecord


def changed(number: int, *, ended: bool) -> Timeline:
    timeline = Timeline()
    timeline.open(FakeRecord(id=RequestId(number.to_bytes(16, "big"))), 0.0)
    if ended:
        timeline.end(1.0)
    return timeline


def numbers(listener: Listener) -> list[int]:
    return [int.from_bytes(id, "big") for id in listener.requests]


def test_of_too_many_changes_the_ends_of_requests_are_kept() -> None:
    unused: Any = None
    listener, few, many = Listener(unused, unused), MAX_PENDING // 4, 2 * MAX_PENDING
    for number in range(many):
        listener.add(changed(number, ended=number < few))
    assert numbers(listener) == [*range(few), *range(many - MAX_PENDING + few, many)]
    for number in range(many, many + MAX_PENDING):
        listener.add(changed(number, ended=True))
    assert numbers(listener) == [*range(many, many + MAX_PENDING)], "without others, the one that waited longest goes"


def test_of_one_request_only_the_latest_state_is_kept() -> None:
    unused: Any = None
    listener, timeline = Listener(unused, unused), changed(1, ended=False)
    for _ in range(3):
        listener.add(timeline)
    assert numbers(listener) == [1]
