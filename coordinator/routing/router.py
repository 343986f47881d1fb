"""The router: chooses the workers that serve a request.

Pure. Owns the ledger: the capacity of each worker that this coordinator has promised to requests and not released yet,
so that a decision needs no heartbeat. For prefill the router chooses the worker with the fewest tokens to compute:
those queued there plus those of the request that are not in its prefix cache. For decode it chooses the least loaded
worker, by share of slots and of KV blocks. Workers and pairs whose circuit breaker is open are left out. A request that
fits nowhere waits in the coordinator, where it holds no resources (no hold-and-wait across pools).
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
from coordinator.routing.breakers import Breakers, Pair, SingleWorker
from coordinator.routing.paths import Path

Chains = Mapping[KvDtype, Sequence[ChainKey]]
"""The prefix keys of a prompt, by the element type in which its KV was or will be computed."""
LocalPrefill = Literal["auto", "never", "always"]
NoPrefillPolicy = Literal["local", "wait", "reject"]
_HOLDERS: tuple[Role, ...] = ("decode", "colocated")
"""The roles whose workers hold a request until its end."""

HORIZON_TOKENS = 512
"""Output tokens per choice for which a promise includes blocks. Beyond them the decode worker allocates blocks on
demand and may preempt."""
LOCAL_MISSING_TOKENS = 32
"""``auto``: a decode worker prefills locally if at most this many tokens of the prompt are missing from its cache (so
few cost it less than a hand-off), ..."""
LOCAL_CACHED_SHARE = 0.75
"""... and at least this share of the prompt is in its cache, ..."""
LOCAL_QUEUE_TOKENS = 512
"""... or the worker is idle and at least this many tokens are queued for prefill."""
OVERFLOW_STEPS = 8
"""``auto``: with at least this many full prefill steps queued, a decode worker that computes no other prompt may
prefill locally, ..."""
OVERFLOW_SHARE = 0.5
"""... if its missing tokens are at most this share of the tokens queued for prefill. Its streams slow it down, so with
more tokens it would not be faster than waiting for prefill."""
HELD_STEPS = 24
"""``auto``: with at least this many full prefill steps queued, a prompt waits in the coordinator and goes to the first
worker that has room for it, prefill or decode."""
FAILED_PAIRS = 2
"""After hand-offs of a request have failed over this many pairs, its decode worker prefills locally if the policy
allows it: the cause may affect every pair, and an attempt must be left."""
SLOT_SLACK = 1.25
"""Maximum number of sequences placed per decode slot. Those beyond the slots are prefilled and transferred while the
slots are still taken."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The resources that a request needs from workers.

    ``tokens`` is the number of tokens to prefill (the prompt and, on a retry, accepted output); at most ``output``
    tokens follow in each of ``choices`` choices. ``enough``, set if the client set no limit, is the output per choice
    that suffices on a worker that has no room for all of it; None requires all of ``output``. ``chains`` are the prefix
    keys.

    ``diverged``: the choices continue from different tokens (a retry with ``n > 1``). Then one worker must compute them
    all, because a hand-off carries one prompt. Their accepted output is nevertheless counted once: each choice fits
    alone, and they take turns.

    The hand-off of this request has failed over ``excluded_pairs``, and ``excluded_workers`` have failed it in another
    way; both are used only if nothing else is possible. Workers in ``apart_from`` are never used. ``urgent`` requests
    overtake the prompts queued at a worker, so they do not wait here until that queue is shorter.
    """

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
        """Output tokens per choice for which a worker must have room."""
        return self.output if self.enough is None else min(self.output, self.enough)

    @property
    def ends_with_prompt(self) -> bool:
        """Whether the step that computes the last token to prefill is the last step of the request: it has no output,
        or one token."""
        return self.output <= 1 and not self.diverged

    def room(self, hello: Hello) -> int:
        """Return the maximum output per choice that an idle worker can hold after ``tokens``; negative if it cannot
        even hold ``tokens``. The inverse of :meth:`blocks`."""
        size, length = hello.block_size, hello.max_model_len - self.tokens
        if self.choices == 1:
            return min(length, hello.kv_blocks * size - self.tokens)
        shared, partial = divmod(self.tokens, size)
        return min(length, (hello.kv_blocks - shared) // self.choices * size - partial)

    def cached_on(self, worker: WorkerHandle, computed_in: KvDtype | None = None) -> int:
        """Return the number of leading tokens whose KV, computed in the element type ``computed_in`` (default: the
        worker's own), is in the prefix cache of ``worker``. The last token never counts: it has to be computed."""
        return worker.cached_prefix(self.chains.get(computed_in or worker.hello.dtype, ()), self.tokens - 1)

    def blocks(self, block_size: int, horizon: int = HORIZON_TOKENS) -> int:
        """Return the number of blocks to promise: for the prompt once, and for up to ``horizon`` output tokens per
        choice."""
        growth = min(self.output, horizon)
        if self.choices == 1:
            return -(-(self.tokens + growth) // block_size)
        shared, partial = divmod(self.tokens, block_size)
        return shared + self.choices * -(-(partial + growth) // block_size)


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers chosen for a request; ``why`` is the reason in words. ``decode`` is the worker that holds it to its
    end; on the path ``prefill`` a prefill worker."""

    path: Path
    prefill: WorkerHandle | None
    decode: WorkerHandle
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """No placement now: there are workers, but none of them can promise what the request needs at the moment."""

    why: str


@dataclass(frozen=True, slots=True)
class NoWorkers:
    """No placement: no worker of ``role`` is ready."""

    role: Literal["prefill", "decode"]


@dataclass(slots=True)
class Account:
    """The sums promised to requests on one worker: KV blocks, sequences, and prompt tokens still to compute.
    ``streams`` counts the sequences whose prompt has been computed."""

    blocks: int = 0
    sequences: int = 0
    prefill_tokens: int = 0
    streams: int = 0


@dataclass(slots=True)
class Promise:
    """One request's entry in the ledger: the amounts that it added to the accounts of its decode worker (``decode``)
    and of the worker that computes its prompt (``prefill``)."""

    decode: Account
    prefill: Account
    blocks: int
    sequences: int
    prefill_tokens: int
    streams: int = 0


@dataclass(slots=True)
class Router:
    """Chooses workers of ``registry`` for requests and keeps the ledger."""

    registry: Registry
    local_prefill: LocalPrefill = "auto"
    no_prefill: NoPrefillPolicy = "local"
    horizon: int = HORIZON_TOKENS
    accounts: dict[Incarnation, Account] = field(default_factory=dict)
    breakers: Breakers = field(default_factory=Breakers)

    def account(self, worker: WorkerHandle) -> Account:
        """Return the account of ``worker``, which is created on first use."""
        account = self.accounts.get(worker.id)
        if account is None:
            account = self.accounts[worker.id] = Account()
        return account

    # -- choosing -------------------------------------------------------------------------------------------------

    def place(self, demand: Demand) -> Placement | Wait | NoWorkers:
        """Choose the workers for ``demand``. Does not enter anything into the ledger; :meth:`promise` does."""
        colocated, decodes = self._ready("colocated", demand), self._ready("decode", demand)
        if decodes:
            verdict = self._pair(demand, decodes)
            if isinstance(verdict, Placement) or not colocated:
                return verdict
        if colocated:
            return self._whole(demand, colocated)
        if self.missing_role() == "decode":
            return NoWorkers("decode")
        return Wait("every worker has another suspect" if demand.apart_from else "every worker is too small")

    def _ready(self, role: Role, demand: Demand) -> list[WorkerHandle]:
        """Return the candidates of ``role``: the workers that, if idle, could hold the request to its end or, if there
        are none, those with the most room for its output, at least ``demand.least``. Workers with an open breaker are
        returned only if there are no others. It does not suffice to sort them last, because a worker that keeps failing
        always has room."""
        ready = [worker for worker in self.registry.ready(role) if worker.id not in demand.apart_from]
        able = [worker for worker in ready if _holds(demand, worker)]
        ranks = [
            (self.breakers.allows(SingleWorker(each.id)), min(demand.output, _room(demand, each))) for each in able
        ]
        best = max(ranks, default=None)
        return [worker for worker, rank in zip(able, ranks, strict=True) if rank == best]

    def could_serve(self, demand: Demand) -> bool:
        """Return whether the ready workers could serve the request if they were idle."""

        def able(role: Role) -> bool:
            return any(_holds(demand, worker) for worker in self.registry.ready(role))

        if able("colocated") or not able("decode"):
            return able("colocated")
        on_decode = demand.diverged or self.local_prefill == "always" or self.no_prefill == "local"
        return on_decode or able("prefill") or not self.registry.ready("prefill")

    def missing_role(self) -> Literal["prefill", "decode"] | None:
        """Return the role whose absence keeps any new request from being placed, or None."""
        if self.registry.ready("colocated"):
            return None
        if not self.registry.ready("decode"):
            return "decode"
        needs_prefill = self.local_prefill != "always" and self.no_prefill == "reject"
        return "prefill" if needs_prefill and not self.registry.ready("prefill") else None

    def longest_prompt(self) -> int | None:
        """Return the length of the longest prompt that fits on a ready prefill worker. None if this is no limit,
        because other workers may compute prompts, or if there is no prefill worker."""
        if self.no_prefill == "local" or self.local_prefill == "always" or self.registry.ready("colocated"):
            return None
        return max((_most_tokens(worker.hello) for worker in self.registry.ready("prefill")), default=None)

    def backlog_steps(self) -> float:
        """Return the number of full steps that the most loaded prefill worker has to compute."""
        ready = self.registry.ready("prefill")
        return max((self.account(it).prefill_tokens / it.hello.max_num_batched_tokens for it in ready), default=0.0)

    def roomiest(self, demand: Demand) -> Hello | None:
        """Return the Hello of the decode or colocated worker with the most room for the request; None if no such worker
        is known."""
        return max(self._holders(), key=demand.room, default=None)

    def most_output(self, tokens: int, choices: int) -> int | None:
        """Return the output limit per choice for a request with a prompt of ``tokens`` whose client set no limit.

        The limit fits on every worker that has room for an ordinary answer (``horizon``), so that the request may go to
        any of them. None if no worker is known.
        """
        demand = Demand(tokens, 0, choices)
        rooms = [demand.room(hello) for hello in self._holders()]
        return min((room for room in rooms if room >= min(max(rooms), self.horizon)), default=None)

    def _holders(self) -> list[Hello]:
        ready = [worker.hello for role in _HOLDERS for worker in self.registry.ready(role)]
        return ready or [hello for hello in self.registry.hellos() if hello.role in _HOLDERS]

    def _alone(self, demand: Demand, decodes: list[WorkerHandle]) -> Placement | Wait | None:
        """Place a request that ends with its prompt, or with the first token after it, on a prefill worker, from which
        nothing is handed off. None if there is none for it, or if one of ``decodes`` should compute it under
        ``auto``."""
        ready = self._ready("prefill", demand) if self.local_prefill != "always" else []
        if not ready:
            return None
        prefill, before, cached = self._nearest(demand, ready)
        steps = before / prefill.hello.max_num_batched_tokens
        if demand.output and self.local_prefill == "auto":
            fitting = self._least_loaded_first(demand, decodes)
            if fitting and self._better_local(demand, fitting[0], before):
                return None
            if steps >= OVERFLOW_STEPS and self._spare(demand, fitting, before):
                return None
        if steps >= HELD_STEPS and not demand.urgent:
            return Wait(f"{before} tokens are queued for prefill")
        queued = f"{before} tokens queued on {prefill.hello.name}, {cached} of {demand.tokens} cached there"
        return Placement("prefill", None, prefill, f"{demand.output or 'no'} output, {queued}")

    def _pair(self, demand: Demand, decodes: list[WorkerHandle]) -> Placement | Wait | NoWorkers:
        if demand.ends_with_prompt and (alone := self._alone(demand, decodes)) is not None:
            return alone
        fitting = self._least_loaded_first(demand, decodes)
        if not fitting:
            return Wait(f"no decode worker has room for {demand.tokens} tokens and their output now")
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
                return Placement("local", None, spare, f"{queued}, none on {spare.hello.name}")
            if steps >= HELD_STEPS and not demand.urgent:
                return Wait(queued)
        queued = f"{before} tokens queued on {prefill.hello.name}, {cached} of {demand.tokens} cached there"
        return Placement("disagg", prefill, decode, queued)

    def _whole(self, demand: Demand, workers: list[WorkerHandle]) -> Placement | Wait:
        fitting = [worker for worker in workers if self._fits(demand, worker)]
        if not fitting:
            return Wait(f"no colocated worker has room for {demand.tokens} tokens and their output now")
        worker, before, cached = self._nearest(demand, fitting)
        return Placement("colocated", None, worker, f"{before} tokens queued, {cached} of {demand.tokens} cached")

    def _fits(self, demand: Demand, worker: WorkerHandle) -> bool:
        account, hello = self.account(worker), worker.hello
        if not _holds(demand, worker):
            return False
        if account.sequences == 0:
            return True  # even with more choices than slots: they take turns
        slots = int(hello.max_num_seqs * SLOT_SLACK)
        blocks = demand.blocks(hello.block_size, self.horizon)
        return account.blocks + blocks <= hello.kv_blocks and account.sequences + demand.choices <= slots

    def _least_loaded_first(self, demand: Demand, decodes: list[WorkerHandle]) -> list[WorkerHandle]:
        """Return the decode workers on which ``demand`` fits now: those that have not failed it first, then by load."""
        fitting = [worker for worker in decodes if self._fits(demand, worker)]
        return sorted(fitting, key=lambda worker: (worker.id in demand.excluded_workers, *self._load(demand, worker)))

    def _reachable(
        self, demand: Demand, decodes: list[WorkerHandle], prefills: list[WorkerHandle]
    ) -> tuple[WorkerHandle, list[WorkerHandle]]:
        """Return the first of ``decodes`` to which some of ``prefills`` can hand off, and the list of those; if there
        is no such pair, the first of ``decodes`` and an empty list. Pairs that failed this request are used only if the
        policy forbids the decode worker to prefill locally."""
        for excluded_pairs in (
            (demand.excluded_pairs,) if self.no_prefill == "local" else (demand.excluded_pairs, frozenset[Pair]())
        ):
            for decode in decodes:
                pairs = ((each, Pair(each.id, decode.id)) for each in prefills)
                if able := [each for each, pair in pairs if self.breakers.allows(pair) and pair not in excluded_pairs]:
                    return decode, able
        return decodes[0], []

    def _load(self, demand: Demand, worker: WorkerHandle) -> tuple[float, float]:
        """Return the sort key of a decode worker. Its first element is the load: the larger of the shares of slots and
        blocks that would be taken with ``demand``, without what is cached there. The second is the share of the prompt
        that is not cached. Shares are compared and not free capacity, because the pool sizes of equally fast workers
        differ by chance, and the largest pool would attract every request."""
        account, hello = self.account(worker), worker.hello
        cached = max((demand.cached_on(worker, dtype) for dtype in demand.chains), default=0)
        missing = 1 - cached / demand.tokens
        blocks = account.blocks + demand.blocks(hello.block_size, self.horizon) - cached // hello.block_size
        sequences = account.sequences + demand.choices * missing
        return max(blocks / hello.kv_blocks, sequences / hello.max_num_seqs), missing

    def _nearest(self, demand: Demand, workers: list[WorkerHandle]) -> tuple[WorkerHandle, int, int]:
        """Return the worker with the fewest tokens to compute until this prompt is done, and the numbers of tokens that
        are queued and cached there."""

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
        """Return why the decode worker should prefill locally under ``auto``, or None if it should not."""
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
        """Return the first of ``decodes`` that can take over a prompt from a long prefill queue: it computes no other
        prompt, streams do not take all of its slots, and few enough tokens are missing there. None if there is none."""
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
        """Enter a placement into the ledger."""
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
        """Remove the prompt from the queued tokens, because its first token has arrived. Idempotent."""
        promise.prefill.prefill_tokens -= promise.prefill_tokens
        promise.prefill_tokens = 0
        promise.decode.streams += promise.sequences - promise.streams
        promise.streams = promise.sequences

    def release(self, promise: Promise) -> None:
        """Remove a request from the ledger, because it has left its workers. Idempotent; the workers may be gone."""
        self.prefilled(promise)
        promise.decode.blocks -= promise.blocks
        promise.decode.sequences -= promise.sequences
        promise.decode.streams -= promise.streams
        promise.blocks = promise.sequences = promise.streams = 0

    def forget(self, worker: WorkerHandle) -> None:
        """Delete the account and the circuit breakers of a worker that is gone."""
        self.accounts.pop(worker.id, None)
        self.breakers.forget(worker.id)


def _holds(demand: Demand, worker: WorkerHandle) -> bool:
    """Return whether ``worker``, if idle, could hold enough of ``demand``."""
    return _room(demand, worker) >= demand.least


def _room(demand: Demand, worker: WorkerHandle) -> int:
    """Return the output per choice that ``worker`` has room for if idle. For a prefill worker, which holds no output,
    it is all of ``demand.output``, or -1 if the prompt is too long."""
    if worker.role == "prefill":
        return demand.output if demand.tokens <= _most_tokens(worker.hello) else -1
    return demand.room(worker.hello)


def _most_tokens(hello: Hello) -> int:
    """Return the maximum length of one sequence on a worker."""
    return min(hello.max_model_len, hello.kv_blocks * hello.block_size)
