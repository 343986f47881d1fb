"""The order of the queue, and stale entries in it."""

from __future__ import annotations

from typing import cast

import pytest

from common.core.ids import new_request_id
from common.core.request import SamplingParams
from coordinator.requests.queue import RequestQueue
from coordinator.requests.record import Client, RequestRecord


def queued(queue: RequestQueue, priority: int = 0) -> RequestRecord:
    """Queue a new request."""
    sampling, client = SamplingParams(4, 0), cast(Client, None)
    record = RequestRecord(new_request_id(), b"", sampling, 1, "", priority, {}, client, 0.0, 0.0, 60.0)
    queue.number(record)
    queue.push(record)
    return record


def taken(queue: RequestQueue) -> list[RequestRecord]:
    """Take all requests out of the queue."""
    found = []
    while (record := queue.first()) is not None:
        found.append(queue.pop())
        queue.leave(record)
    return found


def test_requests_are_ordered_by_priority_and_arrival() -> None:
    queue = RequestQueue()
    second, third, first = (queued(queue, priority) for priority in (0, 0, -1))
    assert queue.in_order() == [first, second, third]
    assert taken(queue) == [first, second, third]
    assert not queue and not any(each.queued for each in (first, second, third))


def test_a_request_that_is_queued_again_gets_its_old_place() -> None:
    queue = RequestQueue()
    first, second = queued(queue), queued(queue)
    assert queue.pop() is first
    queue.leave(first)
    queue.push(first)
    assert taken(queue) == [first, second]


def test_requests_that_are_put_back_were_queued_all_the_time() -> None:
    queue = RequestQueue()
    first, second = queued(queue), queued(queue)
    aside = queue.pop()
    assert aside is first and first.queued and queue.first() is second
    queue.put_back([aside])
    assert taken(queue) == [first, second]


@pytest.mark.parametrize("leavers", [3, 1000])
def test_requests_that_leave_from_behind_the_front_do_not_accumulate(leavers: int) -> None:
    queue = RequestQueue()
    first = queued(queue)
    for record in [queued(queue) for _ in range(leavers)]:
        queue.leave(record)
    assert queue.waiting() == queue.in_order() == [first]
    assert len(queue) < 100
    assert taken(queue) == [first]
