"""Every request between the HTTP side and the workers.

Owns the queue, the tickets (one per request: its life, its part of the ledger, its clock readings), the timers.
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
from coordinator.cluster.link_stats import Links, Trial
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
from coordinator.requests.record import Ticket
from coordinator.requests.residence import Running
from coordinator.requests.state import Contradiction, Gap, State
from coordinator.routing.breakers import Alone, Pair
from coordinator.routing.queue_pressure import Backlog
from coordinator.routing.router import Need, NoWorkers, Placement, Router, Wait

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
    """Places tickets, routes what workers say to them, and recovers what is lost."""

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
        self.links = Links()
        self.tickets: dict[bytes, Ticket] = {}
        self.draining = False
        self.backlog: Backlog | None = None
        """Is looked at if somebody wants to know."""
        self._queue: list[tuple[int, int, Ticket]] = []
        self._queued = 0
        self._orders = itertools.count()
        self._on: dict[Incarnation, dict[RequestId, Ticket]] = {}
        self._emptied: dict[Incarnation, int] = {}
        self._suspects: dict[Incarnation, list[Ticket]] = {}
        """Requests that a worker may have died of, and others may have before, until it is known whether it died."""
        self._asking = 0
        """The last Ask."""
        self._asked_for: dict[RequestId, Ticket] = {}
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
        self.registry.lags.look(now)  # the first look of the timer may be late, too
        self._next_tick()

    def close(self) -> None:
        for timer in (self._ticks, self._later):
            if timer is not None:
                timer.cancel()
        for ticket in list(self.tickets.values()):
            self.abort(ticket)

    # -- the client's side ----------------------------------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket], *, first_try: bool = False) -> None:
        """Takes the requests in, all or none; RequestError says why not. ``first_try``: by their client's headers they
        were not refused before."""
        if self.draining:
            raise shutting_down()
        role = self.router.missing_role()
        now = self._clock()
        if role is not None and not self._may_come(role, now):
            raise no_workers(role, starting=self.registry.starting(role))
        for ticket in tickets:
            if (reason := self._too_large(ticket)) is not None:
                raise reason
        self.admission.enter(
            len(tickets),
            sum(ticket.prompt_length for ticket in tickets),
            now,
            priority=tickets[0].priority,
            within_s=tickets[0].deadline_at - now,
            key=hash((tickets[0].cache_salt, *(ticket.prompt for ticket in tickets))),
            first_try=first_try,
        )
        for ticket in tickets:
            ticket.order, ticket.hopes = next(self._orders), role is not None
            self.tickets[ticket.id] = ticket
            ticket.timer = self._loop.call_later(ticket.deadline_at - now, self._expire, ticket)
            self._enqueue(ticket)
        self.pump()

    def _may_come(self, role: Role, now: float) -> bool:
        """Whether a worker that does the work of ``role`` may be there in a moment: one that has lost its connection,
        or, shortly after the start and while none has joined, one that served the coordinator before this one. A drain
        does not wait for those."""
        rejoining = now < self._rejoin_until and not self.registry.had(role) and not self.draining
        return rejoining or self.gateway.may_return(role)

    def abort(self, ticket: Ticket) -> None:
        """The client has left or wants no more. Idempotent; nothing for one that was not taken in."""
        if ticket.id in self.tickets:
            self._end(ticket, State.ABORTED, tell_workers=True)
            self.metrics.ended(ticket, "aborted")

    def fail(self, ticket: Ticket, error: RequestError) -> None:
        """Ends the request with an error that reaches the client."""
        if not ticket.life.over:
            self._end(ticket, State.FAILED, tell_workers=True)
            self.metrics.ended(ticket, "failed")
            ticket.client.failed(ticket, error)

    def _too_large(self, ticket: Ticket) -> RequestError | None:
        """Why no worker that is here could ever hold the request, if so."""
        need = ticket.need()
        roomiest = self.router.roomiest(need)
        if roomiest is not None and need.room(roomiest) < need.least:
            return too_large(need, roomiest, ticket.prompt_length)
        longest = self.router.longest_prompt()
        return None if longest is None or need.tokens <= longest else prompt_too_long(need.tokens, longest)

    def _expire(self, ticket: Ticket) -> None:
        if ticket.placed_at is not None:
            self.admission.served(self._clock() - ticket.placed_at)
        waiting = "a worker" if ticket.life.state is State.QUEUED else f"its end while {ticket.life.state.value}"
        self.fail(
            ticket,
            RequestError(
                f"The request's deadline passed; it was waiting for {waiting}.",
                status=504,
                type="timeout_error",
                code="request_timeout",
            ),
        )

    def _end(self, ticket: Ticket, state: State, *, tell_workers: bool) -> None:
        """The one way out for a ticket."""
        if ticket.queued:
            self._leave_queue(ticket, placed=False)
        elif ticket.placed_at is not None:
            self.admission.freed(self._clock() - ticket.placed_at)
        if tell_workers:
            self._tell(ticket.life.workers, Abort(ticket.id, ticket.life.attempt))
        ticket.life.move(state)
        ticket.finished_at = self._clock()
        self._take_off(ticket)
        if ticket.timer is not None:
            ticket.timer.cancel()
        self.tickets.pop(ticket.id, None)
        self.pump_soon()

    # -- the queue ------------------------------------------------------------------------------------------------

    def _running(self) -> Iterator[Running]:
        """The requests that are at workers."""
        now = self._clock()
        for ticket in self.tickets.values():
            if ticket.placed_at is not None and not ticket.queued:
                yield Running(now - ticket.placed_at, ticket.limit_s)

    def _enqueue(self, ticket: Ticket) -> None:
        ticket.queued = True
        self._queued += 1
        heapq.heappush(self._queue, (ticket.priority, ticket.order, ticket))

    def _leave_queue(self, ticket: Ticket, *, placed: bool) -> None:
        ticket.queued = False
        self._queued -= 1
        self._asked_for.pop(ticket.id, None)
        if len(self._queue) > 2 * self._queued + _LEFTOVERS:  # behind one that waits nobody would meet those that left
            self._queue = [entry for entry in self._queue if entry[2].queued]
            heapq.heapify(self._queue)
        self.admission.leave(ticket.prompt_length, self._clock(), placed=placed, priority=ticket.priority)

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
        aside: list[tuple[int, int, Ticket]] = []
        moments: list[float] = []
        try:
            while self._queue:
                ticket = self._queue[0][2]
                if not ticket.queued:
                    heapq.heappop(self._queue)
                    continue
                if ticket.awaits is not None:
                    aside.append(heapq.heappop(self._queue))
                    continue
                if ticket.not_before > now and ticket.id in self._asked_for:
                    moments.append(ticket.not_before)
                    break
                if ticket.life.attempt and (ticket.not_before > now or not self.retries.allows(len(self.tickets))):
                    aside.append(heapq.heappop(self._queue))
                    continue
                verdict = self.router.place(self._need(ticket))
                if isinstance(verdict, Wait) and not self.router.could_serve(ticket.need()):
                    ticket.stranded_at = ticket.stranded_at or now
                    aside.append(heapq.heappop(self._queue))
                    continue
                if ticket.life.suspect and not isinstance(verdict, Placement):
                    workerless |= isinstance(verdict, NoWorkers)
                    ticket.shortage = -1
                    aside.append(heapq.heappop(self._queue))
                    continue
                if not isinstance(verdict, Placement):
                    workerless = isinstance(verdict, NoWorkers)
                    self._shortages += 1
                    break
                if ticket.life.crashes and ticket.shortage != self._shortages:
                    self._ask_who_lives([ticket])
                    moments.append(ticket.not_before)
                    break
                heapq.heappop(self._queue)
                self._leave_queue(ticket, placed=True)
                self._place(ticket, verdict)
                ticket.stranded_at, ticket.settles = None, False
        finally:  # also when placing one fails
            for entry in aside:
                heapq.heappush(self._queue, entry)
        moments += [entry[2].not_before for entry in aside]
        self._pump_at(min((moment for moment in moments if moment > now), default=None))
        if not workerless:
            self._workerless_since = None
        elif self._workerless_since is None:
            self._workerless_since = self._clock()

    def _need(self, ticket: Ticket) -> Need:
        """What it asks of workers; one that may be the reason of crashes keeps away from others that may be."""
        need = ticket.need()
        if not ticket.life.suspect:
            return need
        suspects = [other.life for other in self.tickets.values() if other is not ticket and other.life.suspect]
        return replace(need, apart_from=frozenset(worker for life in suspects for worker in life.workers))

    def _pump_at(self, time: float | None) -> None:
        """Looks at the queue again when the first of those that wait for a moment may go."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if time is not None:
            self._later = self._loop.call_later(time - self._clock() + 0.001, self.pump_soon)

    def _place(self, ticket: Ticket, placement: Placement) -> None:
        """Sends the request to its workers: reservation and prefill together, nothing else was promised in between."""
        life, now = ticket.life, self._clock()
        if life.attempt:
            self.retries.placed(ticket.id)
        ticket.placement, ticket.path, ticket.hopes = placement, placement.path, False
        ticket.promise = self.router.promise(ticket.need(), placement)
        if ticket.placed_at is None:
            ticket.placed_at = now
        prefill, decode = placement.prefill, placement.decode
        life.place(placement.path, prefill.id if prefill else None, decode.id)
        for incarnation in life.workers:
            self.breakers.placed(Alone(incarnation), ticket.id)
        request = self._request(ticket, decode, now)
        if prefill is None:
            reached = self._send(ticket, decode, Generate(request, life.attempt))
        else:
            ticket.pair = Pair(prefill.id, decode.id)
            self.breakers.placed(ticket.pair, ticket.id)
            token = secrets.token_bytes(TOKEN_BYTES)
            # prefill first: the first token waits for it, and each message wakes two threads before the next leaves
            reached = self._send(ticket, prefill, Prefill(request, life.attempt, _peer(decode, token)))
            reached = reached and self._send(ticket, decode, Reserve(request, life.attempt, _peer(prefill, token)))
        if reached:
            life.move(State.PREFILLING)
        else:
            self._setback(ticket)

    def _request(self, ticket: Ticket, decode: WorkerHandle, now: float) -> Request:
        return Request(
            id=ticket.id,
            prompt=ticket.prompt,
            sampling=_sampling_on(decode, ticket),
            n=ticket.n,
            emitted=ticket.life.emitted(),
            cache_salt=ticket.cache_salt,
            priority=ticket.priority,
            deadline_ms=max(1, int((ticket.deadline_at - now) * 1000)),
            ended=tuple(choice for choice, finish in enumerate(ticket.life.finish) if finish),
        )

    def _send(self, ticket: Ticket, worker: WorkerHandle, message: Message) -> bool:
        reached = self.gateway.send(worker, message)
        if reached:
            ticket.sent[worker.id] = self.gateway.sent[worker.id]
            self._on.setdefault(worker.id, {})[ticket.id] = ticket
        return reached

    def _tell(self, workers: Sequence[Incarnation], message: Message) -> None:
        for incarnation in workers:
            if (worker := self.registry.get(incarnation)) is not None:
                self.gateway.send(worker, message)

    def _take_off(self, ticket: Ticket) -> None:
        """The ticket has left its workers: the ledger, the budget and the index forget it."""
        self._settle_retry(ticket)
        if ticket.pair is not None:
            self.breakers.dropped(ticket.pair, ticket.id)
            ticket.pair = None
        if ticket.promise is not None:
            self.router.release(ticket.promise)
            ticket.promise = None
        for incarnation in ticket.sent:
            self.breakers.dropped(Alone(incarnation), ticket.id)
            self._on.get(incarnation, {}).pop(ticket.id, None)
        ticket.sent.clear()
        ticket.missed_beats.clear()

    # -- setbacks -------------------------------------------------------------------------------------------------

    def _setback(
        self,
        ticket: Ticket,
        *,
        free: bool = False,
        shun: WorkerHandle | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """The attempt is lost: try again within the budget, else fail. ``shun``: whose fault it was, if it lives on;
        the rest as in :meth:`Life.setback`."""
        if shun is not None:
            ticket.shun |= {shun.id}
        life = ticket.life
        workers, attempt, migrates = life.workers, life.attempt, life.started
        if life.setback(on_trial=ticket.awaits is not None, free=free) == "spent":
            self.fail(ticket, given_up())
            return
        self._tell(workers, Abort(ticket.id, attempt))
        self._take_off(ticket)
        self.metrics.set_back(migration=migrates)
        self.admission.back(ticket.prompt_length, priority=ticket.priority)
        self._enqueue(ticket)
        ticket.not_before = self._clock() + delay_s
        self.pump_soon()

    def _failed_by(self, worker: WorkerHandle, ticket: Ticket, *, delay_s: float = 0.0) -> None:
        """``worker`` failed the request, and lives on. That it fails whatever it is given says nothing about a request,
        so it costs the budget nothing, once for each such worker."""
        peer = Alone(worker.id)
        self.breakers.failed(peer, ticket.id, self._clock())
        free = not self.breakers.allows(peer) and worker.id not in ticket.shun
        self._setback(ticket, free=free, shun=worker, delay_s=delay_s)

    def _settle_retry(self, ticket: Ticket) -> None:
        if self.retries.settled(ticket.id):
            self.pump_soon()

    # -- what workers say -----------------------------------------------------------------------------------------

    def joined(self, worker: WorkerHandle) -> None:
        self.returned(worker.id)
        if self.router.missing_role() is None:
            for ticket in self.tickets.values():
                ticket.hopes = False
        for trial in self.links.trials(worker, self.registry):
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
        if decode is not None and (trial := self.links.measured(worker, decode, message)) is not None:
            self._try(trial)

    def lost(self, worker: WorkerHandle, how: Loss) -> None:
        """It is gone without a word. What it was doing moves on: at once if it lives, else when it is known who else
        does. Requests that may be why it and others before it died wait until it is known whether it did."""
        tickets = self._bereaved(worker)
        if how is not Loss.MISSING:
            for ticket in tickets:
                self._setback(ticket, free=how is Loss.RECONNECTED and ticket.life.disconnected())
        elif tickets:
            self._lost_by_a_crash(worker, tickets)
        self._look_for_answers()
        self.pump_soon()

    def _lost_by_a_crash(self, worker: WorkerHandle, tickets: Sequence[Ticket]) -> None:
        """Only who lived when it got a request can have died of it."""
        dead_before = {ticket.id for ticket in tickets if worker.answered < ticket.asked}
        suspects = [each for each in tickets if each.id not in dead_before and each.life.bereaved(worker.id)]
        if suspects:
            self._suspects[worker.id] = suspects
        for ticket in suspects:
            ticket.awaits = worker.id
        for ticket in tickets:
            free = ticket.id in dead_before or ticket.life.in_doubt(worker.id)
            self._setback(ticket, free=free)
        self._ask_who_lives(tickets)

    def _ask_who_lives(self, tickets: Sequence[Ticket]) -> None:
        """They are not placed before that is known, or nobody answers any more."""
        self._asking, now = self.gateway.ask(), self._clock()
        for ticket in tickets:
            ticket.asked, ticket.not_before, ticket.shortage = self._asking, now + ANSWERS_S, self._shortages
            if ticket.queued:
                self._asked_for[ticket.id] = ticket

    def _look_for_answers(self) -> None:
        """Once it is known of every worker that it lives, nobody waits for that any more."""
        if self._asked_for and all(worker.answered >= self._asking for worker in self.registry):
            now = self._clock()
            for ticket in self._asked_for.values():
                ticket.not_before = now
            self._asked_for.clear()
            self.pump_soon()

    def died(self, worker: Incarnation) -> None:
        """It does not come back. If one of its requests was there at more crashes than any other, that is held to be
        the reason; several are tried again apart from each other, so that the next crash tells which it is."""
        for ticket in self.tickets.values():
            ticket.life.died(worker)
        suspects = self._suspects.pop(worker, [])
        most = max((len(ticket.life.crashes) for ticket in suspects), default=0)
        foremost = [ticket for ticket in suspects if len(ticket.life.crashes) == most]
        if len(foremost) == 1 and foremost[0].awaits == worker:
            names = ", ".join(sorted(foremost[0].life.crashes))
            log.warning("request %s is given up: the workers that had it died (%s)", foremost[0].id.hex(), names)
            self.fail(foremost[0], quarantined())
        self._acquit([ticket for ticket in suspects if ticket.awaits == worker])

    def returned(self, worker: Incarnation) -> None:
        """It has lost its connection, and nothing else."""
        self._suspects.pop(worker, None)
        for ticket in self.tickets.values():
            ticket.life.returned(worker)
        waiting = [ticket for ticket in self.tickets.values() if ticket.awaits is not None]
        self._acquit([ticket for ticket in waiting if ticket.awaits == worker or not ticket.life.suspect])

    def _acquit(self, tickets: Sequence[Ticket]) -> None:
        """They may be tried again, if they have tries left."""
        for ticket in tickets:
            ticket.awaits = None
            if ticket.life.spent:
                self.fail(ticket, given_up())
        self.pump_soon()

    def left(self, worker: WorkerHandle) -> None:
        """It was told to leave and had no time to finish: what it was doing moves on, at the cost of a pause."""
        for ticket in self._bereaved(worker):
            self._setback(ticket, free=True)
        self.pump_soon()

    def _bereaved(self, worker: WorkerHandle) -> list[Ticket]:
        """Forgets a worker that is gone; the requests that cannot go on without it."""
        self.router.forget(worker)
        self.links.forget(worker)
        self._emptied.pop(worker.id, None)
        tickets = [ticket for ticket in self._on.pop(worker.id, {}).values() if ticket.life.needs(worker.id)]
        if tickets:
            log.info("requests of %s that are placed again: %d", worker.hello.name, len(tickets))
        return tickets

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None:
        """One step's spans; WireError if the columns do not match."""
        ids = _checked_ids(message)
        now = self._clock()
        logprobs = message.logprobs
        at = 0
        for index, count in enumerate(message.counts):
            ticket = self.tickets.get(message.requests[index * REQUEST_ID_BYTES : (index + 1) * REQUEST_ID_BYTES])
            if ticket is not None:
                self._span(worker, ticket, message, index, ids[at : at + count], logprobs[at : at + count], now)
            at += count

    def _span(
        self,
        worker: WorkerHandle,
        ticket: Ticket,
        message: Tokens,
        index: int,
        ids: list[int],
        logprobs: Sequence[Logprobs | None],
        now: float,
    ) -> None:
        life, choice, attempt = ticket.life, message.choices[index], message.attempts[index]
        if worker.id != life.decode and worker.id != life.prefill:
            return
        finish = _FINISHES[message.finish[index]]
        if finish in (FinishReason.ABORTED, FinishReason.FAILED):
            if attempt == life.attempt and life.needs(worker.id):
                self._setback(ticket)
            return
        news = life.accept(choice, attempt, message.starts[index], ids, finish)
        if news is None:
            return
        if isinstance(news, Contradiction):
            log.warning("%s contradicts what a client was told, at token %d", worker.hello.name, message.starts[index])
            self._failed_by(worker, ticket)
            return
        if isinstance(news, Gap):
            self._ask_again(worker, ticket, choice, news.start, now)
            return
        life.spoke(worker.id)
        if not self.breakers.calm and self.breakers.succeeded(Alone(worker.id)):
            self.pump_soon()
        if life.crashes and life.survives(len(news.ids)):
            self.pump_soon()  # others that are suspected may come to its workers
        self._settle_retry(ticket)
        self._note_hand_off(ticket)
        ticket.heard_at = now
        ticket.missed_beats.pop(worker.id, None)
        self._observe(ticket, choice, len(news.ids), now)
        try:
            ended = ticket.client.tokens(ticket, choice, news.ids, logprobs[news.skip :], finish)
        except Exception:  # one answer's text must not stop the others
            log.exception("an answer could not be written")
            self.fail(ticket, internal())
            return
        if ended and not life.over:
            life.end_choice(choice)
            ticket.cut = True
        if life.finished and not life.over:
            self._finish(ticket)

    def _observe(self, ticket: Ticket, choice: int, count: int, now: float) -> None:
        if ticket.promise is not None and ticket.promise.prefill_tokens:
            self.router.prefilled(ticket.promise)
            self.pump_soon()  # somebody may compute the next prompt
        if ticket.first_token_at is None:
            ticket.first_token_at, ticket.first_attempt = now, ticket.life.attempt
            self.metrics.first_token(ticket, now)
        elif (before := ticket.last_token_at[choice]) and count:
            self.metrics.inter_token((now - before) / count, count)
            ticket.intervals.append((now - before) / count)
        ticket.last_token_at[choice] = now

    def _finish(self, ticket: Ticket) -> None:
        """Every choice has ended. Whoever may still hold something and does not know is told."""
        life = ticket.life
        on_prefill = life.path == "disagg" and life.state is not State.DECODING
        if on_prefill:
            ticket.path = "prefill"
        self._end(ticket, State.DONE, tell_workers=ticket.cut or on_prefill)
        self.metrics.ended(ticket, "done")
        if ticket.placed_at is not None:
            self.admission.served(self._clock() - ticket.placed_at)
        try:
            ticket.client.done(ticket)
        except Exception:  # it would wait for ever, and what others have said would not be read
            log.exception("the end of an answer could not be written")
            ticket.client.failed(ticket, internal())

    def _ask_again(self, worker: WorkerHandle, ticket: Ticket, choice: int, start: int, now: float) -> None:
        if now - ticket.asked_at >= RESEND_EVERY_S:
            ticket.asked_at = now
            self.gateway.send(worker, Resend(ticket.id, ticket.life.attempt, choice, start))

    def timing(self, worker: WorkerHandle, message: Timing) -> None:
        if "kv_bytes" in message.values:  # also when its request has ended meanwhile
            self.metrics.transferred(message)
        ticket = self.tickets.get(message.request)
        if ticket is None or message.attempt != ticket.life.attempt:
            return
        if ticket.first_attempt in (None, message.attempt):  # how a stream went on elsewhere is told by its gap
            ticket.timings.update(message.values)
        if worker.id == ticket.life.decode and ticket.life.path == "disagg":
            ticket.life.decoding()
            ticket.heard_at = self._clock()
            self._note_hand_off(ticket)

    def _note_hand_off(self, ticket: Ticket) -> None:
        """The pair's breaker hears of a hand-off that was accepted, once."""
        if ticket.pair is not None and ticket.life.state is State.DECODING:
            if self.breakers.succeeded(ticket.pair):
                self.pump_soon()
            ticket.pair = None

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None:
        ticket = self.tickets.get(message.request)
        if message.code == "transfer_failed":
            self.metrics.transfer_failed(message.code)
        if ticket is None or message.attempt != ticket.life.attempt or not ticket.life.needs(worker.id):
            return
        if message.code == "draining":  # it says so before its next heartbeat does
            self.registry.drains(worker)
            self._setback(ticket, free=True)
            return
        log.warning("%s gives a request up: %s (%s)", worker.hello.name, message.code, message.detail)
        if message.code == "transfer_failed" and ticket.pair is not None:
            self.breakers.failed(ticket.pair, ticket.id, self._clock())
            ticket.avoid |= {ticket.pair}
            ticket.pair = None
            self._setback(ticket, delay_s=RETRY_DELAY_S)
        elif message.retriable:
            self._failed_by(worker, ticket, delay_s=RETRY_DELAY_S)
        else:
            self.fail(ticket, worker_error(message))

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
        for ticket in list(on.values()):
            if ticket.sent.get(worker.id, 0) > beat.acted_on or not self._should_have(ticket, worker):
                continue
            missed = 0 if ticket.id in known else ticket.missed_beats.get(worker.id, 0) + 1
            ticket.missed_beats[worker.id] = missed
            if missed >= MISSED_BEATS:
                log.warning("%s does not have a request that it was given", worker.hello.name)
                self._failed_by(worker, ticket)
            elif missed:
                self._ask_for_the_end(worker, ticket)
            elif ticket.n > 1:
                self._ask_for_the_silent(worker, ticket)

    def _ask_for_the_end(self, worker: WorkerHandle, ticket: Ticket) -> None:
        """It may have finished what it does not list, and its last words were lost: it can say them again for a while.
        Beats count again once it has acted on that, which a worker in a long step has not."""
        life = ticket.life
        for choice, finish in enumerate(life.finish):
            if not finish and not self._send(
                ticket, worker, Resend(ticket.id, life.attempt, choice, len(life.output[choice]))
            ):
                return

    def _ask_for_the_silent(self, worker: WorkerHandle, ticket: Ticket) -> None:
        """Choices that got nothing for a heartbeat's time: their last words may be lost, and while any other goes on,
        even one that was ended from this side, heartbeats list the request. One that waits for a slot or for blocks has
        nothing to answer. No number of messages is noted: beats count whether the worker has acted on these or not,
        however often they come.
        """
        life = ticket.life
        if life.state is not State.DECODING:
            return
        for choice, (finish, heard_at) in enumerate(zip(life.finish, ticket.last_token_at, strict=True)):
            if not finish and self._clock() - heard_at > self.times.heartbeat_s:
                self.gateway.send(worker, Resend(ticket.id, life.attempt, choice, len(life.output[choice])))

    def _should_have(self, ticket: Ticket, worker: WorkerHandle) -> bool:
        """Decode has a request from its reservation to its end, prefill until the first token."""
        life = ticket.life
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
            if self.backlog is not None:
                self.backlog.look(self.router.backlog_steps())
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
        for ticket in list(on.values()):
            if ticket.life.state is not State.DECODING or ticket.life.decode != worker.id or ticket.id in resting:
                continue
            if now - ticket.heard_at <= least_s:  # the usual: what the patience really is takes longer to find out
                continue
            silence_s = self.registry.lags.silence(ticket.heard_at, now)
            if silence_s > max(least_s, STALL_INTERVALS * ticket.interval_s, STALL_STEPS * beat.longest_ms / 1000):
                log.warning("%s has said nothing about a stream for %.1f s", worker.hello.name, silence_s)
                self._failed_by(worker, ticket)

    def _renew_leases(self) -> None:
        """Tells every worker what it may hold: its own timers free whatever else it has, and everything without us."""
        for worker in list(self.registry):
            on = self._on.get(worker.id, {})
            live = pack_transfers(TransferId(ticket.id, ticket.life.attempt) for ticket in on.values())
            if self.gateway.send(worker, Lease(live, self.gateway.sent[worker.id] + 1)):
                self.registry.leased(worker, self._clock())

    def _next_tick(self) -> None:
        self._ticks = self._loop.call_later(self.times.sweep_s, self._tick)

    def _give_up_waiting(self, waited_s: float) -> None:
        role = self.router.missing_role()
        if role is None or self._may_come(role, self._clock()):
            return
        least_s = REJECTED_WAIT_S if role == "prefill" else WORKERLESS_WAIT_S
        for _, _, ticket in sorted(self._queue, key=lambda entry: entry[:2]):
            if ticket.queued and waited_s > self._patience_s(ticket, least_s):
                self.fail(ticket, no_workers(role, starting=self.registry.starting(role)))

    def _give_up_stranded(self, now: float) -> None:
        """Who is too large for the workers that are there waits for others, a bounded time. One without a limit then
        takes what room there is."""
        longest_s = self.times.lease_s + WORKERLESS_WAIT_S
        for ticket in [entry[2] for entry in self._queue]:
            if ticket.stranded_at is None or not ticket.queued:
                continue
            if self.router.could_serve(need := ticket.need()):
                ticket.stranded_at = None
            elif now - ticket.stranded_at <= min(longest_s, self._patience_s(ticket, WORKERLESS_WAIT_S)):
                continue
            elif ticket.open_ended and not ticket.settles:
                ticket.settles = True
                self.pump_soon()
            else:
                reason = None if ticket.life.started else self._too_large(ticket)
                self.fail(ticket, reason or outgrown(need.tokens + need.least))

    def _patience_s(self, ticket: Ticket, least_s: float) -> float:
        """How long a request waits where nobody can take it."""
        if ticket.hopes:
            return 0.0
        if not ticket.life.started:
            return least_s
        return inf if ticket.client.told else self.times.lease_s + WORKERLESS_WAIT_S


def _sampling_on(decode: WorkerHandle, ticket: Ticket) -> SamplingParams:
    """An answer without a limit gets as long as this worker can hold."""
    sampling, need = ticket.sampling, ticket.need()
    if (missing := need.output - need.room(decode.hello)) <= 0:
        return sampling
    if not ticket.open_ended:
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
