"""The queue of admitted requests that no worker has yet, or no longer.

Owns the order (priority, then arrival; a retried request gets its old place back) and ``record.queued``. Does not know
why a request waits, when the queue is looked through, or how many requests may be queued
(:mod:`coordinator.requests.admission`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from coordinator.requests.record import RequestRecord

_LEFTOVERS = 64
"""Number of stale entries, of requests that have left the queue, that never triggers a rebuild of the heap."""


class RequestQueue:
    """A heap of requests. The entry of a request that leaves from behind the front stays until it is found there, or
    until such stale entries make up most of the heap. ``len`` counts the stale entries too."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, RequestRecord]] = []
        self._waiting = 0
        self._orders = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def number(self, record: RequestRecord) -> None:
        """Give a new request its place behind the earlier ones of its priority."""
        record.order = next(self._orders)

    def push(self, record: RequestRecord) -> None:
        """Queue a numbered request."""
        record.queued = True
        self._waiting += 1
        self._insert(record)

    def leave(self, record: RequestRecord) -> None:
        """Note that a request is queued no longer. Its entry goes with :meth:`pop`, or later by itself."""
        record.queued = False
        self._waiting -= 1
        if len(self._entries) > 2 * self._waiting + _LEFTOVERS:  # those behind a waiting request are never popped
            self._entries = [entry for entry in self._entries if entry[2].queued]
            heapq.heapify(self._entries)

    def first(self) -> RequestRecord | None:
        """Return the request at the front, after removing the stale entries there; None if there is none."""
        while self._entries:
            record = self._entries[0][2]
            if record.queued:
                return record
            heapq.heappop(self._entries)
        return None

    def pop(self) -> RequestRecord:
        """Remove the entry at the front and return its request, which counts as queued until :meth:`leave`."""
        return heapq.heappop(self._entries)[2]

    def put_back(self, records: Iterable[RequestRecord]) -> None:
        """Insert again what :meth:`pop` has removed."""
        for record in records:
            self._insert(record)

    def waiting(self) -> list[RequestRecord]:
        """Return the queued requests, in no particular order."""
        return [entry[2] for entry in self._entries if entry[2].queued]

    def in_order(self) -> list[RequestRecord]:
        """Return the queued requests, the front first."""
        return sorted(self.waiting(), key=lambda record: (record.priority, record.order))

    def _insert(self, record: RequestRecord) -> None:
        heapq.heappush(self._entries, (record.priority, record.order, record))
