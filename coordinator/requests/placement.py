"""Passes over the queue: which queued requests are placed on workers now, and which wait.

Owns the order of the reasons to wait, and since when a pass has found no worker at all. The choice of workers is the
router's (:mod:`coordinator.routing.router`). Does not know when a pass runs, or how long a request may wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import msgspec

from common.core.errors import InvariantBroken
from common.core.request import Request, SamplingParams
from common.net.messages import Generate, Message, Prefill, Reserve
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.peers import introduce
from coordinator.cluster.registry import WorkerHandle
from coordinator.requests.active import ActiveRequests
from coordinator.requests.assignments import Assignments
from coordinator.requests.ping_rounds import PingRounds
from coordinator.requests.placement_timer import PlacementTimer
from coordinator.requests.queue import RequestQueue
from coordinator.requests.record import RequestRecord
from coordinator.requests.recovery import Recovery
from coordinator.requests.state import State
from coordinator.routing.router import Demand, NoWorkers, Placement, Router, Wait


class _Stays(NamedTuple):
    """The decision that a request stays in the queue because of ``why``. ``ends_pass``: later requests must not
    overtake it. ``workerless``: whether a role has no worker at all; None if that was not looked at."""

    why: str
    ends_pass: bool
    workerless: bool | None = None


_ON_TRIAL = _Stays("a worker that computed it may have crashed; waiting until that is known", ends_pass=False)
_PINGED = _Stays("waiting for the other workers to answer a ping", ends_pass=True)
_DELAYED = _Stays("waiting before the retry", ends_pass=False)
_OVER_BUDGET = _Stays("too many requests are being retried", ends_pass=False)


class Placer:
    """Places queued requests. ``workerless_since`` is the time of the first of the latest passes that found a role
    without a worker; None if the last pass did not."""

    def __init__(
        self,
        gateway: Gateway,
        router: Router,
        queue: RequestQueue,
        timer: PlacementTimer,
        pings: PingRounds,
        assignments: Assignments,
        active: ActiveRequests,
        recovery: Recovery,
    ) -> None:
        self.workerless_since: float | None = None
        self._router, self._queue, self._timer, self._pings = router, queue, timer, pings
        self._assignments, self._active, self._recovery = assignments, active, recovery
        self._clock = gateway.clock

    def run_pass(self) -> None:
        """Place queued requests in order until one does not fit; it stays ahead of later ones.

        These requests are skipped, so that later ones may go first: one that no ready worker could hold even if idle
        (larger workers may come back); a retry whose delay is not over or for which the retry budget has no room; one
        suspected of a crash that is not confirmed or refuted yet; a suspect for which every worker is taken by other
        suspects. A request that has just lost its worker and waits for answers to a Ping is not skipped: it keeps its
        place, and the pass ends.
        """
        workerless, now = False, self._clock()
        aside: list[RequestRecord] = []
        moments: list[float] = []
        try:
            while (record := self._queue.first()) is not None:
                decision = self._decide(record, now)
                if isinstance(decision, Placement):
                    self._active.leave_queue(self._queue.pop(), placed=True)
                    self._place(record, decision)
                    record.end_wait()
                    continue
                record.timeline.wait(now, decision.why)
                if decision.workerless is not None:
                    workerless = decision.workerless
                moments.append(record.not_before)
                if decision.ends_pass:
                    break
                aside.append(self._queue.pop())
        finally:  # also if placing a request raises
            self._queue.put_back(aside)
        self._timer.at(min((moment for moment in moments if moment > now), default=None))
        if not workerless:
            self.workerless_since = None
        elif self.workerless_since is None:
            self.workerless_since = self._clock()

    def _decide(self, record: RequestRecord, now: float) -> Placement | _Stays:
        """Return where the request goes now, or that it stays in the queue."""
        if record.pending_crash_verdict is not None:
            return _ON_TRIAL
        if record.not_before > now and self._pings.awaited_by(record):
            return _PINGED
        if record.progress.attempt:
            if record.not_before > now:
                return _DELAYED
            if not self._assignments.budget.allows(len(self._active.records)):
                return _OVER_BUDGET
        verdict = self._router.place(self._demand(record))
        if isinstance(verdict, Wait) and not self._router.could_serve(record.demand()):
            record.unplaceable_since = record.unplaceable_since or now
            return _Stays(f"waiting for a larger worker: {verdict.why}", ends_pass=False)
        if isinstance(verdict, Placement):
            if record.progress.crashes and self._pings.outdated(record):
                self._pings.ask([record])
                return _PINGED
            return verdict
        workerless = isinstance(verdict, NoWorkers)
        why = verdict.why if isinstance(verdict, Wait) else f"no {verdict.role} worker is ready"
        if record.progress.suspect:
            self._pings.outdate(record)
            return _Stays(why, ends_pass=False, workerless=True if workerless else None)
        self._pings.note_shortage()
        return _Stays(why, ends_pass=True, workerless=workerless)

    def _demand(self, record: RequestRecord) -> Demand:
        """Return the demand of a request. A suspect is kept apart from the workers of all other suspects."""
        demand = record.demand()
        if not record.progress.suspect:
            return demand
        suspects = [
            other.progress for other in self._active.records.values() if other is not record and other.progress.suspect
        ]
        return replace(demand, apart_from=frozenset(worker for progress in suspects for worker in progress.workers))

    def _place(self, record: RequestRecord, placement: Placement) -> None:
        """Send the request to its workers, Prefill and Reserve together. Must directly follow the router's decision, so
        that no other promise comes in between."""
        progress, now = record.progress, self._clock()
        self._assignments.assign(record, placement, now)
        record.timeline.place(now, placement)
        prefill, decode = placement.prefill, placement.decode
        request = self._request(record, decode, now)
        messages: list[tuple[WorkerHandle, Message]]
        if prefill is None:
            messages = [(decode, Generate(request, progress.attempt))]
        else:
            to_decode, to_prefill = introduce(prefill, decode)
            # Prefill first: the first token depends on it, and a message wakes two threads before the next one leaves
            messages = [
                (prefill, Prefill(request, progress.attempt, to_prefill)),
                (decode, Reserve(request, progress.attempt, to_decode)),
            ]
        for worker, message in messages:
            if not self._assignments.send(record, worker, message):
                self._recovery.retry(record, worker, "it could not be reached")
                return
        progress.move(State.PREFILLING)

    def _request(self, record: RequestRecord, decode: WorkerHandle, now: float) -> Request:
        return Request(
            id=record.id,
            prompt=record.prompt,
            sampling=_sampling_on(decode, record),
            n=record.n,
            emitted=record.progress.emitted(),
            cache_salt=record.cache_salt,
            priority=record.priority,
            deadline_ms=max(1, int((record.deadline_at - now) * 1000)),
            ended=tuple(choice for choice, finish in enumerate(record.progress.finish) if finish),
            scored=record.progress.scored,
        )


def _sampling_on(decode: WorkerHandle, record: RequestRecord) -> SamplingParams:
    """Return the sampling parameters for a request on ``decode``. Without a client's limit, ``max_tokens`` is reduced
    to what the worker can hold. A prefill worker holds no output."""
    sampling, demand = record.sampling, record.demand()
    if decode.role == "prefill":
        return sampling
    if (missing := demand.output - demand.room(decode.hello)) <= 0:
        return sampling
    if not record.open_ended:
        raise InvariantBroken(f"{decode.hello.name} is {missing} tokens too small for a request placed on it")
    most = sampling.max_tokens - missing
    return msgspec.structs.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
