"""The dispatcher: queueing, placement, token delivery and retries of every request.

Owns the queue, the records (one per request: its state, its part of the ledger, its timestamps) and the timers. The
decisions are made by pure modules (:mod:`coordinator.requests.state`, :mod:`coordinator.requests.admission`,
:mod:`coordinator.routing.router`, :mod:`coordinator.cluster.registry`); this file carries them out through the gateway.
Knows neither text nor HTTP: tokens go to a ``Client``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import msgspec

from common.core.errors import InvariantBroken, RequestError
from common.core.ids import (
    Incarnation,
)
from common.core.request import Request, SamplingParams
from common.net.messages import (
    Generate,
    Measured,
    Prefill,
    RequestFailed,
    Reserve,
    Role,
    Timing,
    Tokens,
)
from coordinator.cluster.gateway import Gateway, Loss
from coordinator.cluster.link_trials import LinkTrials
from coordinator.cluster.peers import introduce
from coordinator.cluster.registry import Registry, WorkerHandle
from coordinator.metrics import Metrics
from coordinator.requests.active import ActiveRequests
from coordinator.requests.admission import Admission
from coordinator.requests.assignments import Assignments
from coordinator.requests.crash_verdicts import CrashVerdicts
from coordinator.requests.errors import (
    no_workers,
    outgrown,
    prompt_too_long,
    shutting_down,
    too_large,
)
from coordinator.requests.ping_rounds import PingRounds
from coordinator.requests.placement_timer import PlacementTimer
from coordinator.requests.queue import RequestQueue
from coordinator.requests.record import RequestRecord
from coordinator.requests.recovery import Recovery
from coordinator.requests.silence_watch import SilenceWatch
from coordinator.requests.state import State
from coordinator.requests.token_stream import TokenStream
from coordinator.routing.queue_pressure import QueuePressure
from coordinator.routing.router import Demand, NoWorkers, Placement, Router, Wait

log = logging.getLogger("tandem.dispatch")

WORKERLESS_WAIT_S = 10.0
"""How long an admitted request waits when a role has no worker left, or when the workers that are left are too small
for it. A request with output waits a lease longer, because a hung worker is replaced only when its lease has expired;
one whose client has seen output waits until its deadline while a role has no worker."""
STARTING_WAIT_S = 3.0
"""For this long after the coordinator's start, new requests wait for the first worker of a role instead of failing: the
workers of a previous coordinator reconnect within a second after this one listens."""
REJECTED_WAIT_S = 0.5
"""WORKERLESS_WAIT_S for the case that prefill workers are missing and the policy is to reject."""


class _Stays(NamedTuple):
    """Why a pass leaves a request in the queue. ``ends_pass``: later requests must not overtake it. ``workerless``:
    whether that is for lack of workers; None if they do not matter."""

    ends_pass: bool
    workerless: bool | None = None


_SKIP, _END = _Stays(ends_pass=False), _Stays(ends_pass=True)


class Dispatcher:
    """Places requests on workers, delivers the workers' messages to them, and retries lost attempts."""

    def __init__(
        self,
        gateway: Gateway,
        router: Router,
        admission: Admission,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.gateway, self.router, self.admission, self.metrics = gateway, router, admission, metrics
        self.registry: Registry = gateway.registry
        self.times = self.registry.times
        self.breakers = router.breakers
        self._link_trials = LinkTrials(gateway)
        self.link_stats = self._link_trials.stats
        self.draining = False
        self.queue_pressure: QueuePressure | None = None
        """Set if a launcher wants to be informed of queue pressure."""
        self._clock = gateway.clock
        self._loop = loop or asyncio.get_running_loop()
        self._queue = RequestQueue()
        self._timer = PlacementTimer(self._queue, self._place_queued, self._loop, self._clock)
        self._pings = PingRounds(gateway)
        self._assignments = Assignments(gateway, router)
        self._active = ActiveRequests(
            admission, metrics, self._queue, self._timer, self._pings, self._assignments, self._loop, self._clock
        )
        self._recovery = Recovery(gateway, router.breakers, metrics, self._active, self._assignments)
        self._crashes = CrashVerdicts(self._active, self._recovery, self._pings, self._timer)
        self._silence = SilenceWatch(gateway, self._assignments, self._recovery)
        self._stream = TokenStream(
            gateway, router, metrics, self._active, self._assignments, self._recovery, self._timer
        )
        self.records = self._active.records
        admission.running = self._active.running
        self._workerless_since: float | None = None
        self._rejoin_until = -inf
        """Until this time, workers of a previous coordinator may still join."""
        self._ticks: asyncio.TimerHandle | None = None
        self._leases_due = 0.0

    def start(self) -> None:
        self.gateway.start(self, self._loop)
        now = self._clock()
        self._rejoin_until = now + STARTING_WAIT_S - self.times.sweep_s  # the next sweep fails waiting requests
        self.registry.loop_lag.look(now)  # so that the lag of the first sweep is measured too
        self._next_tick()

    def close(self) -> None:
        if self._ticks is not None:
            self._ticks.cancel()
        self._timer.at(None)
        for record in list(self.records.values()):
            self.abort(record)

    # -- the client's side ----------------------------------------------------------------------------------------

    def submit(self, records: Sequence[RequestRecord], *, first_try: bool = False) -> None:
        """Admit the requests, all or none; raises RequestError if they are refused. ``first_try``: the client's headers
        say that this is no retry of refused requests."""
        if self.draining:
            raise shutting_down()
        role = self.router.missing_role()
        now = self._clock()
        if role is not None and not self._may_come(role, now):
            raise no_workers(role, starting=self.registry.starting(role))
        for record in records:
            if (reason := self._too_large(record)) is not None:
                raise reason
        self.admission.enter(
            len(records),
            sum(record.prompt_length for record in records),
            now,
            priority=records[0].priority,
            within_s=records[0].deadline_at - now,
            key=hash((records[0].cache_salt, *(record.prompt for record in records))),
            first_try=first_try,
        )
        for record in records:
            record.awaiting_reconnect = role is not None
            self._active.open(record, now)
        self._timer.now()

    def abort(self, record: RequestRecord) -> None:
        """End a request whose client has left or wants no more output. Idempotent; ignores a request that was not
        admitted."""
        self._active.abort(record)

    def fail(self, record: RequestRecord, error: RequestError) -> None:
        """End the request with an error that is sent to the client. Idempotent."""
        self._active.fail(record, error)

    def _may_come(self, role: Role, now: float) -> bool:
        """Return whether a worker that does the work of ``role`` may join in a moment: one whose connection has broken,
        or, shortly after the start and while none has joined, one of the previous coordinator. A drain does not wait
        for the latter."""
        rejoining = now < self._rejoin_until and not self.registry.had(role) and not self.draining
        return rejoining or self.gateway.may_return(role)

    def _too_large(self, record: RequestRecord) -> RequestError | None:
        """Return the error for a request that none of the known workers could hold even if idle, else None."""
        demand = record.demand()
        roomiest = self.router.roomiest(demand)
        if roomiest is not None and demand.room(roomiest) < demand.least:
            return too_large(demand, roomiest, record.prompt_length)
        longest = self.router.longest_prompt()
        return None if longest is None or demand.tokens <= longest else prompt_too_long(demand.tokens, longest)

    # -- the queue ------------------------------------------------------------------------------------------------

    def _place_queued(self) -> None:
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
                    record.unplaceable_since, record.accepts_truncation = None, False
                    continue
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
            self._workerless_since = None
        elif self._workerless_since is None:
            self._workerless_since = self._clock()

    def _decide(self, record: RequestRecord, now: float) -> Placement | _Stays:
        """Return where the request goes now, or that it stays in the queue."""
        if record.pending_crash_verdict is not None:
            return _SKIP
        if record.not_before > now and self._pings.awaited_by(record):
            return _END
        if record.life.attempt and (record.not_before > now or not self._assignments.budget.allows(len(self.records))):
            return _SKIP
        verdict = self.router.place(self._demand(record))
        if isinstance(verdict, Wait) and not self.router.could_serve(record.demand()):
            record.unplaceable_since = record.unplaceable_since or now
            return _SKIP
        if isinstance(verdict, Placement):
            if record.life.crashes and self._pings.outdated(record):
                self._pings.ask([record])
                return _END
            return verdict
        if record.life.suspect:
            self._pings.outdate(record)
            return _Stays(ends_pass=False, workerless=True) if isinstance(verdict, NoWorkers) else _SKIP
        self._pings.note_shortage()
        return _Stays(ends_pass=True, workerless=isinstance(verdict, NoWorkers))

    def _demand(self, record: RequestRecord) -> Demand:
        """Return the demand of a request. A suspect is kept apart from the workers of all other suspects."""
        demand = record.demand()
        if not record.life.suspect:
            return demand
        suspects = [other.life for other in self.records.values() if other is not record and other.life.suspect]
        return replace(demand, apart_from=frozenset(worker for life in suspects for worker in life.workers))

    def _place(self, record: RequestRecord, placement: Placement) -> None:
        """Send the request to its workers, Prefill and Reserve together. Must directly follow the router's decision, so
        that no other promise comes in between."""
        life, now = record.life, self._clock()
        self._assignments.assign(record, placement, now)
        prefill, decode = placement.prefill, placement.decode
        request = self._request(record, decode, now)
        if prefill is None:
            reached = self._assignments.send(record, decode, Generate(request, life.attempt))
        else:
            to_decode, to_prefill = introduce(prefill, decode)
            # Prefill first: the first token depends on it, and a message wakes two threads before the next one leaves
            reached = self._assignments.send(record, prefill, Prefill(request, life.attempt, to_prefill))
            reached = reached and self._assignments.send(record, decode, Reserve(request, life.attempt, to_decode))
        if reached:
            life.move(State.PREFILLING)
        else:
            self._recovery.retry(record)

    def _request(self, record: RequestRecord, decode: WorkerHandle, now: float) -> Request:
        return Request(
            id=record.id,
            prompt=record.prompt,
            sampling=_sampling_on(decode, record),
            n=record.n,
            emitted=record.life.emitted(),
            cache_salt=record.cache_salt,
            priority=record.priority,
            deadline_ms=max(1, int((record.deadline_at - now) * 1000)),
            ended=tuple(choice for choice, finish in enumerate(record.life.finish) if finish),
        )

    # -- events from workers --------------------------------------------------------------------------------------

    def on_worker_joined(self, worker: WorkerHandle) -> None:
        self.on_worker_reconnected(worker.id)
        if self.router.missing_role() is None:
            for record in self.records.values():
                record.awaiting_reconnect = False
        self._link_trials.begin(worker)
        self._timer.soon()

    def measured(self, worker: WorkerHandle, message: Measured) -> None:
        self._link_trials.measured(worker, message)

    def on_worker_lost(self, worker: WorkerHandle, how: Loss) -> None:
        """Retry the requests of a worker that was lost without a Goodbye.

        They are retried at once unless the worker may have died (MISSING). Then they wait until the other workers have
        answered a Ping, and requests suspected of crashing this worker and others before it wait until its death is
        confirmed or refuted.
        """
        records = self._requests_lost_with(worker)
        if how is not Loss.MISSING:
            for record in records:
                self._recovery.retry(record, free=how is Loss.RECONNECTED and record.life.disconnected())
        elif records:
            self._crashes.worker_missing(worker, records)
        if self._pings.complete():
            self._timer.soon()
        self._timer.soon()

    def on_worker_died(self, worker: Incarnation) -> None:
        self._crashes.worker_died(worker)

    def on_worker_reconnected(self, worker: Incarnation) -> None:
        self._crashes.worker_reconnected(worker)

    def on_worker_left(self, worker: WorkerHandle) -> None:
        """Retry, free of charge, the requests of a worker that said Goodbye before it had finished them."""
        for record in self._requests_lost_with(worker):
            self._recovery.retry(record, free=True)
        self._timer.soon()

    def _requests_lost_with(self, worker: WorkerHandle) -> list[RequestRecord]:
        """Forget a worker that is gone and return the requests whose current attempt is lost with it."""
        self.router.forget(worker)
        self._link_trials.forget(worker)
        self._silence.forget(worker.id)
        records = [record for record in self._assignments.forget(worker.id) if record.life.needs(worker.id)]
        if records:
            log.info("requests of %s that are retried: %d", worker.hello.name, len(records))
        return records

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None:
        self._stream.tokens(worker, message)

    def timing(self, worker: WorkerHandle, message: Timing) -> None:
        self._stream.timing(worker, message)

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None:
        self._recovery.failed(worker, message)

    def beat(self, worker: WorkerHandle) -> None:
        if self._pings.complete():
            self._timer.soon()
        self._silence.beat(worker)

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._clock()
        try:
            listened = self.gateway.sweep(now)
            if self.breakers.tick(now):
                self._timer.soon()
            if now >= self._leases_due:
                self._leases_due = now + self.times.heartbeat_s - self.times.sweep_s / 2
                self._assignments.renew_leases()
            if self.queue_pressure is not None:
                self.queue_pressure.look(self.router.backlog_steps())
            for worker in list(self.registry) if listened else ():
                self._silence.look_for_stalls(worker, now)
            if self._workerless_since is not None:
                self._give_up_waiting(now - self._workerless_since)
            self._give_up_stranded(now)
        except Exception:  # a failed sweep must not stop the detection of silent workers
            log.exception("a sweep over the workers failed")
        finally:
            self._next_tick()

    def _next_tick(self) -> None:
        self._ticks = self._loop.call_later(self.times.sweep_s, self._tick)

    def _give_up_waiting(self, waited_s: float) -> None:
        """Fail the queued requests that have waited too long for the first worker of a role."""
        role = self.router.missing_role()
        if role is None or self._may_come(role, self._clock()):
            return
        least_s = REJECTED_WAIT_S if role == "prefill" else WORKERLESS_WAIT_S
        for record in self._queue.in_order():
            if record.queued and waited_s > self._patience_s(record, least_s):
                self.fail(record, no_workers(role, starting=self.registry.starting(role)))

    def _give_up_stranded(self, now: float) -> None:
        """Fail the queued requests that are too large for the ready workers, once they have waited long enough for
        larger ones. A request without an output limit first accepts a truncated output."""
        longest_s = self.times.lease_s + WORKERLESS_WAIT_S
        for record in self._queue.waiting():
            if record.unplaceable_since is None or not record.queued:
                continue
            if self.router.could_serve(demand := record.demand()):
                record.unplaceable_since = None
            elif now - record.unplaceable_since <= min(longest_s, self._patience_s(record, WORKERLESS_WAIT_S)):
                continue
            elif record.open_ended and not record.accepts_truncation:
                record.accepts_truncation = True
                self._timer.soon()
            else:
                reason = None if record.life.started else self._too_large(record)
                self.fail(record, reason or outgrown(demand.tokens + demand.least))

    def _patience_s(self, record: RequestRecord, least_s: float) -> float:
        """Return how many seconds a request waits while no worker can take it."""
        if record.awaiting_reconnect:
            return 0.0
        if not record.life.started:
            return least_s
        return inf if record.client.told else self.times.lease_s + WORKERLESS_WAIT_S


def _sampling_on(decode: WorkerHandle, record: RequestRecord) -> SamplingParams:
    """Return the sampling parameters for a request on ``decode``. Without a client's limit, ``max_tokens`` is reduced
    to what the worker can hold."""
    sampling, demand = record.sampling, record.demand()
    if (missing := demand.output - demand.room(decode.hello)) <= 0:
        return sampling
    if not record.open_ended:
        raise InvariantBroken(f"{decode.hello.name} is {missing} tokens too small for a request placed on it")
    most = sampling.max_tokens - missing
    return msgspec.structs.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
