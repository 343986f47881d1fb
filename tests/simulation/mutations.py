"""Known bugs of prefill/decode serving, injected on purpose to prove that the simulation catches them.

Each is a patch over the real code, with the complaints that the simulation must make. ``python -m tests.simulation
--mutation NAME`` plays histories with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec

from common.core.ids import TransferId
from common.core.timeouts import FailureTimes
from common.engine.scheduler import Planner
from common.kv.cache import KvCache
from common.net.messages import Commit
from common.worker.held_requests import HeldRequests
from common.worker.loop import Worker
from common.worker.membership import Membership
from coordinator.cluster import lost_workers
from coordinator.cluster.registry import Registry
from coordinator.cluster.registry import WorkerHandle as Member
from coordinator.requests.active import ActiveRequests
from coordinator.requests.admission import RetryBudget
from coordinator.requests.crash_verdicts import CrashVerdicts
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.errors import quarantined
from coordinator.requests.record import RequestRecord
from coordinator.requests.silence_watch import SilenceWatch
from coordinator.requests.state import Accepted, Gap, RequestState
from coordinator.requests.token_stream import TokenStream
from coordinator.requests.wait_limits import WaitLimits
from coordinator.routing import router
from coordinator.routing.breakers import Breakers
from coordinator.routing.router import Demand, Router
from decode.reservations import Reservations
from decode.role import DecodeWorker
from kvtransfer.links import base, pull
from kvtransfer.session import ReceiverSession, SenderSession, TransferState
from tests.simulation.grammar_mutations import GRAMMAR_MUTATIONS
from tests.simulation.mutation import NO_FIRST_TOKEN, NO_NEXT_TOKEN, WRONG_TOKENS, Mutation

FALSE_ALARM = "is taken for dead though nothing was wrong"
CARRIES_NOTHING = "keeps a connection that carries nothing"


def _aborts_below_the_receiver(self: DecodeWorker, transfer: TransferId) -> None:
    """Free blocks while frames of their transfer can still be written into them."""
    with mock.patch.object(self.receiver, "cancel"):
        _ABORT(self, transfer)


def _accepts_anything(self: ReceiverSession, now: float) -> None:
    self.state, self.progress_at = TransferState.ACCEPTED, now


def _takes_any_checksum(self: ReceiverSession, commit: Commit) -> str:
    return _OBJECTION(self, msgspec.structs.replace(commit, checksum=self.checksum))


def _hears_progress(self: SenderSession, step_s: float, now: float) -> None:
    _HEARD(self, step_s, now)
    self.progress_at = max(self.progress_at, now)


def _without_fence(self: RequestState, choice: int, attempt: int, start: int, ids: list[int], finish: Any) -> Any:
    return _ACCEPT(self, choice, self.attempt, start, ids, finish)


def _takes_what_it_has(self: RequestState, choice: int, attempt: int, start: int, ids: list[int], finish: Any) -> Any:
    known = len(self.output[choice]) if 0 <= choice < len(self.output) else 0
    return _ACCEPT(self, choice, attempt, max(start, known), ids, finish)


def _skips_gaps(self: RequestState, choice: int, attempt: int, start: int, ids: list[int], finish: Any) -> Any:
    found = _ACCEPT(self, choice, attempt, start, ids, finish)
    if not isinstance(found, Gap):
        return found
    self.output[choice] += ids
    self.finish[choice] = finish
    return Accepted(0, ids, finish)


def _visible_at_once(self: DecodeWorker, now: float) -> None:
    """Publish blocks in the prefix cache before their KV has arrived."""
    _GRANT(self, now)
    for reservation in self.reservations._granted.values():
        if reservation.table is not None:
            self.cache.publish(reservation.table, reservation.sequence.tokens, len(reservation.sequence.tokens))


def _parks_with_its_progress(self: Planner, entry: Any) -> None:
    computed = entry.sequence.computed
    _PARK(self, entry)
    entry.sequence.computed = computed


def _admits_with_its_progress(self: Planner, entry: Any) -> bool:
    computed = entry.sequence.computed
    admitted = _ADMIT(self, entry)
    if admitted:
        entry.sequence.computed = max(entry.sequence.computed, min(computed, len(entry.sequence.tokens) - 1))
    return admitted


def _forks_without_a_copy(self: KvCache, table: Any, holder: Any, computed: int) -> Any:
    other, _ = _FORK(self, table, holder, computed)
    return other, []


def _grants_to_the_only_one(self: Reservations, spare_blocks: int, asked_before: float = math.inf) -> Any:
    return _RESERVE(self, spare_blocks, asked_before) if not spare_blocks else None


def _prefill_holds_all(demand: Demand, worker: Member) -> int:
    return demand.output if worker.role == "prefill" else _ROOM(demand, worker)


def _wants_all(self: RequestRecord) -> Demand:
    return replace(_DEMAND(self), enough=None)


def _misses_full(self: Router) -> Any:
    full = (self.account(each).sequences >= each.hello.max_num_seqs for each in self.registry.ready("decode"))
    return "decode" if all(full) and not self.registry.ready("colocated") else _MISSING(self)


def _keeps_heartbeat_thread(self: Membership, interval_s: float) -> None:
    if self._heartbeat_thread is None:
        _START_HEART(self, interval_s)


def _counts_any_message(self: Registry, worker: Member) -> None:
    _RENEWED(self, worker)
    worker.heard_at = math.inf


_ABORT, _ACCEPT, _GRANT = DecodeWorker.abort, RequestState.accept, DecodeWorker._grant
_PARK, _ADMIT, _FORK = Planner._park, Planner._admit, KvCache.fork
_CLOSE, _HEARD, _RESERVE = Worker.close, SenderSession.heard, Reservations.grant
_OBJECTION = ReceiverSession.objection
_ROOM, _DEMAND = router._room, RequestRecord.demand
_MISSING, _LOST = Router.missing_role, CrashVerdicts.worker_missing
_START_HEART, _RENEWED = Membership._start_heartbeats, Registry.renewed


def _leaves(self: Worker, *, crashed: bool = False) -> None:
    _CLOSE(self)


def _blames_all(self: CrashVerdicts, worker: Any) -> None:
    for record in self._suspects.pop(worker, []):
        self._active.fail(record, quarantined())


def _lost_though_dead_before(self: CrashVerdicts, worker: Member, records: Any) -> None:
    for record in records:
        record.asked = 0
    _LOST(self, worker, records)


def _hangs_soon(self: Registry, worker: Member) -> bool:
    return worker.beat is not None and worker.beat.turn_ms > max(250, worker.beat.expected_ms / 2)


def _nothing(*_: Any, **__: Any) -> None: ...


def _no(*_: Any) -> bool:
    return False


def _yes(*_: Any) -> bool:
    return True


MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "free early": (
        Mutation(
            "a reservation's blocks are freed while its hand-off goes on",
            DecodeWorker, "abort", _aborts_below_the_receiver, ("held by no holder", "landed without"),
        ),
    ),
    "fail open": (
        Mutation("checksums are not looked at", base, "compare", _nothing, ()),
        Mutation("nor those of what was pulled", pull, "compare", _nothing, ()),
        Mutation("nor that of all frames", ReceiverSession, "objection", _takes_any_checksum, (WRONG_TOKENS,)),
    ),
    "trust the commit": (
        Mutation("what landed is not compared with the commit", ReceiverSession, "objection", lambda *_: "", ()),
        Mutation("missing frames are not waited for", ReceiverSession, "behind", _no, ()),
        Mutation("not even the first", ReceiverSession, "accept", _accepts_anything, (WRONG_TOKENS,)),
    ),
    "no lease sweep": (
        Mutation(
            "requests whose Abort was lost are kept", HeldRequests, "reap", _nothing, ("still held", "left behind")
        ),
    ),
    "no expiry": (
        Mutation(
            "a worker without a coordinator keeps all",
            HeldRequests, "expire_lease", _nothing, ("for a dead coordinator",),
        ),
    ),
    "no fence": (
        Mutation("spans of an older attempt count", RequestState, "accept", _without_fence, ("older attempt",)),
    ),
    "take twice": (
        Mutation("known tokens are appended again", RequestState, "accept", _takes_what_it_has, (WRONG_TOKENS,)),
    ),
    "skip gaps": (Mutation("tokens after a hole are taken", RequestState, "accept", _skips_gaps, (WRONG_TOKENS,)),),
    "visible early": (
        Mutation(
            "blocks are shared before their KV was verified",
            DecodeWorker, "_grant", _visible_at_once, (WRONG_TOKENS, "writes into"),
        ),
    ),
    "sticky breaker": (
        Mutation("a pair that failed is never tried again", Breakers, "tick", _no, ("still open",)),
    ),
    "forget the ledger": (Mutation("promises are not taken back", Router, "release", _nothing, ("promised of",)),),
    "stale progress": (
        Mutation("a parked sequence keeps its progress", Planner, "_park", _parks_with_its_progress, ()),
        Mutation("and goes on from there", Planner, "_admit", _admits_with_its_progress, (WRONG_TOKENS,)),
    ),
    "shared last block": (
        Mutation("siblings go on in one block", KvCache, "fork", _forks_without_a_copy, (WRONG_TOKENS, "writes into")),
    ),
    "sleep through deadlines": (
        Mutation("a deadline passes unseen", ActiveRequests, "_expire", _nothing, ("after its deadline",)),
    ),
    "no inter-token watchdog": (
        Mutation("a worker may be silent about a stream", SilenceWatch, "look_for_stalls", _nothing, (NO_NEXT_TOKEN,)),
    ),
    "no hang watchdog": (
        Mutation("a step may take for ever", Registry, "hangs", _no, (NO_FIRST_TOKEN,)),
    ),
    "heartbeats replace lease acknowledgements": (
        Mutation(
            "leases that are not answered are not missed",
            Registry, "leased", _nothing, (NO_FIRST_TOKEN, NO_NEXT_TOKEN),
        ),
    ),
    "worker never reconnects": (
        Mutation("a cut-off worker does not reconnect", Membership, "_dial_again", _nothing, ("is not registered",)),
    ),
    "heartbeat thread is never restarted": (
        Mutation(
            "a rejoined worker keeps its heartbeat thread",
            Membership, "_start_heartbeats", _keeps_heartbeat_thread, (CARRIES_NOTHING,),
        ),
    ),
    "any message is a heartbeat": (
        Mutation("any message ends a silence", Registry, "renewed", _counts_any_message, (CARRIES_NOTHING,)),
    ),
    "silence is death": (
        Mutation("one late heartbeat is enough", FailureTimes, "silence_s", 0.3, (FALSE_ALARM,)),
    ),
    "a long step is a hang": (
        Mutation("a quarter of a second is one, whatever is due", Registry, "hangs", _hangs_soon, (FALSE_ALARM,)),
    ),
    "no missed beats": (
        Mutation(
            "what a worker does not have is not missed",
            Dispatcher, "beat", _nothing, (NO_FIRST_TOKEN, NO_NEXT_TOKEN),
        ),
    ),
    "ends are not asked for": (
        Mutation(
            "what a worker does not list any more is given again at once",
            SilenceWatch, "_ask_for_the_end", _nothing, (NO_NEXT_TOKEN,),
        ),
    ),
    "no resend": (
        Mutation("lost tokens are not asked for again", TokenStream, "_ask_again", _nothing, (NO_NEXT_TOKEN,)),
    ),
    "siblings are not missed": (
        Mutation(
            "a choice may be silent while another goes on",
            SilenceWatch, "_ask_for_the_silent", _nothing, ("of one choice", NO_NEXT_TOKEN),
        ),
    ),
    "no retry budget": (
        Mutation("all that were hit try again at once", RetryBudget, "allows", _yes, ("are tried again at once",)),
    ),
    "a crash is a goodbye": (
        Mutation(
            "a worker that dies of an error leaves politely",
            Worker, "close", _leaves, ("have died of one", "fails with request_timeout"),
        ),
    ),
    "suspect every request": (
        Mutation(
            "all that met two crashes are refused", CrashVerdicts, "worker_died", _blames_all,
            ("beside a poisonous one",),
        ),
    ),
    "the dead die again": (
        Mutation(
            "a request counts as there when a worker dies that was dead when it got it",
            CrashVerdicts, "worker_missing", _lost_though_dead_before, ("fails with request_quarantined",),
        ),
    ),
    "a broken connection is a death": (
        Mutation(
            "a worker has no time to join again",
            lost_workers, "REJOIN_LOOKS", 0, ("fails with request_quarantined",),
        ),
    ),
    "breakers never open": (
        Mutation("pairs that keep failing are kept", Breakers, "failed", _nothing, ("after its third failure",)),
    ),
    "hand-offs wait for an empty pool": (
        Mutation(
            "blocks are granted when no other request runs",
            Reservations, "grant", _grants_to_the_only_one, (NO_NEXT_TOKEN,),
        ),
    ),
    "full is missing": (
        Mutation("workers whose slots are taken are not there", Router, "missing_role", _misses_full, ("finds no",)),
    ),
    "prefill holds everything": (
        Mutation("prompts go where they have no room", router, "_room", _prefill_holds_all, ("tokens ends with",)),
    ),
    "no limit is a limit": (
        Mutation(
            "an answer without a limit wants all that fitted once",
            RequestRecord, "demand", _wants_all, ("tokens ends with",),
        ),
    ),
    "outgrown for ever": (
        Mutation(
            "a request that fits no worker any more waits for ever",
            WaitLimits, "_give_up_stranded", _nothing, ("tokens ends with",),
        ),
    ),
    "no receiver lease": (
        Mutation("a reservation waits for ever", ReceiverSession, "tick", _nothing, (NO_FIRST_TOKEN, NO_NEXT_TOKEN)),
    ),
    "grants are progress": (
        Mutation(
            "a grant that is said again renews a sender's patience",
            SenderSession, "heard", _hears_progress, (NO_NEXT_TOKEN, "request_timeout"),
        ),
    ),
    "no sender timers": (
        Mutation("nothing is repeated or given up", SenderSession, "tick", _no, (NO_FIRST_TOKEN, NO_NEXT_TOKEN)),
    ),
    **GRAMMAR_MUTATIONS,
}  # fmt: skip


@contextmanager
def brought_back(name: str) -> Iterator[None]:
    """Inject the bug ``name`` for the duration of the block."""
    with ExitStack() as stack:
        for mutation in MUTATIONS[name]:
            stack.enter_context(mock.patch.object(mutation.target, mutation.name, mutation.bug))
        yield
