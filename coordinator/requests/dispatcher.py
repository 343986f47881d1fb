"""Every request between the HTTP side and the workers.

Owns the queue, the records (one per request: its life, its part of the ledger, its clock readings), the timers.
Decisions are made by the pure cores (:mod:`lifecycle`, :mod:`router`, :mod:`registry`, :mod:`limits`); this file
carries them out through the gateway. Knows neither text nor HTTP: whoever waits for tokens is a ``Client``.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import msgspec

from common.core.errors import InvariantBroken, RequestError, WireError
from common.core.ids import (
    REQUEST_ID_BYTES,
    Incarnation,
    RequestId,
    TransferId,
    new_request_id,
    pack_transfers,
    unpack_tokens,
)
from common.core.request import FinishReason, Request, SamplingParams
from common.net.messages import (
    Abort,
    Generate,
    Lease,
    Logprobs,
    Measure,
    Measured,
    Message,
    Peer,
    Prefill,
    RequestFailed,
    Resend,
    Reserve,
    Role,
    Timing,
    Tokens,
)
from coordinator.cluster.gateway import Gateway, Loss
from coordinator.cluster.link_stats import LinkStats, Trial
from coordinator.cluster.registry import Registry, WorkerHandle
from coordinator.metrics import Metrics
from coordinator.requests.admission import Admission, RetryBudget
from coordinator.requests.errors import (
    given_up,
    internal,
    no_workers,
    outgrown,
    prompt_too_long,
    quarantined,
    shutting_down,
    too_large,
    worker_error,
)
from coordinator.requests.record import RequestRecord
from coordinator.requests.residence import Running
from coordinator.requests.state import Contradiction, Gap, State
from coordinator.routing.breakers import Alone, Pair
from coordinator.routing.queue_pressure import QueuePressure
from coordinator.routing.router import Demand, NoWorkers, Placement, Router, Wait

log = logging.getLogger("tandem.dispatch")

TOKEN_BYTES = 16
"""Of the secret of one hand-off, which its two ends are told."""
WORKERLESS_WAIT_S = 10.0
"""How long an admitted request waits for a worker of a role that has none left, or of its size; one that has tokens a
lease longer, as a worker that hangs is not replaced before. One whose client has seen some waits to its deadline where
there is no worker, and as long as others where those that are there are too small."""
STARTING_WAIT_S = 3.0
"""New requests wait until so long after the start of the coordinator for the first worker of a role: those of a
coordinator that ran before dial again, at the latest a second after this one listens."""
REJECTED_WAIT_S = 0.5
"""The same when prefill is missing and the policy is to reject."""
RESEND_EVERY_S = 0.2
MISSED_BEATS = 3
"""A worker whose heartbeats omit a request so often in a row, although it was asked for the tokens that are missing
each time before, does not have it (tokens travel on another socket than heartbeats)."""
_FINISHES = tuple(FinishReason)
_LEFTOVERS = 64
"""So many requests that were given up may stand in the queue."""
STALL_INTERVALS, STALL_STEPS = 20, 4
"""A stream that gets nothing for the failure timeout, so many of its usual intervals and of its worker's steps is given
to another worker, if its worker does not say why."""
RETRY_DELAY_S = 0.1
"""Before a retry when a worker said no: something must change there first."""
ANSWERS_S = 0.2
"""Before a retry when a worker died the others are asked whether they live, so that none that died with it is taken for
the next victim; for at most so long, since one of them may just be silent. Who then waits for room asks again: some who
have answered may have died since."""


class Dispatcher:
    """Places requests, routes what workers say to them, and recovers what is lost."""

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
        self.retries = RetryBudget()
        admission.running = self._running
        self.link_stats = LinkStats()
        self.records: dict[bytes, RequestRecord] = {}
        self.draining = False
        self.queue_pressure: QueuePressure | None = None
        """Is looked at if somebody wants to know."""
        self._queue: list[tuple[int, int, RequestRecord]] = []
        self._queued = 0
        self._orders = itertools.count()
        self._on: dict[Incarnation, dict[RequestId, RequestRecord]] = {}
        self._emptied: dict[Incarnation, int] = {}
        self._suspects: dict[Incarnation, list[RequestRecord]] = {}
        """Requests that a worker may have died of, and others may have before, until it is known whether it died."""
        self._asking = 0
        """The last Ping."""
        self._asked_for: dict[RequestId, RequestRecord] = {}
        """Queued requests that wait until every worker has answered it."""
        self._clock = gateway.clock
        self._loop = loop or asyncio.get_running_loop()
        self._pumping = False
        self._later: asyncio.TimerHandle | None = None
        self._workerless_since: float | None = None
        self._rejoin_until = -inf
        """Until then workers that served an earlier coordinator may still join."""
        self._shortages = 0
        """How often the queue stood still for want of room."""
        self._ticks: asyncio.TimerHandle | None = None
        self._leases_due = 0.0

    def start(self) -> None:
        self.gateway.start(self, self._loop)
        now = self._clock()
        self._rejoin_until = now + STARTING_WAIT_S - self.times.sweep_s  # requests are given up at the next sweep
        self.registry.loop_lag.look(now)  # the first look of the timer may be late, too
        self._next_tick()

    def close(self) -> None:
        for timer in (self._ticks, self._later):
            if timer is not None:
                timer.cancel()
        for record in list(self.records.values()):
            self.abort(record)

    # -- the client's side ----------------------------------------------------------------------------------------

    def submit(self, records: Sequence[RequestRecord], *, first_try: bool = False) -> None:
        """Takes the requests in, all or none; RequestError says why not. ``first_try``: by their client's headers they
        were not refused before."""
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
            record.order, record.awaiting_reconnect = next(self._orders), role is not None
            self.records[record.id] = record
            record.timer = self._loop.call_later(record.deadline_at - now, self._expire, record)
            self._enqueue(record)
        self.pump()

    def _may_come(self, role: Role, now: float) -> bool:
        """Whether a worker that does the work of ``role`` may be there in a moment: one that has lost its connection,
        or, shortly after the start and while none has joined, one that served the coordinator before this one. A drain
        does not wait for those."""
        rejoining = now < self._rejoin_until and not self.registry.had(role) and not self.draining
        return rejoining or self.gateway.may_return(role)

    def abort(self, record: RequestRecord) -> None:
        """The client has left or wants no more. Idempotent; nothing for one that was not taken in."""
        if record.id in self.records:
            self._end(record, State.ABORTED, tell_workers=True)
            self.metrics.ended(record, "aborted")

    def fail(self, record: RequestRecord, error: RequestError) -> None:
        """Ends the request with an error that reaches the client."""
        if not record.life.over:
            self._end(record, State.FAILED, tell_workers=True)
            self.metrics.ended(record, "failed")
            record.client.failed(record, error)

    def _too_large(self, record: RequestRecord) -> RequestError | None:
        """Why no worker that is here could ever hold the request, if so."""
        demand = record.demand()
        roomiest = self.router.roomiest(demand)
        if roomiest is not None and demand.room(roomiest) < demand.least:
            return too_large(demand, roomiest, record.prompt_length)
        longest = self.router.longest_prompt()
        return None if longest is None or demand.tokens <= longest else prompt_too_long(demand.tokens, longest)

    def _expire(self, record: RequestRecord) -> None:
        if record.placed_at is not None:
            self.admission.served(self._clock() - record.placed_at)
        waiting = "a worker" if record.life.state is State.QUEUED else f"its end while {record.life.state.value}"
        self.fail(
            record,
            RequestError(
                f"The request's deadline passed; it was waiting for {waiting}.",
                status=504,
                type="timeout_error",
                code="request_timeout",
            ),
        )

    def _end(self, record: RequestRecord, state: State, *, tell_workers: bool) -> None:
        """The one way out for a request."""
        if record.queued:
            self._leave_queue(record, placed=False)
        elif record.placed_at is not None:
            self.admission.freed(self._clock() - record.placed_at)
        if tell_workers:
            self._tell(record.life.workers, Abort(record.id, record.life.attempt))
        record.life.move(state)
        record.finished_at = self._clock()
        self._take_off(record)
        if record.timer is not None:
            record.timer.cancel()
        self.records.pop(record.id, None)
        self.pump_soon()

    # -- the queue ------------------------------------------------------------------------------------------------

    def _running(self) -> Iterator[Running]:
        """The requests that are at workers."""
        now = self._clock()
        for record in self.records.values():
            if record.placed_at is not None and not record.queued:
                yield Running(now - record.placed_at, record.limit_s)

    def _enqueue(self, record: RequestRecord) -> None:
        record.queued = True
        self._queued += 1
        heapq.heappush(self._queue, (record.priority, record.order, record))

    def _leave_queue(self, record: RequestRecord, *, placed: bool) -> None:
        record.queued = False
        self._queued -= 1
        self._asked_for.pop(record.id, None)
        if len(self._queue) > 2 * self._queued + _LEFTOVERS:  # behind one that waits nobody would meet those that left
            self._queue = [entry for entry in self._queue if entry[2].queued]
            heapq.heapify(self._queue)
        self.admission.leave(record.prompt_length, self._clock(), placed=placed, priority=record.priority)

    def pump_soon(self) -> None:
        """Places what fits, once, after the running callbacks: many endings in one turn cost one look at the queue."""
        if self._queue and not self._pumping:
            self._pumping = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Places queued requests in order until one does not fit; that one keeps its place before later ones. One that
        only fits workers that have left stands aside for a while: they may come back. So does one that tries again
        too soon, or while too many do, or before it is known whether a worker died of it. One that has just lost its
        worker keeps its place, too, until it is known who else lives."""
        self._pumping = False
        workerless, now = False, self._clock()
        aside: list[tuple[int, int, RequestRecord]] = []
        moments: list[float] = []
        try:
            while self._queue:
                record = self._queue[0][2]
                if not record.queued:
                    heapq.heappop(self._queue)
                    continue
                if record.pending_crash_verdict is not None:
                    aside.append(heapq.heappop(self._queue))
                    continue
                if record.not_before > now and record.id in self._asked_for:
                    moments.append(record.not_before)
                    break
                if record.life.attempt and (record.not_before > now or not self.retries.allows(len(self.records))):
                    aside.append(heapq.heappop(self._queue))
                    continue
                verdict = self.router.place(self._demand(record))
                if isinstance(verdict, Wait) and not self.router.could_serve(record.demand()):
                    record.unplaceable_since = record.unplaceable_since or now
                    aside.append(heapq.heappop(self._queue))
                    continue
                if record.life.suspect and not isinstance(verdict, Placement):
                    workerless |= isinstance(verdict, NoWorkers)
                    record.shortage = -1
                    aside.append(heapq.heappop(self._queue))
                    continue
                if not isinstance(verdict, Placement):
                    workerless = isinstance(verdict, NoWorkers)
                    self._shortages += 1
                    break
                if record.life.crashes and record.shortage != self._shortages:
                    self._ask_who_lives([record])
                    moments.append(record.not_before)
                    break
                heapq.heappop(self._queue)
                self._leave_queue(record, placed=True)
                self._place(record, verdict)
                record.unplaceable_since, record.accepts_truncation = None, False
        finally:  # also when placing one fails
            for entry in aside:
                heapq.heappush(self._queue, entry)
        moments += [entry[2].not_before for entry in aside]
        self._pump_at(min((moment for moment in moments if moment > now), default=None))
        if not workerless:
            self._workerless_since = None
        elif self._workerless_since is None:
            self._workerless_since = self._clock()

    def _demand(self, record: RequestRecord) -> Demand:
        """What it asks of workers; one that may be the reason of crashes keeps away from others that may be."""
        demand = record.demand()
        if not record.life.suspect:
            return demand
        suspects = [other.life for other in self.records.values() if other is not record and other.life.suspect]
        return replace(demand, apart_from=frozenset(worker for life in suspects for worker in life.workers))

    def _pump_at(self, time: float | None) -> None:
        """Looks at the queue again when the first of those that wait for a moment may go."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if time is not None:
            self._later = self._loop.call_later(time - self._clock() + 0.001, self.pump_soon)

    def _place(self, record: RequestRecord, placement: Placement) -> None:
        """Sends the request to its workers: reservation and prefill together, nothing else was promised in between."""
        life, now = record.life, self._clock()
        if life.attempt:
            self.retries.placed(record.id)
        record.placement, record.path, record.awaiting_reconnect = placement, placement.path, False
        record.promise = self.router.promise(record.demand(), placement)
        if record.placed_at is None:
            record.placed_at = now
        prefill, decode = placement.prefill, placement.decode
        life.place(placement.path, prefill.id if prefill else None, decode.id)
        for incarnation in life.workers:
            self.breakers.placed(Alone(incarnation), record.id)
        request = self._request(record, decode, now)
        if prefill is None:
            reached = self._send(record, decode, Generate(request, life.attempt))
        else:
            record.pair = Pair(prefill.id, decode.id)
            self.breakers.placed(record.pair, record.id)
            token = secrets.token_bytes(TOKEN_BYTES)
            # prefill first: the first token waits for it, and each message wakes two threads before the next leaves
            reached = self._send(record, prefill, Prefill(request, life.attempt, _peer(decode, token)))
            reached = reached and self._send(record, decode, Reserve(request, life.attempt, _peer(prefill, token)))
        if reached:
            life.move(State.PREFILLING)
        else:
            self._retry(record)

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

    def _send(self, record: RequestRecord, worker: WorkerHandle, message: Message) -> bool:
        reached = self.gateway.send(worker, message)
        if reached:
            record.sent[worker.id] = self.gateway.sent[worker.id]
            self._on.setdefault(worker.id, {})[record.id] = record
        return reached

    def _tell(self, workers: Sequence[Incarnation], message: Message) -> None:
        for incarnation in workers:
            if (worker := self.registry.get(incarnation)) is not None:
                self.gateway.send(worker, message)

    def _take_off(self, record: RequestRecord) -> None:
        """The request has left its workers: the ledger, the budget and the index forget it."""
        self._settle_retry(record)
        if record.pair is not None:
            self.breakers.dropped(record.pair, record.id)
            record.pair = None
        if record.promise is not None:
            self.router.release(record.promise)
            record.promise = None
        for incarnation in record.sent:
            self.breakers.dropped(Alone(incarnation), record.id)
            self._on.get(incarnation, {}).pop(record.id, None)
        record.sent.clear()
        record.missed_beats.clear()

    # -- retries --------------------------------------------------------------------------------------------------

    def _retry(
        self,
        record: RequestRecord,
        *,
        free: bool = False,
        blamed: WorkerHandle | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """The attempt is lost: try again within the budget, else fail. ``blamed``: whose fault it was, if it lives on;
        the rest as in :meth:`RequestState.retry`."""
        if blamed is not None:
            record.excluded_workers |= {blamed.id}
        life = record.life
        workers, attempt, migrates = life.workers, life.attempt, life.started
        if life.retry(on_trial=record.pending_crash_verdict is not None, free=free) == "spent":
            self.fail(record, given_up())
            return
        self._tell(workers, Abort(record.id, attempt))
        self._take_off(record)
        self.metrics.set_back(migration=migrates)
        self.admission.back(record.prompt_length, priority=record.priority)
        self._enqueue(record)
        record.not_before = self._clock() + delay_s
        self.pump_soon()

    def _failed_by(self, worker: WorkerHandle, record: RequestRecord, *, delay_s: float = 0.0) -> None:
        """``worker`` failed the request, and lives on. That it fails whatever it is given says nothing about a request,
        so it costs the budget nothing, once for each such worker."""
        peer = Alone(worker.id)
        self.breakers.failed(peer, record.id, self._clock())
        free = not self.breakers.allows(peer) and worker.id not in record.excluded_workers
        self._retry(record, free=free, blamed=worker, delay_s=delay_s)

    def _settle_retry(self, record: RequestRecord) -> None:
        if self.retries.settled(record.id):
            self.pump_soon()

    # -- what workers say -----------------------------------------------------------------------------------------

    def on_worker_joined(self, worker: WorkerHandle) -> None:
        self.on_worker_reconnected(worker.id)
        if self.router.missing_role() is None:
            for record in self.records.values():
                record.awaiting_reconnect = False
        for trial in self.link_stats.trials(worker, self.registry):
            self._try(trial)
        self.pump_soon()

    def _try(self, trial: Trial) -> None:
        """Decode first: it must expect what prefill offers."""
        request, tokens = new_request_id(), trial.tokens
        token = secrets.token_bytes(TOKEN_BYTES)
        if self.gateway.send(trial.decode, Measure(request, 0, _peer(trial.prefill, token), tokens)):
            self.gateway.send(trial.prefill, Measure(request, 0, _peer(trial.decode, token), tokens))

    def measured(self, worker: WorkerHandle, message: Measured) -> None:
        decode = self.registry.get(message.decode)
        if decode is not None and (trial := self.link_stats.measured(worker, decode, message)) is not None:
            self._try(trial)

    def on_worker_lost(self, worker: WorkerHandle, how: Loss) -> None:
        """It is gone without a word. What it was doing moves on: at once if it lives, else when it is known who else
        does. Requests that may be why it and others before it died wait until it is known whether it did."""
        records = self._requests_lost_with(worker)
        if how is not Loss.MISSING:
            for record in records:
                self._retry(record, free=how is Loss.RECONNECTED and record.life.disconnected())
        elif records:
            self._lost_by_a_crash(worker, records)
        self._look_for_answers()
        self.pump_soon()

    def _lost_by_a_crash(self, worker: WorkerHandle, records: Sequence[RequestRecord]) -> None:
        """Only who lived when it got a request can have died of it."""
        dead_before = {record.id for record in records if worker.answered < record.asked}
        suspects = [each for each in records if each.id not in dead_before and each.life.on_worker_lost(worker.id)]
        if suspects:
            self._suspects[worker.id] = suspects
        for record in suspects:
            record.pending_crash_verdict = worker.id
        for record in records:
            free = record.id in dead_before or record.life.on_worker_unconfirmed(worker.id)
            self._retry(record, free=free)
        self._ask_who_lives(records)

    def _ask_who_lives(self, records: Sequence[RequestRecord]) -> None:
        """They are not placed before that is known, or nobody answers any more."""
        self._asking, now = self.gateway.ask(), self._clock()
        for record in records:
            record.asked, record.not_before, record.shortage = self._asking, now + ANSWERS_S, self._shortages
            if record.queued:
                self._asked_for[record.id] = record

    def _look_for_answers(self) -> None:
        """Once it is known of every worker that it lives, nobody waits for that any more."""
        if self._asked_for and all(worker.answered >= self._asking for worker in self.registry):
            now = self._clock()
            for record in self._asked_for.values():
                record.not_before = now
            self._asked_for.clear()
            self.pump_soon()

    def on_worker_died(self, worker: Incarnation) -> None:
        """It does not come back. If one of its requests was there at more crashes than any other, that is held to be
        the reason; several are tried again apart from each other, so that the next crash tells which it is."""
        for record in self.records.values():
            record.life.on_worker_died(worker)
        suspects = self._suspects.pop(worker, [])
        most = max((len(record.life.crashes) for record in suspects), default=0)
        foremost = [record for record in suspects if len(record.life.crashes) == most]
        if len(foremost) == 1 and foremost[0].pending_crash_verdict == worker:
            names = ", ".join(sorted(foremost[0].life.crashes))
            log.warning("request %s is given up: the workers that had it died (%s)", foremost[0].id.hex(), names)
            self.fail(foremost[0], quarantined())
        self._acquit([record for record in suspects if record.pending_crash_verdict == worker])

    def on_worker_reconnected(self, worker: Incarnation) -> None:
        """It has lost its connection, and nothing else."""
        self._suspects.pop(worker, None)
        for record in self.records.values():
            record.life.on_worker_reconnected(worker)
        waiting = [record for record in self.records.values() if record.pending_crash_verdict is not None]
        self._acquit(
            [record for record in waiting if record.pending_crash_verdict == worker or not record.life.suspect]
        )

    def _acquit(self, records: Sequence[RequestRecord]) -> None:
        """They may be tried again, if they have tries left."""
        for record in records:
            record.pending_crash_verdict = None
            if record.life.spent:
                self.fail(record, given_up())
        self.pump_soon()

    def on_worker_left(self, worker: WorkerHandle) -> None:
        """It was told to leave and had no time to finish: what it was doing moves on, at the cost of a pause."""
        for record in self._requests_lost_with(worker):
            self._retry(record, free=True)
        self.pump_soon()

    def _requests_lost_with(self, worker: WorkerHandle) -> list[RequestRecord]:
        """Forgets a worker that is gone; the requests that cannot go on without it."""
        self.router.forget(worker)
        self.link_stats.forget(worker)
        self._emptied.pop(worker.id, None)
        records = [record for record in self._on.pop(worker.id, {}).values() if record.life.needs(worker.id)]
        if records:
            log.info("requests of %s that are placed again: %d", worker.hello.name, len(records))
        return records

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None:
        """One step's spans; WireError if the columns do not match."""
        ids = _checked_ids(message)
        now = self._clock()
        logprobs = message.logprobs
        at = 0
        for index, count in enumerate(message.counts):
            record = self.records.get(message.requests[index * REQUEST_ID_BYTES : (index + 1) * REQUEST_ID_BYTES])
            if record is not None:
                self._span(worker, record, message, index, ids[at : at + count], logprobs[at : at + count], now)
            at += count

    def _span(
        self,
        worker: WorkerHandle,
        record: RequestRecord,
        message: Tokens,
        index: int,
        ids: list[int],
        logprobs: Sequence[Logprobs | None],
        now: float,
    ) -> None:
        life, choice, attempt = record.life, message.choices[index], message.attempts[index]
        if worker.id != life.decode and worker.id != life.prefill:
            return
        finish = _FINISHES[message.finish[index]]
        if finish in (FinishReason.ABORTED, FinishReason.FAILED):
            if attempt == life.attempt and life.needs(worker.id):
                self._retry(record)
            return
        news = life.accept(choice, attempt, message.starts[index], ids, finish)
        if news is None:
            return
        if isinstance(news, Contradiction):
            log.warning("%s contradicts what a client was told, at token %d", worker.hello.name, message.starts[index])
            self._failed_by(worker, record)
            return
        if isinstance(news, Gap):
            self._ask_again(worker, record, choice, news.start, now)
            return
        life.spoke(worker.id)
        if not self.breakers.calm and self.breakers.succeeded(Alone(worker.id)):
            self.pump_soon()
        if life.crashes and life.survives(len(news.ids)):
            self.pump_soon()  # others that are suspected may come to its workers
        self._settle_retry(record)
        self._note_hand_off(record)
        record.heard_at = now
        record.missed_beats.pop(worker.id, None)
        self._observe(record, choice, len(news.ids), now)
        try:
            ended = record.client.tokens(record, choice, news.ids, logprobs[news.skip :], finish)
        except Exception:  # one answer's text must not stop the others
            log.exception("an answer could not be written")
            self.fail(record, internal())
            return
        if ended and not life.over:
            life.end_choice(choice)
            record.cut = True
        if life.finished and not life.over:
            self._finish(record)

    def _observe(self, record: RequestRecord, choice: int, count: int, now: float) -> None:
        if record.promise is not None and record.promise.prefill_tokens:
            self.router.prefilled(record.promise)
            self.pump_soon()  # somebody may compute the next prompt
        if record.first_token_at is None:
            record.first_token_at, record.first_attempt = now, record.life.attempt
            self.metrics.first_token(record, now)
        elif (before := record.last_token_at[choice]) and count:
            self.metrics.inter_token((now - before) / count, count)
            record.intervals.append((now - before) / count)
        record.last_token_at[choice] = now

    def _finish(self, record: RequestRecord) -> None:
        """Every choice has ended. Whoever may still hold something and does not know is told."""
        life = record.life
        on_prefill = life.path == "disagg" and life.state is not State.DECODING
        if on_prefill:
            record.path = "prefill"
        self._end(record, State.DONE, tell_workers=record.cut or on_prefill)
        self.metrics.ended(record, "done")
        if record.placed_at is not None:
            self.admission.served(self._clock() - record.placed_at)
        try:
            record.client.done(record)
        except Exception:  # it would wait for ever, and what others have said would not be read
            log.exception("the end of an answer could not be written")
            record.client.failed(record, internal())

    def _ask_again(self, worker: WorkerHandle, record: RequestRecord, choice: int, start: int, now: float) -> None:
        if now - record.asked_at >= RESEND_EVERY_S:
            record.asked_at = now
            self.gateway.send(worker, Resend(record.id, record.life.attempt, choice, start))

    def timing(self, worker: WorkerHandle, message: Timing) -> None:
        if "kv_bytes" in message.values:  # also when its request has ended meanwhile
            self.metrics.transferred(message)
        record = self.records.get(message.request)
        if record is None or message.attempt != record.life.attempt:
            return
        if record.first_attempt in (None, message.attempt):  # how a stream went on elsewhere is told by its gap
            record.timings.update(message.values)
        if worker.id == record.life.decode and record.life.path == "disagg":
            record.life.decoding()
            record.heard_at = self._clock()
            self._note_hand_off(record)

    def _note_hand_off(self, record: RequestRecord) -> None:
        """The pair's breaker hears of a hand-off that was accepted, once."""
        if record.pair is not None and record.life.state is State.DECODING:
            if self.breakers.succeeded(record.pair):
                self.pump_soon()
            record.pair = None

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None:
        record = self.records.get(message.request)
        if message.code == "transfer_failed":
            self.metrics.transfer_failed(message.code)
        if record is None or message.attempt != record.life.attempt or not record.life.needs(worker.id):
            return
        if message.code == "draining":  # it says so before its next heartbeat does
            self.registry.drains(worker)
            self._retry(record, free=True)
            return
        log.warning("%s gives a request up: %s (%s)", worker.hello.name, message.code, message.detail)
        if message.code == "transfer_failed" and record.pair is not None:
            self.breakers.failed(record.pair, record.id, self._clock())
            record.excluded_pairs |= {record.pair}
            record.pair = None
            self._retry(record, delay_s=RETRY_DELAY_S)
        elif message.retriable:
            self._failed_by(worker, record, delay_s=RETRY_DELAY_S)
        else:
            self.fail(record, worker_error(message))

    def beat(self, worker: WorkerHandle) -> None:
        """Looks for requests that the worker should have and does not: it is asked for their last words, and if none
        come they are placed anew.

        Counts only beats between which everything that had arrived was read: under a backlog a heartbeat overtakes
        the tokens that explain it.
        """
        self._look_for_answers()
        beat, on, emptied = worker.beat, self._on.get(worker.id), self.gateway.times_emptied
        if beat is None or not on or self._emptied.get(worker.id) == emptied:
            return
        self._emptied[worker.id] = emptied
        known = set(_ids(beat.live))
        for record in list(on.values()):
            if record.sent.get(worker.id, 0) > beat.acted_on or not self._should_have(record, worker):
                continue
            missed = 0 if record.id in known else record.missed_beats.get(worker.id, 0) + 1
            record.missed_beats[worker.id] = missed
            if missed >= MISSED_BEATS:
                log.warning("%s does not have a request that it was given", worker.hello.name)
                self._failed_by(worker, record)
            elif missed:
                self._ask_for_the_end(worker, record)
            elif record.n > 1:
                self._ask_for_the_silent(worker, record)

    def _ask_for_the_end(self, worker: WorkerHandle, record: RequestRecord) -> None:
        """It may have finished what it does not list, and its last words were lost: it can say them again for a while.
        Beats count again once it has acted on that, which a worker in a long step has not."""
        life = record.life
        for choice, finish in enumerate(life.finish):
            if not finish and not self._send(
                record, worker, Resend(record.id, life.attempt, choice, len(life.output[choice]))
            ):
                return

    def _ask_for_the_silent(self, worker: WorkerHandle, record: RequestRecord) -> None:
        """Choices that got nothing for a heartbeat's time: their last words may be lost, and while any other goes on,
        even one that was ended from this side, heartbeats list the request. One that waits for a slot or for blocks has
        nothing to answer. No number of messages is noted: beats count whether the worker has acted on these or not,
        however often they come.
        """
        life = record.life
        if life.state is not State.DECODING:
            return
        for choice, (finish, heard_at) in enumerate(zip(life.finish, record.last_token_at, strict=True)):
            if not finish and self._clock() - heard_at > self.times.heartbeat_s:
                self.gateway.send(worker, Resend(record.id, life.attempt, choice, len(life.output[choice])))

    def _should_have(self, record: RequestRecord, worker: WorkerHandle) -> bool:
        """Decode has a request from its reservation to its end, prefill until the first token."""
        life = record.life
        if worker.id == life.prefill:
            return life.state is State.PREFILLING
        return worker.id == life.decode and life.needs(worker.id)

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._clock()
        try:
            listened = self.gateway.sweep(now)
            if self.breakers.tick(now):
                self.pump_soon()
            if now >= self._leases_due:
                self._leases_due = now + self.times.heartbeat_s - self.times.sweep_s / 2
                self._renew_leases()
            if self.queue_pressure is not None:
                self.queue_pressure.look(self.router.backlog_steps())
            for worker in list(self.registry) if listened else ():
                self._look_for_stalls(worker, now)
            if self._workerless_since is not None:
                self._give_up_waiting(now - self._workerless_since)
            self._give_up_stranded(now)
        except Exception:  # whatever went wrong this time, silent workers must be noticed the next time
            log.exception("a look at the workers failed")
        finally:
            self._next_tick()

    def _look_for_stalls(self, worker: WorkerHandle, now: float) -> None:
        """Streams of a worker that lives, has them, and is silent about them."""
        beat, on = worker.beat, self._on.get(worker.id)
        if beat is None or not on:
            return
        resting, least_s = set(_ids(beat.resting)), self.times.timeout_s
        for record in list(on.values()):
            if record.life.state is not State.DECODING or record.life.decode != worker.id or record.id in resting:
                continue
            if now - record.heard_at <= least_s:  # the usual: what the patience really is takes longer to find out
                continue
            silence_s = self.registry.loop_lag.silence(record.heard_at, now)
            if silence_s > max(least_s, STALL_INTERVALS * record.interval_s, STALL_STEPS * beat.longest_ms / 1000):
                log.warning("%s has said nothing about a stream for %.1f s", worker.hello.name, silence_s)
                self._failed_by(worker, record)

    def _renew_leases(self) -> None:
        """Tells every worker what it may hold: its own timers free whatever else it has, and everything without us."""
        for worker in list(self.registry):
            on = self._on.get(worker.id, {})
            live = pack_transfers(TransferId(record.id, record.life.attempt) for record in on.values())
            if self.gateway.send(worker, Lease(live, self.gateway.sent[worker.id] + 1)):
                self.registry.leased(worker, self._clock())

    def _next_tick(self) -> None:
        self._ticks = self._loop.call_later(self.times.sweep_s, self._tick)

    def _give_up_waiting(self, waited_s: float) -> None:
        role = self.router.missing_role()
        if role is None or self._may_come(role, self._clock()):
            return
        least_s = REJECTED_WAIT_S if role == "prefill" else WORKERLESS_WAIT_S
        for _, _, record in sorted(self._queue, key=lambda entry: entry[:2]):
            if record.queued and waited_s > self._patience_s(record, least_s):
                self.fail(record, no_workers(role, starting=self.registry.starting(role)))

    def _give_up_stranded(self, now: float) -> None:
        """Who is too large for the workers that are there waits for others, a bounded time. One without a limit then
        takes what room there is."""
        longest_s = self.times.lease_s + WORKERLESS_WAIT_S
        for record in [entry[2] for entry in self._queue]:
            if record.unplaceable_since is None or not record.queued:
                continue
            if self.router.could_serve(demand := record.demand()):
                record.unplaceable_since = None
            elif now - record.unplaceable_since <= min(longest_s, self._patience_s(record, WORKERLESS_WAIT_S)):
                continue
            elif record.open_ended and not record.accepts_truncation:
                record.accepts_truncation = True
                self.pump_soon()
            else:
                reason = None if record.life.started else self._too_large(record)
                self.fail(record, reason or outgrown(demand.tokens + demand.least))

    def _patience_s(self, record: RequestRecord, least_s: float) -> float:
        """How long a request waits where nobody can take it."""
        if record.awaiting_reconnect:
            return 0.0
        if not record.life.started:
            return least_s
        return inf if record.client.told else self.times.lease_s + WORKERLESS_WAIT_S


def _sampling_on(decode: WorkerHandle, record: RequestRecord) -> SamplingParams:
    """An answer without a limit gets as long as this worker can hold."""
    sampling, demand = record.sampling, record.demand()
    if (missing := demand.output - demand.room(decode.hello)) <= 0:
        return sampling
    if not record.open_ended:
        raise InvariantBroken(f"{decode.hello.name} is {missing} tokens too small for what it is given")
    most = sampling.max_tokens - missing
    return msgspec.structs.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def _peer(worker: WorkerHandle, token: bytes) -> Peer:
    hello = worker.hello
    return Peer(hello.name, hello.incarnation, hello.data_address, hello.host_id, hello.dtype, token)


def _ids(joined: bytes) -> Iterator[bytes]:
    """Request ids one after another."""
    return (joined[at : at + REQUEST_ID_BYTES] for at in range(0, len(joined), REQUEST_ID_BYTES))


def _checked_ids(message: Tokens) -> list[int]:
    """The token ids of a message whose columns fit together; WireError otherwise."""
    rows = len(message.counts)
    columns = (message.choices, message.attempts, message.starts, message.finish, message.stop_ids)
    if {rows, *map(len, columns)} != {rows} or len(message.requests) != rows * REQUEST_ID_BYTES:
        raise WireError("columns of different lengths")
    try:
        ids = unpack_tokens(message.ids)
    except ValueError as error:
        raise WireError(str(error)) from error
    if not rows:
        return ids
    if min(message.counts) < 0 or min(message.starts) < 0 or sum(message.counts) != len(ids):
        raise WireError("counts that do not match the tokens")
    if message.logprobs and len(message.logprobs) != len(ids):
        raise WireError("log-probabilities that do not match the tokens")
    if min(message.finish) < 0 or max(message.finish) >= len(_FINISHES):
        raise WireError("an unknown finish reason")
    return ids
