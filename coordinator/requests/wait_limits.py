"""How long requests wait for workers that are not there.

Owns the time until which workers of a previous coordinator may still join, and ``record.awaiting_reconnect``. Ends
waits that are too long; a full queue is :mod:`coordinator.requests.admission`, and workers that are busy are waited for
until the deadline. Does not place requests.
"""

from __future__ import annotations

from math import inf

from common.core.errors import RequestError
from common.net.messages import Role
from coordinator.cluster.gateway import Gateway
from coordinator.requests.active import ActiveRequests
from coordinator.requests.errors import no_workers, outgrown, prompt_too_long, too_large
from coordinator.requests.placement_timer import PlacementTimer
from coordinator.requests.queue import RequestQueue
from coordinator.requests.record import RequestRecord
from coordinator.routing.router import Router

WORKERLESS_WAIT_S = 10.0
"""How long an admitted request waits when a role has no worker left, or when the workers that are left are too small
for it. A request with output waits a lease longer, because a hung worker is replaced only when its lease has expired;
one whose client has seen output waits until its deadline while a role has no worker."""
REJECTED_WAIT_S = 0.5
"""WORKERLESS_WAIT_S for the case that prefill workers are missing and the policy is to reject."""


class WaitLimits:
    """Fails queued requests that no worker can take and that have waited long enough for one."""

    def __init__(
        self,
        gateway: Gateway,
        router: Router,
        queue: RequestQueue,
        timer: PlacementTimer,
        active: ActiveRequests,
        starting_wait_s: float,
    ) -> None:
        """``starting_wait_s``: for how long after the coordinator's start new requests wait for the first worker of a
        role instead of failing."""
        self._gateway, self._registry, self._clock = gateway, gateway.registry, gateway.clock
        self._router, self._queue, self._timer, self._active = router, queue, timer, active
        self._times, self._starting_wait_s = gateway.registry.times, starting_wait_s
        self._rejoin_until = -inf
        """Until this time, workers of a previous coordinator may still join."""

    def start(self, now: float) -> None:
        """Note the start of the coordinator."""
        self._rejoin_until = now + self._starting_wait_s - self._times.sweep_s  # the next sweep fails waiting requests

    def may_come(self, role: Role, now: float, *, draining: bool = False) -> bool:
        """Return whether a worker that does the work of ``role`` may join in a moment: one whose connection has broken,
        or, shortly after the start and while none has joined, one of the previous coordinator. A drain does not wait
        for the latter."""
        rejoining = now < self._rejoin_until and not self._registry.had(role) and not draining
        return rejoining or self._gateway.may_return(role)

    def size_error(self, record: RequestRecord) -> RequestError | None:
        """Return the error for a request that none of the known workers could hold even if idle, else None."""
        demand = record.demand()
        roomiest = self._router.roomiest(demand)
        if roomiest is not None and demand.room(roomiest) < demand.least:
            return too_large(demand, roomiest, record.prompt_length)
        longest = self._router.longest_prompt()
        return None if longest is None or demand.tokens <= longest else prompt_too_long(demand.tokens, longest)

    def worker_joined(self) -> None:
        """If no role lacks a worker any more, let requests that were admitted for want of one wait as others do."""
        if self._router.missing_role() is None:
            for record in self._active.records.values():
                record.awaiting_reconnect = False

    def look(self, now: float, workerless_since: float | None, *, draining: bool) -> None:
        """Fail the requests that have waited too long. ``workerless_since``: since when no pass over the queue finds a
        worker of some role; None if the last one did."""
        if workerless_since is not None:
            self._give_up_waiting(now - workerless_since, draining=draining)
        self._give_up_stranded(now)

    def _give_up_waiting(self, waited_s: float, *, draining: bool) -> None:
        """Fail the queued requests that have waited too long for the first worker of a role."""
        role = self._router.missing_role()
        if role is None or self.may_come(role, self._clock(), draining=draining):
            return
        least_s = REJECTED_WAIT_S if role == "prefill" else WORKERLESS_WAIT_S
        for record in self._queue.in_order():
            if record.queued and waited_s > self._patience_s(record, least_s):
                self._active.fail(record, no_workers(role, starting=self._registry.starting(role)))

    def _give_up_stranded(self, now: float) -> None:
        """Fail the queued requests that are too large for the ready workers, once they have waited long enough for
        larger ones. A request without an output limit first accepts a truncated output."""
        longest_s = self._times.lease_s + WORKERLESS_WAIT_S
        for record in self._queue.waiting():
            if record.unplaceable_since is None or not record.queued:
                continue
            if self._router.could_serve(demand := record.demand()):
                record.unplaceable_since = None
            elif now - record.unplaceable_since <= min(longest_s, self._patience_s(record, WORKERLESS_WAIT_S)):
                continue
            elif record.open_ended and not record.accepts_truncation:
                record.accepts_truncation = True
                self._timer.soon()
            else:
                reason = None if record.progress.started else self.size_error(record)
                self._active.fail(record, reason or outgrown(demand.tokens + demand.least))

    def _patience_s(self, record: RequestRecord, least_s: float) -> float:
        """Return how many seconds a request waits while no worker can take it."""
        if record.awaiting_reconnect:
            return 0.0
        if not record.progress.started:
            return least_s
        return inf if record.client.partly_sent else self._times.lease_s + WORKERLESS_WAIT_S
