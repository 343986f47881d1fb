"""The feed: what pages and terminals that watch the system are sent.

Three kinds of events: ``system`` once per second, ``request`` when a request changes, ``worker`` when a worker does.
All are made once for all listeners. A listener that does not read is sent nothing meanwhile: it misses snapshots, and
of requests it gets the latest state later, so that what is kept for it is bounded. Without a listener, only a sample
of the counters is taken every few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

import msgspec

from common.core.errors import RequestError
from common.core.ids import RequestId
from coordinator.cluster.worker_log import WorkerChange
from coordinator.live.history import ROW_S, History
from coordinator.live.worker_rows import link_rows, worker_rows
from coordinator.metrics import Metrics
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.errors import shutting_down
from coordinator.requests.spec import Json
from coordinator.requests.timeline import Event, Timeline
from coordinator.requests.waterfall import shown
from coordinator.telemetry.attributes import GENERATING

MAX_LISTENERS = 16
SYSTEM_S = 1.0
"""Interval between snapshots of the system."""
FLUSH_S = 0.5
"""Least interval between two writes of changes to a listener."""
FLUSHED = 10
"""Most requests of one write. One by one they would cost several times as much: each time neither the code nor the data
would be in the processor's caches, and each write wakes the client."""
MAX_PENDING = 64
"""Most requests whose latest state is kept for a listener, so that what it is sent is a few seconds old at most. For
another one, that which has waited longest is dropped: of those that run, if there are any, since they change again."""
MAX_UNREAD_BYTES = 128 << 10
"""A listener that has not read this much is sent nothing."""
MAX_ENCODED = 64
"""Most encoded states of requests that are kept for other listeners."""
RETRY_S = 5.0
OVERLOADED = frozenset((429, 503))
"""Statuses of requests that are refused because the system cannot serve them now."""

_encode = msgspec.json.Encoder().encode


class Sink(Protocol):
    """The connection of a listener."""

    @property
    def unread_bytes(self) -> int:
        """Bytes that its client has not read."""

    def send(self, data: bytes) -> None:
        """Write ``data`` without waiting."""


class Listener:
    """A listener: its connection and its unsent events. ``closed`` is done when the feed ends."""

    def __init__(self, sink: Sink, closed: asyncio.Future[None]) -> None:
        self._sink, self.closed = sink, closed
        self.requests: dict[RequestId, Timeline] = {}
        self.workers: deque[bytes] = deque(maxlen=MAX_PENDING)

    @property
    def reads(self) -> bool:
        """Whether its client keeps up."""
        return self._sink.unread_bytes <= MAX_UNREAD_BYTES

    def send(self, events: bytes) -> None:
        """Send encoded events, unless the client does not read."""
        if self.reads:
            self._sink.send(events)

    def add(self, timeline: Timeline) -> None:
        """Note that a request has changed."""
        self.requests[timeline.internal_id] = timeline
        if len(self.requests) > MAX_PENDING:
            first = next(iter(self.requests))
            del self.requests[next((id for id, each in self.requests.items() if not each.over), first)]

    def take(self, shown: Callable[[Timeline], bytes]) -> list[bytes]:
        """Remove and return the next events: all of workers, and those that ``shown`` makes of FLUSHED requests."""
        workers = [*self.workers]
        self.workers.clear()
        first = [*islice(self.requests, FLUSHED)]
        return workers + [shown(self.requests.pop(id)) for id in first]


class Feed:
    """Sends events to listeners, in the running event loop. ``model`` and ``version`` are part of each snapshot."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, model: str, version: str) -> None:
        self._dispatcher, self._model, self._version = dispatcher, model, version
        self._clock, self._loop = dispatcher.gateway.clock, asyncio.get_running_loop()
        self._listeners: list[Listener] = []
        self._encoded: dict[RequestId, tuple[int, bytes]] = {}
        self._history = History(lambda: dispatcher.accepted_tokens, metrics.inter_token_buckets)
        self._row: Json | None = None
        """The latest row of the history, if no snapshot has had it yet."""
        self._snapshots: asyncio.TimerHandle | None = None
        self._flushes: asyncio.TimerHandle | None = None
        self._flushed_at = 0.0
        self._closed = False
        dispatcher.timelines.listeners.append(self._history.saw)
        self._sample()

    def close(self) -> None:
        """Send nothing any more, and let all listeners go. Idempotent."""
        self._closed = True
        for timer in (self._samples, self._snapshots, self._flushes):
            if timer is not None:
                timer.cancel()
        for listener in self._listeners:
            if not listener.closed.done():
                listener.closed.set_result(None)

    def responded(self, endpoint: str, status: int) -> None:
        """Note an HTTP response; ``endpoint`` is the path pattern of its route."""
        if status in OVERLOADED and endpoint in GENERATING:
            self._history.refused()

    def check_room(self) -> None:
        """Raise RequestError 429 if there are as many listeners as are served, 503 if the server stops."""
        if self._closed:
            raise shutting_down()
        if len(self._listeners) >= MAX_LISTENERS:
            raise RequestError(
                f"{MAX_LISTENERS} clients follow the events of this server, which is the limit.",
                status=429,
                type="rate_limit_error",
                code="too_many_listeners",
                retry_after_s=RETRY_S,
            )

    def join(self, sink: Sink) -> Listener:
        """Add a listener and send it a snapshot with the history; raises as :meth:`check_room`. Call :meth:`leave` when
        its connection is closed."""
        self.check_room()
        listener = Listener(sink, self._loop.create_future())
        if not self._listeners:
            self._dispatcher.timelines.listeners.append(self._changed)
            self._dispatcher.worker_log.listener = self._worker_changed
            self._snapshots = self._loop.call_later(SYSTEM_S, self._snapshot)
        self._listeners.append(listener)
        extra: Json = {"history": list(self._history.rows), "worker_events": self._dispatcher.worker_log.changes()}
        listener.send(_event("system", self._system() | extra))
        return listener

    def leave(self, listener: Listener) -> None:
        """Remove a listener. With the last one, nothing is computed any more."""
        self._listeners.remove(listener)
        if self._listeners:
            return
        self._dispatcher.timelines.listeners.remove(self._changed)
        self._dispatcher.worker_log.listener = None
        self._encoded.clear()
        for timer in (self._snapshots, self._flushes):
            if timer is not None:
                timer.cancel()
        self._snapshots = self._flushes = None

    # -- the system ---------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        self._samples = self._loop.call_later(ROW_S, self._sample)
        waiting = self._dispatcher.admission.requests
        running = len(self._dispatcher.records) - waiting
        self._row = self._history.sample(self._clock(), time.time(), running, waiting)

    def _snapshot(self) -> None:
        self._snapshots = self._loop.call_later(SYSTEM_S, self._snapshot)
        system = self._system()
        if self._row is not None:
            system["row"], self._row = self._row, None
        event = _event("system", system)
        for listener in self._listeners:
            listener.send(event)

    def _system(self) -> Json:
        dispatcher, admission = self._dispatcher, self._dispatcher.admission
        return {
            "t": round(time.time(), 3),
            "model": self._model,
            "version": self._version,
            "draining": dispatcher.draining,
            **worker_rows(dispatcher),
            "links": link_rows(dispatcher),
            "running": len(dispatcher.records) - admission.requests,
            "queue": {"requests": admission.requests, "tokens": admission.tokens},
            **self._history.snapshot(self._clock()),
        }

    # -- changes ------------------------------------------------------------------------------------------------------

    def _changed(self, timeline: Timeline, _: Event) -> None:
        for listener in self._listeners:
            listener.add(timeline)
        self._flush_soon()

    def _worker_changed(self, change: WorkerChange) -> None:
        event = _event("worker", change)
        for listener in self._listeners:
            listener.workers.append(event)
        if self._flushes is not None:
            self._flushes.cancel()
        self._flushes = self._loop.call_later(0.0, self._flush)  # the loss of a worker must be seen at once

    def _flush_soon(self) -> None:
        """Schedule a flush, not now: the caller may be delivering a step's tokens."""
        if self._flushes is None:
            since_s = self._loop.time() - self._flushed_at
            self._flushes = self._loop.call_later(max(0.0, FLUSH_S - since_s), self._flush)

    def _flush(self) -> None:
        """Send each listener what happened to workers and FLUSHED requests, in one write."""
        self._flushes, self._flushed_at = None, self._loop.time()
        more = False
        for listener in self._listeners:
            if listener.reads:
                listener.send(b"".join(listener.take(self._shown)))
            more |= bool(listener.requests or listener.workers)
        if more:
            self._flush_soon()

    def _shown(self, timeline: Timeline) -> bytes:
        """Return the event with the present state of a request, which is encoded once for all listeners."""
        version, event = self._encoded.get(timeline.internal_id, (-1, b""))
        if version != timeline.version:
            event = _event("request", shown(timeline, intervals=timeline.over))
            if len(self._encoded) >= MAX_ENCODED:
                del self._encoded[next(iter(self._encoded))]
            self._encoded[timeline.internal_id] = timeline.version, event
        return event


def _event(name: str, data: Json | WorkerChange) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(data))
