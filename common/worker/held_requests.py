"""The requests that a worker holds: which it accepts, how long it may keep them, and how it gives them up.

A (request, attempt) is held from :meth:`HeldRequests.accept` until :meth:`HeldRequests.over`. The worker's role aborts
it before its output is complete when it fails, at its deadline, when the lease expires because the coordinator is
silent, or when a Lease does not list it, since its Abort was then lost. Link trials, which hold blocks without a
request, have deadlines here, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import KeysView
from typing import TYPE_CHECKING, Protocol

from common.core.errors import OutOfBlocks, WireError
from common.core.ids import MAX_ATTEMPT, TransferId, max_token, transfer_holder, unpack_transfers
from common.core.request import Request
from common.kv.cache import KvCache
from common.kv.table import BlockTable
from common.net.messages import MAX_HELD, MAX_TEXT, RequestFailed
from common.worker.former import FormerCoordinator
from common.worker.membership import Membership

if TYPE_CHECKING:
    from common.worker.loop import Engine
    from common.worker.report import WorkerReport

log = logging.getLogger("tandem.worker")

TRIAL_S = 5.0
"""Deadline of a link trial. One that takes longer will not end: the peer was short of blocks, or is gone."""


class RequestOwner(Protocol):
    """The worker's role, which has the state of each request."""

    def abort(self, transfer: TransferId) -> None:
        """Drop everything that (request, attempt) has here; unknown ones are fine."""
        ...

    def holdings(self) -> KeysView[TransferId]:
        """Return every (request, attempt) held here, in any state: requests in order of arrival, then link trials."""
        ...


class HeldRequests:
    """Deadlines and lease of all that ``owner`` holds, and the block tables of its link trials. Times in seconds."""

    def __init__(
        self, owner: RequestOwner, engine: Engine, cache: KvCache, membership: Membership, report: WorkerReport
    ) -> None:
        self._owner, self._engine, self._cache = owner, engine, cache
        self._membership, self._report = membership, report
        self._draining = False
        self._deadlines: dict[TransferId, float] = {}
        self._trials: dict[TransferId, BlockTable] = {}
        self._lease_s = self._leased_until = math.inf
        self._unlisted: set[TransferId] = set()
        """What the last Lease did not list, until :meth:`reap`."""

    # -- one request --------------------------------------------------------------------------------------------------

    def accept(self, request: Request, attempt: int, now: float, tokens: int) -> bool:
        """Return whether this worker takes the request. If it does not, the reason has been sent to the coordinator,
        unless the message is a repeated one. ``tokens`` is the maximum length of one choice, prompt included. Raises
        WireError if the attempt or a token id is out of range, which no coordinator sends."""
        transfer, engine = TransferId(request.id, attempt), self._engine
        if attempt > MAX_ATTEMPT:
            raise WireError(f"attempt {attempt} is out of range")
        if (most := max_token(request.prompt, *request.emitted)) >= engine.vocab_size:
            raise WireError(f"token {most} is outside the vocabulary of {engine.vocab_size}")
        if transfer in self._deadlines:
            return False  # a repeated message
        if self._draining:
            self.fail(transfer, "draining", "this worker is leaving", retriable=True)
        elif len(self._deadlines) >= MAX_HELD:
            self.fail(transfer, "no_memory", "heartbeats cannot report more requests", retriable=True)
        elif engine.layout.blocks_for(tokens) > engine.memory.blocks or tokens > engine.max_model_len:
            room = min(engine.max_model_len, engine.memory.blocks * engine.layout.block_size)
            self.fail(transfer, "too_long", f"{tokens} tokens, this worker holds at most {room}", retriable=False)
        else:
            self._deadlines[transfer] = now + request.deadline_ms / 1000
            if request.sampling.grammar and request.sampling.max_tokens and engine.grammars is not None:
                engine.grammars.prepare(request.sampling.grammar)
            return True
        return False

    def over(self, transfer: TransferId) -> None:
        """Forget the deadline of (request, attempt), once nothing of it is held here."""
        self._deadlines.pop(transfer, None)

    def fail(self, transfer: TransferId, code: str, detail: str, *, retriable: bool) -> None:
        """Abort (request, attempt) and report it as failed; ``code`` is one of :data:`common.net.messages.FAILURES`."""
        self._owner.abort(transfer)
        failed = RequestFailed(transfer.request, transfer.attempt, code, detail[:MAX_TEXT], retriable)
        self._membership.send(failed)

    def expire_deadlines(self, now: float) -> None:
        """Fail the requests whose deadlines have passed, and abort such link trials."""
        for transfer in [each for each, deadline in self._deadlines.items() if deadline < now]:
            if transfer in self._trials:
                self._owner.abort(transfer)
                continue
            self.fail(transfer, "deadline", "the request's deadline has passed", retriable=False)

    # -- all requests -------------------------------------------------------------------------------------------------

    def accept_no_more(self) -> None:
        """Refuse requests and link trials from now on, and abort the trials under way."""
        for transfer in list(self._trials):
            self._owner.abort(transfer)
        self._draining = True

    def drop_all(self) -> None:
        """Abort everything that is held."""
        for transfer in self._owner.holdings():
            self._owner.abort(transfer)

    def drop_own(self) -> None:
        """Abort everything that is held for the coordinator, and for none that is leaving."""
        for transfer in self._own():
            self._owner.abort(transfer)

    def drop_of(self, former: FormerCoordinator) -> int:
        """Abort everything that is held for a coordinator that is gone; return how many requests that were."""
        held = [each for each in self._owner.holdings() if each.request in former.requests]
        for transfer in held:
            self._owner.abort(transfer)
        return len(held)

    def hand_over(self) -> bool:
        """Let what is held belong to the coordinator that is leaving, and dial the next one; False if that cannot be.
        Link trials end."""
        for transfer in list(self._trials):
            self._owner.abort(transfer)
        return self._membership.hand_over([each.request for each in self._own()])

    def _own(self) -> list[TransferId]:
        """Return what is held and is not of a coordinator that is leaving."""
        is_former = self._membership.is_former
        return [each for each in self._owner.holdings() if not is_former(each.request)]

    # -- the lease ----------------------------------------------------------------------------------------------------

    def begin_lease(self, lease_s: float, now: float) -> None:
        """Begin leases of ``lease_s`` seconds, as Welcome prescribes."""
        self._lease_s, self._leased_until = lease_s, now + lease_s

    def renew_lease(self, live: bytes, now: float) -> None:
        """Renew the lease. Messages arrive in order, so a request held here but not in ``live`` was given up, and its
        Abort was lost."""
        try:
            listed = set(unpack_transfers(live))
        except ValueError as error:
            log.warning("dropped a Lease message: %s", str(error))
            self._membership.bad_messages += 1
            return
        self._leased_until = now + self._lease_s
        self._unlisted = self._owner.holdings() - self._trials.keys() - listed
        if self._membership.former:
            self._unlisted &= set(self._own())

    def renew_former(self, former: FormerCoordinator, live: bytes) -> None:
        """As :meth:`renew_lease` for a coordinator that is leaving, whose session has its own lease."""
        try:
            listed = set(unpack_transfers(live))
        except ValueError as error:
            log.warning("dropped a Lease message: %s", str(error))
            return
        held = {each for each in self._owner.holdings() if each.request in former.requests}
        self._unlisted |= held - listed

    def reap(self) -> None:
        """Drop the requests that the last Lease did not list. Called after hand-offs were advanced, so that one which
        ends in this turn anyway does not count as a lost Abort."""
        if not self._unlisted:
            return
        unlisted, self._unlisted = self._unlisted, set()
        for transfer in [each for each in self._owner.holdings() if each in unlisted]:
            log.warning("dropped request %s: the coordinator no longer lists it", transfer)
            self._owner.abort(transfer)
            self._report.count("reaped_requests")

    def expire_lease(self, now: float) -> None:
        """Drop everything once the lease has expired: without its coordinator a worker holds nothing."""
        if now > self._leased_until and (held := self._own()):
            log.warning("the coordinator has been silent for %g s: dropping %d requests", self._lease_s, len(held))
            self._report.count("reaped_requests", len(held))
            self.drop_own()

    def silent_s(self, now: float) -> float:
        """Return for how many seconds the coordinator has been silent if the lease has expired, else 0."""
        return now - self._leased_until + self._lease_s if now > self._leased_until else 0.0

    # -- link trials --------------------------------------------------------------------------------------------------

    @property
    def trials(self) -> KeysView[TransferId]:
        """The link trials under way."""
        return self._trials.keys()

    def open_trial(self, transfer: TransferId, tokens: int, now: float) -> BlockTable | None:
        """Take blocks, with arbitrary contents, for a hand-off that measures a link. None for a repeated message, while
        draining, or when blocks are short."""
        if transfer in self._owner.holdings() or self._draining or not tokens:
            return None
        table = self._cache.open(transfer_holder(transfer), [], "")
        try:
            self._cache.grow(table, tokens)
        except OutOfBlocks:
            self._cache.close(table)
            return None
        self._trials[transfer] = table
        self._deadlines[transfer] = now + TRIAL_S
        return table

    def close_trial(self, transfer: TransferId) -> bool:
        """Return the blocks of a link trial to the pool; False if there is no such trial."""
        table = self._trials.pop(transfer, None)
        if table is None:
            return False
        self._cache.close(table)
        self.over(transfer)
        return True
