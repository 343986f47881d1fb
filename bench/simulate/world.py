"""A simulated cluster: the real router, planners and KV bookkeeping on virtual time, with measured step costs.

Owns the clock, the queue in front of the router, and hand-offs, which are delays. The cost model gives the duration of
a step, and a constant overhead per step for HTTP and messages. Requests are recorded in the load client's records, so
that the same code computes the metrics of a simulation and of a measurement.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.load.client import Record
from bench.load.run import Run
from bench.load.workloads import PlannedRequest
from bench.simulate.cost import CostModel
from common.core.errors import OutOfBlocks, StartError
from common.core.ids import Incarnation, RequestId, WorkerName, pack_tokens, sequence_holder, transfer_holder
from common.core.request import FinishReason, Request, SamplingParams
from common.core.sequence import Batch, StepResult
from common.core.sequence import Sequence as Tokens
from common.engine.scheduler import Planner, Sampled
from common.kv.cache import KvCache
from common.net.messages import PROTOCOL, Hello, Role
from coordinator.cluster.registry import JoinRefused, Registry
from coordinator.routing.router import Demand, NoWorkers, Placement, Promise, Router, Wait
from decode.chunk_budget import ChunkBudget

TOKEN = 1
"""The id of every sampled token; its value does not change any time."""
MODEL = "planned"
LENT_TOKENS, MANY_TOKENS = 16, 128
"""Steps of at least ``LENT_TOKENS`` tokens also run on the cores of idle workers (BORROWING_ROWS of
common/kernels/cpu/borrow.h); the overhead of sharing is small only from ``MANY_TOKENS`` tokens."""
HELP_WITH_FEW, HELP_WITH_MANY = 0.6, 0.9
"""Fraction of a worker's speed that an idle worker adds to a shared step, from measured speed-ups of two workers: 1.5
to 1.7 with 16 to 64 streams, 1.9 with a prompt of 512 tokens (``tandem bench lent-core``, one machine and
model). A plan assumes these for every machine and model."""


def help_with(tokens: int) -> float:
    """Return the fraction of a worker's speed that an idle worker adds to a step of ``tokens`` tokens."""
    return 0.0 if tokens < LENT_TOKENS else HELP_WITH_FEW if tokens < MANY_TOKENS else HELP_WITH_MANY


@dataclass(frozen=True)
class Limits:
    """The limits of each worker, and the speed of the link between two in bytes per second.

    ``lend_cores``: all workers are on one machine, where idle workers compute for those with many tokens in a step."""

    kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    link_bytes_per_s: float
    lend_cores: bool = False


@dataclass
class _Job:
    """A request that has arrived, and its state."""

    ask: PlannedRequest
    record: Record
    request: Request
    demand: Demand
    placement: Placement | None = None
    promise: Promise | None = None
    prefill_began: float | None = None


@dataclass
class _Worker:
    """One worker: its planner, its current step, and sequences that wait for blocks to land in.

    At time ``since``, ``left_s`` of its step remained, in seconds of one worker; the step runs at ``hands`` times the
    speed of one worker."""

    role: Role
    planner: Planner
    name: str
    busy: bool = False
    help: float = 0.0
    """What each idle worker adds to ``hands`` in this step; 0 if the step is not shared."""
    left_s: float = 0.0
    since: float = 0.0
    hands: float = 1.0
    changes: int = 0
    """Number of changes of step or of ``hands``; an end of step that was scheduled before the last one is ignored."""
    batch: Batch = field(default_factory=lambda: Batch((), ()))
    chunks: ChunkBudget = field(default_factory=ChunkBudget)
    coming: int = 0
    """Number of hand-offs that will still arrive."""
    landing: deque[tuple[_Job, Tokens]] = field(default_factory=deque)

    def plan(self) -> Batch | None:
        """Return the next step's batch; None if there is no work."""
        if self.role != "decode":
            return self.planner.plan()
        return self.planner.plan(partial(self.chunks.most, more_come=self.coming > 0))


class World:
    """A cluster of ``prefill``, ``decode`` and ``colocated`` workers with equal ``limits`` and ``cost``."""

    def __init__(self, cost: CostModel, limits: Limits, prefill: int, decode: int, colocated: int) -> None:
        self.now = 0.0
        self._cost, self._limits = cost, limits
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queue: deque[_Job] = deque()
        self._jobs: dict[RequestId, _Job] = {}
        self._registry = Registry(None)
        self._router = Router(self._registry)
        self._workers: dict[Incarnation, _Worker] = {}
        counts: tuple[tuple[Role, int], ...] = (("prefill", prefill), ("decode", decode), ("colocated", colocated))
        for role, count in counts:
            for index in range(count):
                self._join(role, f"{role}-{index}")

    def run(self, asks: Sequence[PlannedRequest], times: Sequence[float]) -> Run:
        """Simulate ``asks`` arriving at ``times`` (seconds) until the last one ends. Raises StartError if the pools
        lack a role that a request needs."""
        records = []
        for number, (ask, at) in enumerate(zip(asks, times, strict=True)):
            record = Record(at, ask.prompt_tokens, at)
            records.append(record)
            self._at(at, lambda ask=ask, record=record, number=number: self._arrive(ask, record, number))  # type: ignore[misc]
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        for job in self._queue:
            job.record.error = "no worker will ever have room for it"
        for job in self._jobs.values():
            if not (job.record.output_tokens or job.record.error):
                job.record.error = "it was placed but never ended"
        return Run(records, max(self.now, 1e-9), 0.0)

    # -- the coordinator's part ---------------------------------------------------------------------------------------

    def _arrive(self, ask: PlannedRequest, record: Record, number: int) -> None:
        # the tokens of a text are unknown here; distinct tokens per request keep the prefix cache from helping
        prompt = ask.prompt if not isinstance(ask.prompt, str) else [TOKEN + 1 + number] * ask.prompt_tokens
        sampling = SamplingParams(ask.output_tokens, 0, ignore_eos=True)
        request = Request(RequestId(number.to_bytes(16, "little")), pack_tokens(prompt), sampling)
        job = _Job(ask, record, request, Demand(len(prompt), ask.output_tokens, 1))
        self._jobs[request.id] = job
        self._queue.append(job)
        self._place()

    def _place(self) -> None:
        """Place requests from the front of the queue until the router has no room for the next one."""
        while self._queue:
            job = self._queue[0]
            placed = self._router.place(job.demand)
            if isinstance(placed, Wait):
                return
            if isinstance(placed, NoWorkers):
                raise StartError("the system cannot serve", f"it has no {placed.role} worker", "correct --systems")
            self._queue.popleft()
            job.placement, job.promise = placed, self._router.promise(job.demand, placed)
            first = placed.prefill or placed.decode
            job.record.stages = {"path": placed.path, "prefill": first.hello.name, "decode": placed.decode.hello.name}
            worker = self._workers[first.id]
            if placed.prefill is not None:
                self._workers[placed.decode.id].coming += 1
            worker.planner.add(Tokens(job.request, 0))
            self._kick(worker)

    def _end(self, job: _Job) -> None:
        assert job.promise is not None
        self._router.release(job.promise)
        job.record.output_tokens = len(job.record.moments)

    # -- the workers' part --------------------------------------------------------------------------------------------

    def _kick(self, worker: _Worker) -> None:
        """Begin the next step of ``worker`` if it is idle and has work."""
        if worker.busy or (batch := worker.plan()) is None:
            return
        worker.busy = True
        for segment in batch.segments:
            job = self._jobs[segment.sequence.request.id]
            if job.prefill_began is None:
                job.prefill_began = self.now
        worker.left_s, worker.since, worker.hands = self._cost.step(batch) + self._cost.turn, self.now, 1.0
        worker.chunks.took(batch, worker.left_s)
        worker.help = help_with(batch.length) if self._limits.lend_cores else 0.0
        self._expect(worker, batch)
        self._share()

    def _expect(self, worker: _Worker, batch: Batch) -> None:
        """Schedule the end of the worker's step; a later change of ``hands`` supersedes it."""
        worker.changes += 1
        worker.batch, change = batch, worker.changes
        end = self.now + worker.left_s / worker.hands
        self._at(end, lambda: self._stepped(worker, batch) if worker.changes == change else None)

    def _share(self) -> None:
        """Divide the idle workers equally among the shared steps, and reschedule the ends of these."""
        shared = [worker for worker in self._workers.values() if worker.busy and worker.help]
        resting = sum(not worker.busy for worker in self._workers.values())
        for worker in shared:
            hands = 1 + worker.help * resting / len(shared)
            if hands != worker.hands:
                worker.left_s -= (self.now - worker.since) * worker.hands
                worker.since, worker.hands = self.now, hands
                self._expect(worker, worker.batch)

    def _stepped(self, worker: _Worker, batch: Batch) -> None:
        worker.busy = False
        tokens = [[TOKEN] if segment.wants_token else [] for segment in batch.segments]
        for sample in worker.planner.complete(batch, StepResult(tokens, [[] for _ in tokens], 0.0)):
            self._sampled(worker, sample)
        while worker.landing and self._land(worker, *worker.landing[0]):
            worker.landing.popleft()
        self._place()  # there may be room now
        self._kick(worker)
        if not worker.busy:
            self._share()

    def _sampled(self, worker: _Worker, sample: Sampled) -> None:
        sequence, job = sample.sequence, self._jobs[sample.sequence.request.id]
        job.record.moments.append(self.now)
        if sequence.output_length == 0:
            self._first(job)
        sequence.append(TOKEN)
        if sequence.finish is not FinishReason.RUNNING:
            worker.planner.finish(sequence)
            if worker.role == "prefill" and job.placement is not None and job.placement.prefill is not None:
                self._workers[job.placement.decode.id].coming -= 1
            self._end(job)
        elif worker.role == "prefill":
            self._hand_off(worker, job, sequence)

    def _first(self, job: _Job) -> None:
        assert job.promise is not None and job.record.stages is not None and job.prefill_began is not None
        self._router.prefilled(job.promise)
        job.record.stages["prefill_ms"] = (self.now - job.prefill_began) * 1000

    def _hand_off(self, worker: _Worker, job: _Job, sequence: Tokens) -> None:
        """Send a sequence's KV blocks to decode; prefill holds them until they arrive."""
        assert job.placement is not None and job.prefill_began is not None and job.record.stages is not None
        table = worker.planner.detach(sequence, transfer_holder(sequence.id.transfer))
        decode = self._workers[job.placement.decode.id]
        exposed = self._cost.exposed(sequence.computed, self.now - job.prefill_began, self._limits.link_bytes_per_s)
        job.record.stages["transfer_exposed_ms"] = exposed * 1000

        def arrived() -> None:
            worker.planner.cache.close(table)
            if decode.landing or not self._land(decode, job, sequence):
                decode.landing.append((job, sequence))
            self._kick(worker)
            self._kick(decode)

        self._at(self.now + exposed, arrived)

    def _land(self, worker: _Worker, job: _Job, shipped: Tokens) -> bool:
        """Continue the sequence on the decode worker; return False if it has no free blocks for it now."""
        sequence = Tokens(job.request, 0)
        sequence.append(TOKEN)
        cache = worker.planner.cache
        table = cache.open(sequence_holder(sequence.id), sequence.tokens, "")
        try:
            cache.grow(table, len(sequence.tokens))
        except OutOfBlocks:
            cache.close(table)
            return False
        sequence.computed = shipped.computed
        worker.planner.adopt(sequence, table)
        worker.coming -= 1
        return True

    # -- inside -------------------------------------------------------------------------------------------------------

    def _join(self, role: Role, name: str) -> None:
        limits = self._limits
        data_address = "tcp://localhost:1" if role == "decode" else ""
        hello = Hello(
            PROTOCOL, WorkerName(name), Incarnation(name), role, MODEL, MODEL, MODEL, 0, "localhost", "host",
            data_address, ("shm",), limits.kv_blocks, limits.block_size, limits.max_model_len, 2, limits.max_num_seqs,
            limits.max_num_batched_tokens, "cpu", "float32",
        )  # fmt: skip
        joined = self._registry.join(hello, 0.0)
        assert not isinstance(joined, JoinRefused), joined
        self._registry.welcome(joined)
        cache = KvCache(limits.kv_blocks, limits.block_size, model_fingerprint=MODEL, kv_dtype="float32")
        planner = Planner(cache, max_tokens=limits.max_num_batched_tokens, max_sequences=limits.max_num_seqs)
        self._workers[hello.incarnation] = _Worker(role, planner, name)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def leaks(self) -> bool:
        """Return whether a worker still holds sequences or blocks after the last request: a bug in the real code."""
        return any(worker.planner or worker.planner.cache.leaks() for worker in self._workers.values())
