"""The admitted requests that have not ended.

Owns the records by request id, the timelines, the deadline timers and the only way to an end: done, aborted or failed,
each with everything that the request held released. Also moves requests into and out of the queue, so that the queue,
admission and the pings agree. Does not know how requests are placed or what workers send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from common.core.errors import RequestError
from common.net.messages import Abort
from coordinator.metrics import Metrics
from coordinator.requests.admission import Admission
from coordinator.requests.assignments import Assignments
from coordinator.requests.errors import internal
from coordinator.requests.ping_rounds import PingRounds
from coordinator.requests.placement_timer import PlacementTimer
from coordinator.requests.queue import RequestQueue
from coordinator.requests.record import RequestRecord
from coordinator.requests.residence import Running
from coordinator.requests.state import State
from coordinator.requests.timeline import Timelines

log = logging.getLogger("tandem.dispatch")


class ActiveRequests:
    """Opens, queues and ends requests. ``records`` holds those that have not ended."""

    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        queue: RequestQueue,
        timer: PlacementTimer,
        pings: PingRounds,
        assignments: Assignments,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self.records: dict[bytes, RequestRecord] = {}
        self.timelines = Timelines()
        self._admission, self._metrics = admission, metrics
        self._queue, self._timer, self._pings, self._assignments = queue, timer, pings, assignments
        self._loop, self._clock = loop, clock

    def running(self) -> Iterator[Running]:
        """Yield the requests that are on workers."""
        now = self._clock()
        for record in self.records.values():
            if record.placed_at is not None and not record.queued:
                yield Running(now - record.placed_at, record.limit_s)

    def open(self, record: RequestRecord, now: float) -> None:
        """Queue an admitted request and start its deadline."""
        self._queue.number(record)
        self.records[record.id] = record
        record.timer = self._loop.call_later(record.deadline_at - now, self._expire, record)
        self._queue.push(record)
        self.timelines.open(record.timeline, record, now)

    def leave_queue(self, record: RequestRecord, *, placed: bool) -> None:
        """Note that a queued request waits no longer, because it is placed or has ended."""
        self._queue.leave(record)
        self._pings.forget(record)
        self._admission.leave(record.prompt_length, self._clock(), placed=placed, priority=record.priority)

    def requeue(self, record: RequestRecord, delay_s: float) -> None:
        """Queue a request again for a new attempt, which is not placed before ``delay_s`` seconds have passed."""
        self._admission.back(record.prompt_length, priority=record.priority)
        self._queue.push(record)
        record.not_before = self._clock() + delay_s
        self._timer.soon()

    def abort(self, record: RequestRecord) -> None:
        """End a request whose client has left or wants no more output. Idempotent; ignores a request that was not
        admitted."""
        if record.id in self.records:
            self._end(record, State.ABORTED, send_abort=True)
            self._metrics.ended(record, "aborted")

    def fail(self, record: RequestRecord, error: RequestError) -> None:
        """End the request with an error that is sent to the client. Idempotent."""
        if not record.progress.over:
            record.timeline.fail(error)
            self._end(record, State.FAILED, send_abort=True)
            self._metrics.ended(record, "failed")
            record.client.failed(record, error)

    def finish(self, record: RequestRecord) -> None:
        """End a request whose choices have all ended. Its workers get an Abort if one of them may hold something of it
        and does not know of the end."""
        progress = record.progress
        on_prefill = progress.path == "disagg" and progress.state is not State.DECODING
        if on_prefill:
            record.path = "prefill"
        self._end(record, State.DONE, send_abort=record.cut or on_prefill)
        self._metrics.ended(record, "done")
        if record.placed_at is not None:
            self._admission.served(self._clock() - record.placed_at)
        try:
            record.client.done(record)
        except Exception:  # the client would wait for ever, and messages that have arrived would stay unread
            log.exception("the end of an answer could not be written", extra=record.log_fields)
            record.client.failed(record, internal())

    def _expire(self, record: RequestRecord) -> None:
        if record.placed_at is not None:
            self._admission.served(self._clock() - record.placed_at)
        waiting = (
            "waiting for a worker" if record.progress.state is State.QUEUED else f"still {record.progress.state.value}"
        )
        self.fail(
            record,
            RequestError(
                f"The request's deadline passed while it was {waiting}.",
                status=504,
                type="timeout_error",
                code="request_timeout",
            ),
        )

    def _end(self, record: RequestRecord, state: State, *, send_abort: bool) -> None:
        """Move the request to a terminal state and release all that it holds. Every request ends through here."""
        if record.queued:
            self.leave_queue(record, placed=False)
        elif record.placed_at is not None:
            self._admission.freed(self._clock() - record.placed_at)
        if send_abort:
            self._assignments.abort(record.progress.workers, Abort(record.id, record.progress.attempt))
        record.progress.move(state)
        record.finished_at = self._clock()
        self.timelines.end(record.timeline, record.finished_at)
        self._assignments.release(record)
        if record.timer is not None:
            record.timer.cancel()
        self.records.pop(record.id, None)
        self._timer.soon()
