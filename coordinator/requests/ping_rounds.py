"""Pings to all workers after a worker's death, and the requests that wait for the answers.

A machine that fails takes several workers with it, and a request that lost one must not be placed on another that died
at the same time. Owns ``record.asked`` and ``record.shortage``, the number of the last Ping, and the list of waiting
requests. Does not know what happens to a request when it has waited long enough.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.core.ids import RequestId
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import WorkerHandle
from coordinator.requests.record import RequestRecord

ANSWERS_S = 0.2
"""After a worker's death its requests wait this long at most for the other workers to answer a Ping, so that none is
placed on a worker that died at the same time. A request that then has to wait for capacity sends another Ping, because
workers that answered the first may have died since."""


class PingRounds:
    """Pings every worker at once, and knows which queued requests wait until all have answered."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._number = 0
        """Number of the last Ping."""
        self._waiting: dict[RequestId, RequestRecord] = {}
        self.shortages = 0
        """How often :meth:`note_shortage` was called."""

    def ask(self, records: Iterable[RequestRecord]) -> None:
        """Ping all workers; ``records`` are not placed before every worker has answered or ANSWERS_S has passed."""
        self._number, now = self._gateway.ask(), self._gateway.clock()
        for record in records:
            record.asked, record.not_before, record.shortage = self._number, now + ANSWERS_S, self.shortages
            if record.queued:
                self._waiting[record.id] = record

    def complete(self) -> bool:
        """If every worker has answered the last Ping, let the requests that wait for this be placed and return True.
        Return False if none waits."""
        if not self._waiting or any(worker.answered < self._number for worker in self._gateway.registry):
            return False
        now = self._gateway.clock()
        for record in self._waiting.values():
            record.not_before = now
        self._waiting.clear()
        return True

    def awaited_by(self, record: RequestRecord) -> bool:
        """Return whether the request waits for answers."""
        return record.id in self._waiting

    def forget(self, record: RequestRecord) -> None:
        """Note that the request has left the queue."""
        self._waiting.pop(record.id, None)

    def note_shortage(self) -> None:
        """Note that a pass over the queue stopped because no worker had capacity."""
        self.shortages += 1

    def outdated(self, record: RequestRecord) -> bool:
        """Return whether the request has waited for capacity since its workers were pinged, so that a worker which
        answered may have died since."""
        return record.shortage != self.shortages

    def outdate(self, record: RequestRecord) -> None:
        """Make the answers that the request waited for outdated: it has to wait for something else now."""
        record.shortage = -1

    @staticmethod
    def dead_before(worker: WorkerHandle, record: RequestRecord) -> bool:
        """Return whether ``worker``, which has died, never answered the Ping that was sent before it got the request:
        it was dead by then."""
        return worker.answered < record.asked
