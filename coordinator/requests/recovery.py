"""New attempts of requests whose attempt failed.

Owns the way back into the queue: the charge to the request's retry budget, the Abort to its workers, the delay, and the
workers that it avoids from then on. Does not know how a failure is noticed; a crash that a request may have caused is
judged by :mod:`coordinator.requests.crash_verdicts`.
"""

from __future__ import annotations

import logging

from common.net.messages import Abort, RequestFailed
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import WorkerHandle
from coordinator.metrics import Metrics
from coordinator.requests.active import ActiveRequests
from coordinator.requests.assignments import Assignments
from coordinator.requests.errors import given_up, worker_error
from coordinator.requests.record import RequestRecord
from coordinator.routing.breakers import Breakers, SingleWorker

log = logging.getLogger("tandem.dispatch")

RETRY_DELAY_S = 0.1
"""Delay before a retry after a worker reported a failure, because an immediate retry would meet the same conditions."""
MAX_WHY = 256
"""Most characters of a worker's reason that a timeline keeps."""


class Recovery:
    """Retries requests, or fails them when their budget is spent."""

    def __init__(
        self,
        gateway: Gateway,
        breakers: Breakers,
        metrics: Metrics,
        active: ActiveRequests,
        assignments: Assignments,
    ) -> None:
        self._registry, self._clock = gateway.registry, gateway.clock
        self._breakers, self._metrics = breakers, metrics
        self._active, self._assignments = active, assignments

    def retry(
        self,
        record: RequestRecord,
        worker: WorkerHandle,
        why: str,
        *,
        free: bool = False,
        blamed: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        """Give up the current attempt, which was lost with ``worker`` because of ``why``, and queue the request again,
        or fail it if its retry budget is spent. ``blamed``: the worker lives and caused the loss, and is avoided from
        now on; ``free`` as in :meth:`RequestState.retry`; ``delay_s`` delays the next placement."""
        if blamed:
            record.excluded_workers |= {worker.id}
        progress = record.progress
        workers, attempt, migrates = progress.workers, progress.attempt, progress.started
        if progress.retry(on_trial=record.pending_crash_verdict is not None, free=free) == "spent":
            self._active.fail(record, given_up())
            return
        record.timeline.lose(self._clock(), worker.hello.name, why, migrates=migrates)
        self._assignments.abort(workers, Abort(record.id, attempt))
        self._assignments.release(record)
        self._metrics.set_back(migration=migrates)
        self._active.requeue(record, delay_s)

    def failed_by(self, worker: WorkerHandle, record: RequestRecord, why: str, *, delay_s: float = 0.0) -> None:
        """Retry a request that ``worker`` failed, as ``why`` says, while staying alive. If the worker's circuit breaker
        is open, the retry is free once per worker: a worker that fails every request says nothing about this one."""
        peer = SingleWorker(worker.id)
        self._breakers.failed(peer, record.id, self._clock())
        free = not self._breakers.allows(peer) and worker.id not in record.excluded_workers
        self.retry(record, worker, why, free=free, blamed=True, delay_s=delay_s)

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None:
        """Retry or fail a request that ``worker`` has given up."""
        record = self._active.records.get(message.request)
        if message.code == "transfer_failed":
            self._metrics.transfer_failed(message.code)
        if record is None or message.attempt != record.progress.attempt or not record.progress.needs(worker.id):
            return
        if message.code == "draining":  # this message comes before the heartbeat that reports the drain
            self._registry.drains(worker)
            self.retry(record, worker, "it is draining", free=True)
            return
        log.warning(
            "%s failed a request: %s (%s)", worker.hello.name, message.code, message.detail, extra=record.log_fields
        )
        why = f"{message.code}: {message.detail}"[:MAX_WHY]
        if message.code == "transfer_failed" and self._assignments.hand_off_failed(record):
            self.retry(record, worker, why, delay_s=RETRY_DELAY_S)
        elif message.retriable:
            self.failed_by(worker, record, why, delay_s=RETRY_DELAY_S)
        else:
            self._active.fail(record, worker_error(message))
