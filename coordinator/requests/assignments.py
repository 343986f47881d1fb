"""Which requests are on which workers, and the capacity reserved for them there.

Owns the index by worker, ``record.sent``, ``record.promise``, ``record.pair`` and ``record.excluded_pairs``. An
assignment is entered in the router's ledger, the retry budget and the circuit breakers, and :meth:`Assignments.release`
takes it out of all of them. Does not know where a request should go, or why it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.core.ids import Incarnation, RequestId, TransferId, pack_transfers
from common.net.messages import Abort, Lease, Message
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import WorkerHandle
from coordinator.requests.admission import RetryBudget
from coordinator.requests.record import RequestRecord
from coordinator.requests.state import State
from coordinator.routing.breakers import Pair, SingleWorker
from coordinator.routing.router import Placement, Router


class Assignments:
    """Books requests on workers, sends their messages, and clears what was booked."""

    def __init__(self, gateway: Gateway, router: Router) -> None:
        self.budget = RetryBudget()
        self._gateway, self._router = gateway, router
        self._breakers = router.breakers
        self._on: dict[Incarnation, dict[RequestId, RequestRecord]] = {}
        """The requests that were sent to each worker."""

    def on(self, worker: Incarnation) -> Mapping[RequestId, RequestRecord]:
        """Return the requests that were sent to the worker and have not left it."""
        return self._on.get(worker, {})

    def assign(self, record: RequestRecord, placement: Placement, now: float) -> None:
        """Book the placement. Must directly follow the router's decision, so that no other promise comes in between."""
        progress = record.progress
        if progress.attempt:
            self.budget.placed(record.id)
        record.placement, record.path = placement, placement.path
        record.promise = self._router.promise(record.demand(), placement)
        if record.placed_at is None:
            record.placed_at = now
        prefill, decode = placement.prefill, placement.decode
        progress.place(placement.path, prefill.id if prefill else None, decode.id)
        for incarnation in progress.workers:
            self._breakers.placed(SingleWorker(incarnation), record.id)
        if prefill is not None:
            record.pair = Pair(prefill.id, decode.id)
            self._breakers.placed(record.pair, record.id)

    def send(self, record: RequestRecord, worker: WorkerHandle, message: Message) -> bool:
        """Send a message about the request to one of its workers; return False if it cannot be reached."""
        reached = self._gateway.send(worker, message)
        if reached:
            record.sent[worker.id] = self._gateway.sent[worker.id]
            self._on.setdefault(worker.id, {})[record.id] = record
        return reached

    def abort(self, workers: Iterable[Incarnation], message: Abort) -> None:
        """Send an Abort to those of the workers that are still there."""
        for incarnation in workers:
            if (worker := self._gateway.registry.get(incarnation)) is not None:
                self._gateway.send(worker, message)

    def release(self, record: RequestRecord) -> None:
        """Remove a request that has left its workers from the ledger, the retry budget, the circuit breakers and the
        index by worker. The caller then schedules a pass over the queue."""
        self.budget.settled(record.id)
        if record.pair is not None:
            self._breakers.dropped(record.pair, record.id)
            record.pair = None
        if record.promise is not None:
            self._router.release(record.promise)
            record.promise = None
        for incarnation in record.sent:
            self._breakers.dropped(SingleWorker(incarnation), record.id)
            self._on.get(incarnation, {}).pop(record.id, None)
        record.sent.clear()
        record.missed_beats.clear()

    def forget(self, worker: Incarnation) -> list[RequestRecord]:
        """Remove a worker that is gone from the index and return the requests that were sent to it."""
        return list(self._on.pop(worker, {}).values())

    def hand_off_accepted(self, record: RequestRecord) -> bool:
        """Report the accepted hand-off of a request that is decoding to the circuit breaker of its pair and to its
        timeline, once. Return whether that closes the breaker."""
        if record.pair is None or record.progress.state is not State.DECODING:
            return False
        record.timeline.land(self._gateway.clock())
        closes = self._breakers.succeeded(record.pair)
        record.pair = None
        return closes

    def hand_off_failed(self, record: RequestRecord) -> bool:
        """Report a failed hand-off to the circuit breaker of its pair, which the request avoids from now on. Return
        False if none is in progress."""
        if record.pair is None:
            return False
        self._breakers.failed(record.pair, record.id, self._gateway.clock())
        record.excluded_pairs |= {record.pair}
        record.pair = None
        return True

    def renew_leases(self) -> None:
        """Send every worker a Lease that lists what it may hold. A worker frees what is not listed, and frees
        everything when its leases stop."""
        registry = self._gateway.registry
        for worker in list(registry):
            live = pack_transfers(
                TransferId(record.id, record.progress.attempt) for record in self.on(worker.id).values()
            )
            if self._gateway.send(worker, Lease(live, self._gateway.sent[worker.id] + 1)):
                registry.leased(worker, self._gateway.clock())
