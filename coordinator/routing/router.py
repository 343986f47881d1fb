"""Which workers serve a request.

Pure. Owns the ledger: what this coordinator has promised of every worker and not taken back, so that a decision never
waits for a heartbeat. Prefill goes where the fewest tokens stand before the request, its cached prefix deducted; decode
to the least loaded, by share of its slots and of its pool; workers that keep failing and pairs whose hand-offs do are
passed over. A request that fits nowhere now waits with the coordinator, where it holds nothing (no hold-and-wait across
pools).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.core.ids import Incarnation
from common.kv.layout import KvDtype
from common.kv.prefix import ChainKey
from common.net.messages import Hello, Role
from coordinator.cluster.registry import Registry, WorkerHandle
from coordinator.routing.breakers import Alone, Breakers, Pair
from coordinator.routing.paths import Path

Chains = Mapping[KvDtype, Sequence[ChainKey]]
"""A prompt's prefix keys, by the element type in which its KV was or will be computed."""
LocalPrefill = Literal["auto", "never", "always"]
NoPrefillPolicy = Literal["local", "wait", "reject"]
_HOLDERS: tuple[Role, ...] = ("decode", "colocated")
"""Who holds a request to its end."""

HORIZON_TOKENS = 512
"""Output tokens per choice that a promise covers; beyond it decode grows and, if it must, preempts."""
LOCAL_MISSING_TOKENS = 32
"""``auto``: so few tokens to compute cost a decode worker less than a hand-off."""
LOCAL_CACHED_SHARE = 0.75
"""``auto``: ... if at least this much of the prompt is in its cache already."""
LOCAL_QUEUE_TOKENS = 512
"""``auto``: a tiny prompt does not stand behind so many tokens when a decode worker is idle."""
OVERFLOW_STEPS = 8
"""``auto``: behind so many full steps of prefill a prompt may be computed sooner by a decode worker that has no other,
..."""
OVERFLOW_SHARE = 0.5
"""... if it is at most this share of the tokens that stand before it: streams have their part of that worker."""
HELD_STEPS = 24
"""``auto``: behind so many steps no prompt is sent to prefill any more; it goes to whoever has room for it first."""
FAILED_PAIRS = 2
"""So many pairs may fail the hand-off of one request before its decode worker computes the prompt by itself, if it may:
what spoils each of them may spoil all, and an attempt must be left."""
SLOT_SLACK = 1.25
"""Sequences sent per decode slot: the next ones are prefilled and shipped while the slots are still taken."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of workers: ``tokens`` to compute first (prompt and, on a retry, accepted output),
    at most ``output`` more per choice, for ``choices`` choices; ``enough``: so many of these that a worker is of use
    which holds no more, for a request whose client has set no limit (None: all). ``chains`` are its prefix keys.
    ``diverged``: its choices go on from different tokens, so one worker must compute each of them; a hand-off carries
    one prompt (what they have emitted counts as shared nevertheless: they fit one by one, and take turns).
    ``excluded_pairs``: pairs whose hand-off of this very request has failed, ``excluded_workers``: workers that have
    failed it otherwise; both are taken only if nothing else is possible. ``apart_from``: workers that are not to be
    taken at all. ``urgent``: goes before what waits at a worker, so that it need not wait here until that is less."""

    tokens: int
    output: int
    choices: int
    chains: Chains = field(default_factory=dict)
    diverged: bool = False
    excluded_pairs: frozenset[Pair] = frozenset()
    excluded_workers: frozenset[Incarnation] = frozenset()
    apart_from: frozenset[Incarnation] = frozenset()
    enough: int | None = None
    urgent: bool = False

    @property
    def least(self) -> int:
        """Output per choice that a worker must have room for to be of use."""
        return self.output if self.enough is None else min(self.output, self.enough)

    def room(self, hello: Hello) -> int:
        """The most output per choice that a worker holds after ``tokens`` if it has nothing else, and below 0 if it
        does not even hold these. The inverse of :meth:`blocks`."""
        size, length = hello.block_size, hello.max_model_len - self.tokens
        if self.choices == 1:
            return min(length, hello.kv_blocks * size - self.tokens)
        shared, partial = divmod(self.tokens, size)
        return min(length, (hello.kv_blocks - shared) // self.choices * size - partial)

    def cached_on(self, worker: WorkerHandle, computed_in: KvDtype | None = None) -> int:
        """Tokens of which ``worker`` has KV that was computed in ``computed_in`` (default: its own element type)."""
        return worker.cached_prefix(self.chains.get(computed_in or worker.hello.dtype, ()), self.tokens - 1)

    def blocks(self, block_size: int, horizon: int = HORIZON_TOKENS) -> int:
        """Blocks to promise: the prompt once, each choice's growth on its own."""
        growth = min(self.output, horizon)
        if self.choices == 1:
            return -(-(self.tokens + growth) // block_size)
        shared, partial = divmod(self.tokens, block_size)
        return shared + self.choices * -(-(partial + growth) // block_size)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes; ``why`` is for people."""

    path: Path
    prefill: WorkerHandle | None
    decode: WorkerHandle
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """There are workers, but what they can still promise is too little now."""

    why: str


@dataclass(frozen=True, slots=True)
class NoWorkers:
    """No worker of ``role`` is ready."""

    role: Literal["prefill", "decode"]


@dataclass(slots=True)
class Account:
    """What was promised of one worker: KV blocks and sequences (decode), tokens still to prefill. ``streams`` are the
    sequences whose prompt is computed."""

    blocks: int = 0
    sequences: int = 0
    prefill_tokens: int = 0
    streams: int = 0


@dataclass(slots=True)
class Promise:
    """One request's part in the ledger: what it added to the accounts of its decode and its prefilling worker."""

    decode: Account
    prefill: Account
    blocks: int
    sequences: int
    prefill_tokens: int
    streams: int = 0


@dataclass(slots=True)
class Router:
    """Places requests on the workers of ``registry`` and keeps the ledger."""

    registry: Registry
    local_prefill: LocalPrefill = "auto"
    no_prefill: NoPrefillPolicy = "local"
    horizon: int = HORIZON_TOKENS
    accounts: dict[Incarnation, Account] = field(default_factory=dict)
    breakers: Breakers = field(default_factory=Breakers)

    def account(self, worker: WorkerHandle) -> Account:
        account = self.accounts.get(worker.id)
        if account is None:
            account = self.accounts[worker.id] = Account()
        return account

    # -- choosing -------------------------------------------------------------------------------------------------

    def place(self, demand: Demand) -> Placement | Wait | NoWorkers:
        """Where ``need`` should go now; promises nothing yet."""
        colocated, decodes = self._ready("colocated", demand), self._ready("decode", demand)
        if decodes:
            verdict = self._pair(demand, decodes)
            if isinstance(verdict, Placement) or not colocated:
                return verdict
        if colocated:
            return self._whole(demand, colocated)
        if self.missing_role() == "decode":
            return NoWorkers("decode")
        return Wait("another suspect is on every worker" if demand.apart_from else "every worker is too small")

    def _ready(self, role: Role, demand: Demand) -> list[WorkerHandle]:
        """The workers of ``role`` to choose from: those that could hold the request to its end, or else those that hold
        most of it and enough. One that keeps failing has room for everything: it is left out, rather than sorted last,
        as long as there is another."""
        ready = [worker for worker in self.registry.ready(role) if worker.id not in demand.apart_from]
        able = [worker for worker in ready if _holds(demand, worker)]
        ranks = [(self.breakers.allows(Alone(each.id)), min(demand.output, _room(demand, each))) for each in able]
        best = max(ranks, default=None)
        return [worker for worker, rank in zip(able, ranks, strict=True) if rank == best]

    def could_serve(self, demand: Demand) -> bool:
        """Whether those that are ready could serve it if they had nothing else to do."""

        def able(role: Role) -> bool:
            return any(_holds(demand, worker) for worker in self.registry.ready(role))

        if able("colocated") or not able("decode"):
            return able("colocated")
        on_decode = demand.diverged or self.local_prefill == "always" or self.no_prefill == "local"
        return on_decode or able("prefill") or not self.registry.ready("prefill")

    def missing_role(self) -> Literal["prefill", "decode"] | None:
        """The role without which a new request could not be placed at all, if any."""
        if self.registry.ready("colocated"):
            return None
        if not self.registry.ready("decode"):
            return "decode"
        needs_prefill = self.local_prefill != "always" and self.no_prefill == "reject"
        return "prefill" if needs_prefill and not self.registry.ready("prefill") else None

    def longest_prompt(self) -> int | None:
        """The most tokens that a prefill worker computes; None if that is no limit, as others may, or there is none."""
        if self.no_prefill == "local" or self.local_prefill == "always" or self.registry.ready("colocated"):
            return None
        return max((_most_tokens(worker.hello) for worker in self.registry.ready("prefill")), default=None)

    def backlog_steps(self) -> float:
        """How many full steps the prefill worker has to compute that has the most."""
        ready = self.registry.ready("prefill")
        return max((self.account(it).prefill_tokens / it.hello.max_num_batched_tokens for it in ready), default=0.0)

    def roomiest(self, demand: Demand) -> Hello | None:
        """Of the workers that hold requests to their end, the one with the most room for this one; None if none is
        known."""
        return max(self._holders(), key=demand.room, default=None)

    def most_output(self, tokens: int, choices: int) -> int | None:
        """What an answer without a limit may have per choice after a prompt of ``tokens``: as much as every worker
        holds that has room for an ordinary answer, so that it may go to any of them; None if no worker is known."""
        demand = Demand(tokens, 0, choices)
        rooms = [demand.room(hello) for hello in self._holders()]
        return min((room for room in rooms if room >= min(max(rooms), self.horizon)), default=None)

    def _holders(self) -> list[Hello]:
        ready = [worker.hello for role in _HOLDERS for worker in self.registry.ready(role)]
        return ready or [hello for hello in self.registry.hellos() if hello.role in _HOLDERS]

    def _pair(self, demand: Demand, decodes: list[WorkerHandle]) -> Placement | Wait | NoWorkers:
        fitting = self._least_loaded_first(demand, decodes)
        if not fitting:
            return Wait(f"no decode worker can promise {demand.tokens} tokens and their output now")
        decode = fitting[0]
        if self.local_prefill == "always":
            return Placement("local", None, decode, "local prefill: always")
        if demand.diverged:
            return Placement("local", None, decode, "its choices have diverged")
        if len(demand.excluded_pairs) >= FAILED_PAIRS and self.no_prefill == "local":
            return Placement(
                "local", None, decode, f"its hand-offs over {len(demand.excluded_pairs)} pairs have failed"
            )
        ready = self._ready("prefill", demand)
        there = bool(self.registry.ready("prefill"))
        if not there and self.no_prefill == "reject":
            return NoWorkers("prefill")
        decode, prefills = self._reachable(demand, fitting, ready)
        if not prefills:
            why = "every prefill worker is too small" if there else "no prefill worker is ready"
            if ready:
                why = "hand-offs from every prefill worker keep failing"
            return Placement("local", None, decode, why) if self.no_prefill == "local" else Wait(why)
        prefill, before, cached = self._nearest(demand, prefills)
        if self.local_prefill == "auto":
            if better := self._better_local(demand, decode, before):
                return Placement("local", None, decode, better)
            queued, steps = f"{before} tokens are queued for prefill", before / prefill.hello.max_num_batched_tokens
            if steps >= OVERFLOW_STEPS and (spare := self._spare(demand, fitting, before)):
                return Placement("local", None, spare, f"{queued}, {spare.hello.name} has none")
            if steps >= HELD_STEPS and not demand.urgent:
                return Wait(queued)
        queued = f"{before} tokens queued on {prefill.hello.name}, {cached} of {demand.tokens} cached there"
        return Placement("disagg", prefill, decode, queued)

    def _whole(self, demand: Demand, workers: list[WorkerHandle]) -> Placement | Wait:
        fitting = [worker for worker in workers if self._fits(demand, worker)]
        if not fitting:
            return Wait(f"no colocated worker can promise {demand.tokens} tokens and their output now")
        worker, before, cached = self._nearest(demand, fitting)
        return Placement("colocated", None, worker, f"{before} tokens queued, {cached} of {demand.tokens} cached")

    def _fits(self, demand: Demand, worker: WorkerHandle) -> bool:
        account, hello = self.account(worker), worker.hello
        if not _holds(demand, worker):
            return False
        if account.sequences == 0:
            return True  # more choices than slots take turns
        slots = int(hello.max_num_seqs * SLOT_SLACK)
        blocks = demand.blocks(hello.block_size, self.horizon)
        return account.blocks + blocks <= hello.kv_blocks and account.sequences + demand.choices <= slots

    def _least_loaded_first(self, demand: Demand, decodes: list[WorkerHandle]) -> list[WorkerHandle]:
        """The decode workers that ``need`` fits on, the least loaded first."""
        fitting = [worker for worker in decodes if self._fits(demand, worker)]
        return sorted(fitting, key=lambda worker: (worker.id in demand.excluded_workers, *self._load(demand, worker)))

    def _reachable(
        self, demand: Demand, decodes: list[WorkerHandle], prefills: list[WorkerHandle]
    ) -> tuple[WorkerHandle, list[WorkerHandle]]:
        """The first decode worker that some prefill workers can ship to, and these; the first with none if there is
        no such pair. A pair that failed this very request is good enough where the decode worker may not prefill by
        itself."""
        for excluded_pairs in (
            (demand.excluded_pairs,) if self.no_prefill == "local" else (demand.excluded_pairs, frozenset[Pair]())
        ):
            for decode in decodes:
                pairs = ((each, Pair(each.id, decode.id)) for each in prefills)
                if able := [each for each, pair in pairs if self.breakers.allows(pair) and pair not in excluded_pairs]:
                    return decode, able
        return decodes[0], []

    def _load(self, demand: Demand, worker: WorkerHandle) -> tuple[float, float]:
        """How full the fuller of slots and pool would be with ``need``, of which nothing counts that is cached there;
        and how much is not. Not the room that is left: pools of workers that are equally fast differ in size by chance,
        and the largest would get everything."""
        account, hello = self.account(worker), worker.hello
        cached = max((demand.cached_on(worker, dtype) for dtype in demand.chains), default=0)
        missing = 1 - cached / demand.tokens
        blocks = account.blocks + demand.blocks(hello.block_size, self.horizon) - cached // hello.block_size
        sequences = account.sequences + demand.choices * missing
        return max(blocks / hello.kv_blocks, sequences / hello.max_num_seqs), missing

    def _nearest(self, demand: Demand, workers: list[WorkerHandle]) -> tuple[WorkerHandle, int, int]:
        """(the worker with the least to compute before and for this prompt, tokens queued and tokens cached there)."""

        def cost(worker: WorkerHandle) -> tuple[bool, int, int]:
            cached = demand.cached_on(worker)
            account = self.account(worker)
            return (
                worker.id in demand.excluded_workers,
                account.prefill_tokens + demand.tokens - cached,
                account.sequences,
            )

        best = min(workers, key=cost)
        return best, self.account(best).prefill_tokens, demand.cached_on(best)

    def _better_local(self, demand: Demand, decode: WorkerHandle, queued_tokens: int) -> str | None:
        """``auto``: why the decode worker should prefill by itself, or None if it should not."""
        cached = demand.cached_on(decode)
        missing = demand.tokens - cached
        if missing > LOCAL_MISSING_TOKENS:
            return None
        if cached >= LOCAL_CACHED_SHARE * demand.tokens:
            return f"{cached} of {demand.tokens} tokens are cached on {decode.hello.name}"
        if self.account(decode).sequences == 0 and queued_tokens >= LOCAL_QUEUE_TOKENS:
            return f"{decode.hello.name} is idle and {queued_tokens} tokens are queued for prefill"
        return None

    def _spare(self, demand: Demand, decodes: Sequence[WorkerHandle], queued_tokens: int) -> WorkerHandle | None:
        """The first of ``decodes`` that can compute the prompt sooner than prefill gets to it: that computes no other,
        and whose slots are not all taken by streams, which have to share its steps."""
        for worker in decodes:
            account = self.account(worker)
            if (
                worker.id in demand.excluded_workers
                or account.prefill_tokens
                or account.streams >= worker.hello.max_num_seqs
            ):
                continue
            if demand.tokens - demand.cached_on(worker) <= OVERFLOW_SHARE * queued_tokens:
                return worker
        return None

    # -- the ledger -----------------------------------------------------------------------------------------------

    def promise(self, demand: Demand, placement: Placement) -> Promise:
        """Enters a placement into the ledger."""
        worker = placement.prefill or placement.decode
        promise = Promise(
            self.account(placement.decode),
            self.account(worker),
            blocks=demand.blocks(placement.decode.hello.block_size, self.horizon),
            sequences=demand.choices,
            prefill_tokens=demand.tokens - demand.cached_on(worker),
        )
        promise.decode.blocks += promise.blocks
        promise.decode.sequences += promise.sequences
        promise.prefill.prefill_tokens += promise.prefill_tokens
        return promise

    def prefilled(self, promise: Promise) -> None:
        """The prompt is computed (its first token came): nothing of it is queued any more. Idempotent."""
        promise.prefill.prefill_tokens -= promise.prefill_tokens
        promise.prefill_tokens = 0
        promise.decode.streams += promise.sequences - promise.streams
        promise.streams = promise.sequences

    def release(self, promise: Promise) -> None:
        """The request has left its workers. Idempotent; harmless when they are gone."""
        self.prefilled(promise)
        promise.decode.blocks -= promise.blocks
        promise.decode.sequences -= promise.sequences
        promise.decode.streams -= promise.streams
        promise.blocks = promise.sequences = promise.streams = 0

    def forget(self, worker: WorkerHandle) -> None:
        """A worker is gone, and with it its account and its breakers."""
        self.accounts.pop(worker.id, None)
        self.breakers.forget(worker.id)


def _holds(demand: Demand, worker: WorkerHandle) -> bool:
    """Whether ``worker`` could hold enough of ``need`` if it had nothing else."""
    return _room(demand, worker) >= demand.least


def _room(demand: Demand, worker: WorkerHandle) -> int:
    """Output per choice that ``worker`` has room for; all of it or none, for a prefill worker."""
    if worker.role == "prefill":
        return demand.output if demand.tokens <= _most_tokens(worker.hello) else -1
    return demand.room(worker.hello)


def _most_tokens(hello: Hello) -> int:
    """Of one sequence."""
    return min(hello.max_model_len, hello.kv_blocks * hello.block_size)
