"""Which request caused a worker's crash, if any did.

A request that crashes every worker it is placed on must not take the whole cluster with it. Owns the suspects of each
worker that may have crashed and ``record.pending_crash_verdict``; the crashes that a request has met are counted by
:mod:`coordinator.requests.state`. Does not know how a worker's death is found out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from common.core.ids import Incarnation
from coordinator.cluster.events import Loss
from coordinator.cluster.registry import WorkerHandle
from coordinator.requests.active import ActiveRequests
from coordinator.requests.errors import given_up, quarantined
from coordinator.requests.ping_rounds import PingRounds
from coordinator.requests.placement_timer import PlacementTimer
from coordinator.requests.record import RequestRecord
from coordinator.requests.recovery import Recovery

log = logging.getLogger("tandem.dispatch")


class CrashVerdicts:
    """Holds suspected requests until the death of their worker is confirmed or refuted, then fails or clears them."""

    def __init__(self, active: ActiveRequests, recovery: Recovery, pings: PingRounds, timer: PlacementTimer) -> None:
        self._active, self._recovery, self._pings, self._timer = active, recovery, pings, timer
        self._suspects: dict[Incarnation, list[RequestRecord]] = {}
        """For each worker that may have crashed, the requests suspected as the cause, until its death is confirmed or
        refuted."""

    def worker_missing(self, worker: WorkerHandle, records: Sequence[RequestRecord]) -> None:
        """Retry the requests of a worker that may have crashed, and note which of them are suspected as the cause. Not
        suspected are requests that a worker got after a Ping that it never answered: it had died before."""
        dead_before = {record.id for record in records if self._pings.dead_before(worker, record)}
        suspects = [each for each in records if each.id not in dead_before and each.progress.on_worker_lost(worker.id)]
        if suspects:
            self._suspects[worker.id] = suspects
        for record in suspects:
            record.pending_crash_verdict = worker.id
        for record in records:
            free = record.id in dead_before or record.progress.on_worker_unconfirmed(worker.id)
            self._recovery.retry(record, worker, Loss.MISSING.value, free=free)
        self._pings.ask(records)

    def worker_died(self, worker: Incarnation) -> None:
        """Settle the suspicions about a worker whose death is confirmed.

        If one suspect was involved in more crashes than every other, it is taken to be the cause and fails. Several
        with equally many are retried apart from each other, so that the next crash identifies the cause.
        """
        for record in self._active.records.values():
            record.progress.on_worker_died(worker)
        suspects = self._suspects.pop(worker, [])
        most = max((len(record.progress.crashes) for record in suspects), default=0)
        foremost = [record for record in suspects if len(record.progress.crashes) == most]
        if len(foremost) == 1 and foremost[0].pending_crash_verdict == worker:
            cause, names = foremost[0], ", ".join(sorted(foremost[0].progress.crashes))
            log.warning(
                "request %s is not retried: the workers that served it died (%s)", cause.id.hex(), names,
                extra=cause.log_fields,
            )  # fmt: skip
            self._active.fail(foremost[0], quarantined())
        self._acquit([record for record in suspects if record.pending_crash_verdict == worker])

    def worker_reconnected(self, worker: Incarnation) -> None:
        """Clear the requests suspected of crashing a worker that only had lost its connection."""
        self._suspects.pop(worker, None)
        records = self._active.records.values()
        for record in records:
            record.progress.on_worker_reconnected(worker)
        waiting = [record for record in records if record.pending_crash_verdict is not None]
        self._acquit(
            [record for record in waiting if record.pending_crash_verdict == worker or not record.progress.suspect]
        )

    def _acquit(self, records: Iterable[RequestRecord]) -> None:
        """Let the requests be placed again, or fail those whose retry budget is spent."""
        for record in records:
            record.pending_crash_verdict = None
            if record.progress.spent:
                self._active.fail(record, given_up())
        self._timer.soon()
