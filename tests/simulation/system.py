"""A complete system in one thread on virtual time: the real coordinator and workers around the oracle engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import msgspec

from common.core.errors import RequestError
from common.core.ids import Incarnation, RequestId, WorkerName, pack_tokens
from common.core.prompt_span import PromptSpan
from common.core.request import FinishReason, SamplingParams
from common.core.sequence import Batch, Sequence, StepResult
from common.kv.convert import Bytes
from common.kv.layout import KvDtype
from common.kv.pool import BlockPool
from common.kv.prefix import chain_root, extend_chain
from common.kv.storage.host import BlockArray, Table
from common.net.messages import PROTOCOL, Hello, Logprobs, Role
from common.net.wire import DIGEST_BYTES
from common.worker.loop import Worker, WorkerSettings
from common.worker.membership import Snapshot
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import Registry
from coordinator.metrics import Metrics
from coordinator.requests.admission import Admission
from coordinator.requests.record import RequestRecord
from coordinator.routing.breakers import BreakerState
from coordinator.routing.router import HORIZON_TOKENS, Demand, NoPrefillPolicy, Router
from decode.role import DecodeWorker
from kvtransfer.links.memory import Pools
from prefill.role import PrefillWorker
from tests.fakes.constrained import ConstrainedOracle
from tests.fakes.oracle import LAYERS, VOCABULARY, OracleEngine, oracle_prompt
from tests.simulation.clock import Event, Loop, SimulatedProcess, VirtualClock
from tests.simulation.grammars import MaskTimes, SimulatedGrammars, constraint_of, expected
from tests.simulation.liveness import COORDINATOR, SHORT_S, Pause, RequestTimeline, Strike
from tests.simulation.network import Parts, SimulatedChannels, SimulatedConnection, SimulatedNetwork
from tests.simulation.rules import CheckedDispatcher

CONTROL = "tcp://127.0.0.1:1000"
STEP_S, TOKEN_S = 0.004, 0.0002
DEADLINE_GRACE_S = 0.2
LONGEST_LINGER_S = 6.0
"""The longest time for which a reachable worker may hold a request after its end: leases come twice a second, and a
fifth of them may be lost."""
LONGEST_HOLD_S = 10.0
"""The longest time for which anything may be held for a dead or silent peer."""
MOST_EVENTS = 100_000
"""Limit on events within half a virtual second, far above what occurs, to detect a busy loop."""
Broken = AssertionError


class Poisoned(BaseException):
    """Raised in a step with a poisonous request, to end the worker's process: with ``raised`` by an error that the
    worker loop reports, otherwise at once, as by SIGKILL."""

    def __init__(self, *, raised: bool) -> None:
        self.raised = raised


class WorkerShape(NamedTuple):
    """The parameters of a worker; ``length`` is its maximum of prompt plus output tokens."""

    role: Role
    blocks: int
    block_size: int
    host: str
    length: int = 4096

    @property
    def holds(self) -> int:
        """The largest number of tokens of one request."""
        return min(self.length, self.blocks * self.block_size)

    def room(self, demand: Demand) -> int:
        """Return how many output tokens each choice has room for. Choices share the full blocks of the prompt; the rest
        is separate for each."""
        shared = demand.tokens // self.block_size if demand.choices > 1 else 0
        each = (self.blocks - shared) // demand.choices * self.block_size
        return min(self.length, each + shared * self.block_size) - demand.tokens


class SimulatedEngine(ConstrainedOracle):
    """The oracle engine with steps that take virtual time, an equal part of it for each layer."""

    _logprobs = staticmethod(OracleEngine._logprobs)

    def __init__(
        self, process: SimulatedProcess, grammars: SimulatedGrammars, blocks: int, block_size: int, length: int
    ) -> None:
        super().__init__(blocks, block_size, grammars=grammars, vocab_size=VOCABULARY, max_model_len=length)
        self.process = process
        self.slowness = 1.0
        self.stuck_s = 0.0
        """How many seconds longer the next step takes."""
        self.sick = False
        """Whether it fails every request."""
        self.begins: Callable[[float, Batch], None] = lambda seconds, batch: None
        self.pool: BlockPool | None = None
        self._write, self.memory.write = self.memory.write, self._checked_write  # type: ignore[method-assign]
        self._take, self.memory.take = self.memory.take, self._checked_take  # type: ignore[method-assign]

    def _checked_write(
        self, table: Table, tokens: range, layers: range, data: Bytes, dtype: KvDtype | None = None
    ) -> None:
        self._check(table, tokens)
        self._write(table, tokens, layers, data, dtype)

    def _checked_take(self, table: Table, tokens: range, layers: range, source: BlockArray, blocks: Table) -> int:
        self._check(table, tokens)
        return self._take(table, tokens, layers, source, blocks)

    def place(self, table: Table, tokens: range, layers: range, rolled: list[int]) -> None:
        self._check(table, tokens)
        super().place(table, tokens, layers, rolled)

    def _check(self, table: Table, tokens: range) -> None:
        """Check that KV is written only into blocks with a single holder."""
        size = self.layout.block_size
        for block in table[tokens.start // size : -(-tokens.stop // size)]:
            if self.pool is not None and len(holders := self.pool.holders(block)) != 1:
                raise Broken(f"{self.process.name} writes into block {block}, held by {sorted(holders) or 'no holder'}")

    def step(self, batch: Batch) -> StepResult:
        seconds = self.slowness * (STEP_S + TOKEN_S * batch.length) / len(LAYERS)
        self.begins(seconds * len(LAYERS), batch)
        if self.sick:
            nothing: list[list[Any]] = [[] for _ in batch.segments]
            return StepResult(nothing, nothing, 0.0, dict.fromkeys(range(len(batch.segments)), "it always fails"))
        if (on_layer := self.on_layer) is None:
            result = replace(super().step(batch), seconds=seconds * len(LAYERS))
            for _ in LAYERS:
                self.process.spent += seconds
            return result

        def after_a_while(layer: int) -> None:
            self.process.spent += seconds
            on_layer(layer)

        self.on_layer = after_a_while
        try:
            return replace(super().step(batch), seconds=seconds * len(LAYERS))
        finally:
            self.on_layer = on_layer


class SimulatedWorker:
    """One incarnation of a worker. Its loop takes a turn when a message arrives, after its sleep, and after a step."""

    def __init__(self, system: SimulatedSystem, name: str, shape: WorkerShape) -> None:
        self.system, self.name, self.role = system, name, shape.role
        self.process = SimulatedProcess(system.clock, name)
        grammars = SimulatedGrammars(system.mask_times, self.process)
        self.engine = SimulatedEngine(self.process, grammars, shape.blocks, shape.block_size, shape.length)
        self.engine.slowness = system.pace
        self._next: Event | None = None
        self._busy_until = 0.0
        self._began: tuple[float, float] | None = None
        self._turning = False
        self._without_room: tuple[float, set[RequestId]] = 0.0, set()
        """The time of the last turn without a step, and the requests that lacked blocks then."""
        self.gone = False
        channels = SimulatedChannels(system.network, self.process, self.wake)
        settings = WorkerSettings(CONTROL, shape.host, max_num_seqs=8, max_num_batched_tokens=32, drain_timeout_s=5.0)
        incarnation = Incarnation(f"{name}.{next(system.numbers)}")
        kind = PrefillWorker if self.role == "prefill" else DecodeWorker
        self.worker: Worker = kind(self.engine, settings, _hello(name, incarnation, self.role, self.engine), channels)
        if isinstance(self.worker, PrefillWorker):
            system.pools.of(incarnation).answers = lambda: not self.process.stopped
        self.engine.pool = self.worker.cache.pool
        grammars.on_mask = self.wake
        self.engine.begins = self._begins
        self.wake()

    def wake(self) -> None:
        self._turn_at(max(self.system.clock.now, self._busy_until))

    def _turn_at(self, time: float) -> None:
        if self._turning or self.gone:
            return
        if self._next is not None:
            self._next.cancel()
        self._next = self.system.clock.at(time, self.process.run, self._turn)

    def _turn(self) -> None:
        if self.gone:
            return
        self._next, self._turning, clock = None, True, self.system.clock
        since, without_room = self._without_room
        self.system.crowds_out(self.name, without_room, since, clock.now)
        self._began, shot = None, self.worker.membership.snapshot
        try:
            if self.worker.finished():
                self.leave()
                return
            sleep = self.worker.turn()
        except Poisoned as poison:
            self._dies_of(poison)
            return
        finally:
            self._turning = False
        self._busy_until = clock.now + self.process.spent
        if self.process.spent:  # until then heartbeats report this step and the previous turn's snapshot
            membership = self.worker.membership
            membership.snapshot, shot = shot, membership.snapshot
            if self._began is not None:
                membership.turning_since, membership.expected_s = self._began
            clock.at(self._busy_until, self.process.run, self._stepped, shot)
        self.process.spent = 0.0
        self.system.look_at(self)
        self._without_room = clock.now, self._lack_blocks() if self._began is None else set()
        goes_on = not sleep or self.system.network.waits_for(self.process)
        self._turn_at(self._busy_until if goes_on else max(self._busy_until, clock.now + sleep))

    def _begins(self, seconds: float, batch: Batch) -> None:
        self.system.poison(batch)
        membership = self.worker.membership
        self._began = self.system.clock.now, membership.expected_s
        self.system.slowest_s = max(self.system.slowest_s, seconds)
        now = self.system.clock.now
        self.system.crowds_out(self.name, self._crowded_out(batch), now, now + seconds)
        if self.role != "prefill":
            self.system.leaves_unplaced(now, now + seconds)
        if stuck_s := self.engine.stuck_s:
            self.engine.stuck_s = 0.0
            self.process.spent += stuck_s
            self.system.network.count("hung")
            self.system.struck(self.name, seconds=stuck_s)

    def _crowded_out(self, batch: Batch) -> set[RequestId]:
        """Return the requests that rightly have no place in this step.

        All slots, or all tokens if they need more than one, went to requests of higher priority, or blocks are lacking
        for them or for one that waits before them. This is computed independently of the planner, which is under
        test."""
        planner = self.worker.planner
        lowest = max(segment.sequence.request.priority for segment in batch.segments)
        full = len(batch.segments) == planner.max_sequences
        spent = sum(segment.length for segment in batch.segments) == planner.max_tokens
        lower = [each for each in planner.sequences() if each.request.priority > lowest]
        return {each.request.id for each in lower if full or (spent and each.missing > 1)} | self._lack_blocks()

    def _lack_blocks(self) -> set[RequestId]:
        """Return the requests that wait for more blocks than are free, or behind one that does."""
        planner, pool = self.worker.planner, self.worker.cache.pool
        queue = [entry.sequence for entry in planner._waiting]
        if isinstance(self.worker, DecodeWorker):
            queue += [reservation.sequence for reservation in self.worker.reservations._waiting.values()]
        if not queue:
            return set()

        def fits(sequence: Sequence) -> bool:
            blocks = -(-len(sequence.tokens) // self.engine.layout.block_size)
            return blocks + planner.running <= pool.available  # one block of growth per running sequence

        return {each.request.id for each in itertools.dropwhile(fits, queue)}

    def _stepped(self, shot: Snapshot) -> None:
        membership = self.worker.membership
        membership.turning_since, membership.expected_s, membership.snapshot = None, 0.0, shot

    def jam(self, seconds: float) -> None:
        """Make the worker loop hang outside of a step for ``seconds``; its heartbeats continue."""
        begins = max(self.system.clock.now, self._busy_until)
        self.system.clock.at(begins, self.process.run, self._jammed, begins)
        self._busy_until = begins + seconds
        self.system.network.count("jammed")
        self.system.struck(self.name, seconds=seconds)
        self.wake()

    def _jammed(self, since: float) -> None:
        self.worker.membership.turning_since = since

    @property
    def awake(self) -> bool:
        """Whether it can act: it is alive, not stopped, and not in a long turn."""
        since = self.worker.membership.turning_since
        busy = since is not None and self.system.clock.now - since > 1.0
        return not (self.gone or self.process.stopped or busy)

    def sessions(self) -> int:
        """Return the number of hand-offs in progress."""
        return len(self.worker.sender if isinstance(self.worker, PrefillWorker) else self.worker.receiver)  # type: ignore[attr-defined]

    def stale(self) -> list[Any]:
        """Return the early announcements that the receiver has kept, without a repetition, for too long."""
        if not isinstance(self.worker, DecodeWorker):
            return []
        early = self.worker.receiver._early.values()
        return [each.said for each in early if self.worker.clock() - each.at > LONGEST_HOLD_S]

    def leave(self) -> None:
        """End the process after a drain."""
        self.gone = True
        self.worker.close()
        self.engine.close()
        self.system.clock.after(0.05, self.process.die)

    def _dies_of(self, poison: Poisoned) -> None:
        if not poison.raised:
            self.system.kill_worker(self.name)
            return
        self.system.network.count("raised")
        self.system.struck(self.name, deadly=True)
        self.gone = True
        self.worker.close(crashed=True)  # as in Worker.run
        self.engine.close()
        self.system.clock.after(0.05, self.process.die)

    def kill(self, lingers_s: float = 0.0) -> None:
        """Kill the process, as SIGKILL does. Its sockets stay open for ``lingers_s``, as when the kernel frees its
        memory first."""
        self.gone = True
        self.process.die()
        if lingers_s:
            self.system.clock.after(lingers_s, self.system.network.dead, self.process)
        else:
            self.system.network.dead(self.process)
        self.unmap()

    def unmap(self) -> None:
        """Release what the kernel unmaps of a dead process: its own pool, and its view of others' pools."""
        if isinstance(self.worker, PrefillWorker):
            self.system.pools.of(self.worker.incarnation).close()
        else:
            assert isinstance(self.worker, DecodeWorker)
            self.worker.receiver._sources.close()
        self.engine.close()


@dataclass(eq=False)
class SimulatedClient:
    """Sends one request and checks its answer against the oracle's."""

    system: SimulatedSystem
    number: int
    prompt: list[int]
    sampling: SamplingParams
    n: int
    stop_after: dict[int, int] = field(default_factory=dict)
    """Choices that the coordinator ends (as by a stop string), and after how many tokens."""
    priority: int = 0
    open_ended: bool = False
    """Whether a shorter answer is acceptable, as without a token limit."""
    output: list[list[int]] = field(default_factory=list)
    scored: int = 0
    """How many log-probabilities of the prompt have arrived."""
    ends: list[str] = field(default_factory=list)
    request_record: RequestRecord | None = None
    last_at: float = 0.0
    deadline_at: float = 0.0
    ended_at: float = 0.0
    longest_gap: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """The longest gap between two tokens of each choice, in seconds."""
    record: RequestTimeline = field(default_factory=RequestTimeline)
    crowded_out: list[tuple[float, float]] = field(default_factory=list)
    """Since the last token; see :class:`Pause`."""

    def __post_init__(self) -> None:
        self.output = [[] for _ in range(self.n)]
        self.gaps, self._choice_at = [0.0] * self.n, [math.inf] * self.n
        found = [expected(self.prompt, self.sampling, choice) for choice in range(self.n)]
        self.streams, self.refused = [each.tokens for each in found], [each.refused for each in found]
        if (constraint := constraint_of(self.sampling)) is not None:
            for stream in self.streams:
                ended = stream[-1:] in [[token] for token in self.sampling.ending_token_ids]
                if wrong := constraint.object_to(stream, self.sampling.grammar, ended=ended):
                    self.system.complain(f"request {self.number}: the expected output {wrong}")

    @property
    def id(self) -> RequestId:
        return RequestId(self.number.to_bytes(16, "big"))

    @property
    def over(self) -> bool:
        return bool(self.ends)

    def send(self, timeout_s: float, salt: str) -> None:
        if not self.system.coordinator.process.alive:
            self._end("refused: nobody there")
            return
        now = self.system.clock.now
        self.record.timeout_s = timeout_s
        if self.open_ended:  # as the HTTP side does
            most = self.system.coordinator.router.most_output(len(self.prompt), self.n) or 1
            limit = max(1, min(self.sampling.max_tokens, most))
            self.sampling = msgspec.structs.replace(self.sampling, max_tokens=limit)
        chains = {"float32": extend_chain(chain_root(salt, "oracle", "float32"), [], self.prompt)}
        request_record = RequestRecord(
            id=self.id, prompt=pack_tokens(self.prompt), sampling=self.sampling,
            n=self.n, cache_salt=salt, priority=self.priority, chains=chains, client=self, arrived_at=now,
            tokenized_at=now, deadline_at=now + timeout_s, open_ended=self.open_ended,
        )  # fmt: skip
        try:
            self.system.coordinator.dispatcher.submit([request_record])
        except RequestError as error:
            self._end(f"refused: {error.code}")
            return
        self.request_record, self.last_at, self.deadline_at = request_record, now, now + timeout_s

    def leave(self) -> None:
        if self.request_record is not None and not self.over:
            self._end("left")
            self.system.coordinator.dispatcher.abort(self.request_record)

    def cut(self) -> None:
        """End the request because the coordinator has died."""
        if self.request_record is not None and not self.over:
            self._end("cut")

    # -- as the coordinator sees it -----------------------------------------------------------------------------------

    def tokens(
        self,
        request_record: RequestRecord,
        choice: int,
        ids: list[int],
        logprobs: Seq[Logprobs | None],
        finish: FinishReason,
    ) -> bool:
        complain, output, stream = self.system.complain, self.output[choice], self.streams[choice]
        if self.over:
            complain(f"request {self.number} got tokens after its end ({self.ends[0]})")
        self._check_scored()
        output += ids
        if output != stream[: len(output)]:
            complain(f"request {self.number} choice {choice}: {output} is not the beginning of {stream}")
        if finish is FinishReason.STOP and (output != stream or output[-1] not in self.sampling.ending_token_ids):
            complain(f"request {self.number} choice {choice}: {output} stops before the end of {stream}")
        if self.sampling.logprobs is not None and len(logprobs) != len(ids):
            complain(f"request {self.number}: {len(logprobs)} log-probabilities of {len(ids)} tokens")
        now = self.system.clock.now
        self.gaps[choice] = max(self.gaps[choice], now - self._choice_at[choice])
        self._choice_at[choice] = now
        known = sum(map(len, self.output)) - len(ids)
        self._heard(started=known > 0)
        return len(output) >= self.stop_after.get(choice, 1 << 30)

    def prompt_logprobs(self, request_record: RequestRecord, span: PromptSpan) -> None:
        complain, tops = self.system.complain, self.sampling.prompt_logprobs or 0
        if self.over or any(self.output):
            complain(f"request {self.number} got log-probabilities of its prompt after its end or its first token")
        if span.start != self.scored + 1 or span != oracle_prompt(self.prompt, span.start, span.end, tops):
            complain(f"request {self.number} has {self.scored} log-probabilities and got those of {span.start} on")
        self.scored = span.end - 1
        self._heard(started=False)

    def _check_scored(self) -> None:
        if self.sampling.prompt_logprobs is not None and self.scored != len(self.prompt) - 1:
            self.system.complain(f"request {self.number} goes on after {self.scored} log-probabilities of its prompt")

    def _heard(self, *, started: bool) -> None:
        pause = Pause(self.last_at, self.system.clock.now, started, tuple(self.crowded_out))
        self.crowded_out.clear()
        if started:
            self.longest_gap = max(self.longest_gap, pause.seconds)
        if pause.seconds > SHORT_S:
            self.record.pauses.append(pause)
        self.last_at = pause.ended

    @property
    def partly_sent(self) -> bool:
        return any(self.output)

    def done(self, request_record: RequestRecord) -> None:
        self._end("done")
        self._check_scored()
        for choice, output in enumerate(self.output):
            wanted, stop = len(self.streams[choice]), self.stop_after.get(choice, 1 << 30)
            if len(output) < min(wanted, stop) and not self.open_ended:
                self.system.complain(f"request {self.number}/{choice} is done after {len(output)} of {wanted} tokens")
            if self.refused[choice] and stop > wanted:
                self.system.complain(f"request {self.number}/{choice} is done, though no token was left for it")

    def failed(self, request_record: RequestRecord, error: RequestError) -> None:
        self._end(f"failed: {error.code}")

    @property
    def was_refused(self) -> bool:
        """Whether the request failed because a choice had no token left after all of its output, some of which may be
        lost on a lossy line."""
        ends = zip(self.refused, self.streams, self.output, strict=True)
        return self.ends[:1] == ["failed: grammar_failed"] and any(
            refused and (output == stream or self.system.lossy) for refused, stream, output in ends
        )

    def _end(self, how: str) -> None:
        self.ends.append(how)
        self.ended_at = self.system.clock.now
        if self.request_record is not None:
            self._heard(started=any(self.output))
        late = self.system.clock.now - self.deadline_at
        if self.request_record is not None and late > DEADLINE_GRACE_S and not self.system.stalled:
            self.system.complain(f"request {self.number} ends ({how}) {late:.1f} s after its deadline")
        if len(self.ends) > 1:
            self.system.complain(f"request {self.number} ends twice: {self.ends}")
        self.system.running -= 1


class SimulatedCoordinator:
    def __init__(self, system: SimulatedSystem) -> None:
        self.process = SimulatedProcess(system.clock, COORDINATOR)
        channels = SimulatedChannels(system.network, self.process)
        self.registry = Registry(None)
        host, _, port = CONTROL.removeprefix("tcp://").rpartition(":")
        self.gateway = Gateway(self.registry, host, int(port), channels=channels)
        self.router = Router(self.registry, no_prefill=system.no_prefill, horizon=system.horizon)
        self.admission = Admission(10_000, 1 << 30)
        loop: Any = Loop(self.process)
        metrics = Metrics("oracle", self.registry)
        self.dispatcher = CheckedDispatcher(self.gateway, self.router, self.admission, metrics, loop)
        self.dispatcher.complain = system.complain
        self.dispatcher.start()

    def kill(self, network: SimulatedNetwork) -> None:
        self.process.die()
        network.dead(self.process)


class SimulatedSystem:
    """A coordinator, workers by name, and clients. ``problems`` lists what the checks have found.

    With ``constrains``, some outputs are constrained. With ``one_fault``, requests can always move to another worker,
    so a fault excuses only its beginning.
    """

    def __init__(
        self, rng: Random, chance_of_masks: Random, *, one_fault: bool = False, constrains: bool = False
    ) -> None:
        self.rng, self.one_fault, self.constrains = rng, one_fault, constrains
        self.horizon = HORIZON_TOKENS if one_fault else rng.choice((HORIZON_TOKENS, 2))
        """The router's horizon in tokens; with a short one it promises too much, and sequences are parked."""
        self.no_prefill: NoPrefillPolicy = "local" if one_fault else rng.choice(("local", "local", "wait", "reject"))
        self.pace = 1.0 if one_fault else rng.choice((1.0,) * 8 + (20.0, 100.0))
        """Factor on the duration of steps, which is 4 ms or more; with the largest, a step takes up to a second."""
        self.ranked = not one_fault and rng.random() < 0.3
        """Whether requests differ in priority."""
        self.clock = VirtualClock()
        self.mask_times = MaskTimes(chance_of_masks, self.clock)
        self.network = SimulatedNetwork(self.clock, rng)
        self.network.dropped = self._dropped
        self.pools = Pools()
        self.strikes: list[Strike] = []
        self.unheard: list[Strike] = []
        """Noise that kept a worker away: it dropped a message needed to join, or so many heartbeats that the worker was
        declared dead."""
        self.slowest_s = 0.0
        """The longest step that was not a hang."""
        self.numbers = iter(range(1, 1 << 30))
        self.coordinator = SimulatedCoordinator(self)
        self.workers: dict[str, SimulatedWorker] = {}
        self.shapes: dict[str, WorkerShape] = {}
        self.clients: list[SimulatedClient] = []
        self.running = 0
        self.poison: Callable[[Batch], None] = lambda batch: None
        """Called with each batch before it is computed; may raise Poisoned."""
        self.stalled = False
        """Whether the coordinator was ever stopped, so that it may miss deadlines."""
        self.lossy: set[str] = set()
        """Workers whose line to the coordinator loses messages."""
        self.suspects: set[str] = set()
        """Workers that had a reason to be silent."""
        self.problems: list[str] = []
        """Collected, since the real code would swallow an exception raised in some places."""
        self._events = 0
        """Number of events since the last check for stragglers."""
        self._look_for_stragglers()

    @property
    def sick(self) -> bool:
        """Whether there is a worker that fails every request."""
        return any(worker.engine.sick for worker in self.workers.values())

    # -- parts --------------------------------------------------------------------------------------------------------

    def add_worker(self, name: str, role: Role, blocks: int, block_size: int, host: str) -> None:
        self.shapes[name] = WorkerShape(role, blocks, block_size, host)
        self.workers[name] = SimulatedWorker(self, name, self.shapes[name])

    def kill_worker(self, name: str, seconds: float = 0.0, lingers_s: float = 0.0) -> None:
        """Kill a worker. ``seconds`` is the time until it is restarted, if it is; ``lingers_s`` the time for which its
        sockets stay open."""
        if not (worker := self.workers[name]).gone:
            worker.kill(lingers_s)
            self.network.count("killed")
            self.struck(name, seconds=seconds, deadly=True)

    def start_worker(self, name: str) -> None:
        """Start a worker again, unless it still runs."""
        if self.workers[name].gone:
            self.workers[name] = SimulatedWorker(self, name, self.shapes[name])

    def kill_coordinator(self) -> None:
        self.network.count("coordinator killed")
        self.coordinator.kill(self.network)
        for client in self.clients:
            client.cut()

    def start_coordinator(self, pause_s: float) -> None:
        """Start the coordinator again after a pause of ``pause_s`` seconds."""
        heard = [name for name, worker in self.workers.items() if worker.awake and name not in self.suspects]
        held = {name: self.workers[name].worker.holdings() for name in heard}
        if pause_s > LONGEST_HOLD_S and any(held.values()):
            self.complain(f"held for a dead coordinator: {held}")
        self.coordinator = SimulatedCoordinator(self)

    def struck(self, *ends: str, seconds: float = 0.0, deadly: bool = False) -> None:
        """Record a fault that begins now, of one process or of the line between two, and lasts ``seconds``."""
        ended = self.clock.now + (0.0 if self.one_fault else seconds)
        self.strikes.append(Strike(frozenset(ends), self.clock.now, ended, deadly))

    def _dropped(self, connection: SimulatedConnection, parts: Parts) -> None:
        if connection.router.process.name == COORDINATOR:
            tag = msgspec.msgpack.decode(parts[0][DIGEST_BYTES:])[0]
            if tag in ("hello", "welcome", "rejoin"):
                self.not_heard(connection.dealer.process.name)

    def not_heard(self, name: str) -> None:
        """Record that noise has kept this worker from joining or from being heard."""
        self.unheard.append(Strike(frozenset((name, COORDINATOR)), self.clock.now, self.clock.now))

    # -- checks -------------------------------------------------------------------------------------------------------

    def complain(self, problem: str) -> None:
        self.problems.append(f"at {self.clock.now:.4f} s: {problem}")

    def step(self) -> None:
        """Run the next event. Raises AssertionError if a check has found a problem."""
        if not self.clock.step():
            raise Broken("nothing will ever happen again")
        self._events += 1
        if self._events > MOST_EVENTS:
            raise Broken(
                f"{MOST_EVENTS} events in half a second, up to {self.clock.now} s: a process never stops taking turns"
            )
        if self.problems:
            self.check()

    def check(self) -> None:
        if self.problems:
            raise Broken("; ".join(self.problems))

    def crowds_out(self, name: str, requests: set[RequestId], began: float, ended: float) -> None:
        """Record that the worker ``name`` has no room for these requests in this period."""
        for client in self.clients if requests else ():
            here = any(name in each.workers and each.ended > began for each in client.record.attempts[-1:])
            if here and client.id in requests:
                client.crowded_out.append((began, ended))

    def leaves_unplaced(self, began: float, ended: float) -> None:
        """Record a decode step during which no worker has room for requests that wait to be placed."""
        unplaced = self.coordinator.dispatcher.without_room()
        for client in self.clients if unplaced else ():
            if client.id in unplaced:
                client.crowded_out.append((began, ended))

    def look_at(self, worker: SimulatedWorker) -> None:
        """Run the checks that are cheap enough for every turn."""
        cache = worker.worker.cache
        if cache.strays():
            raise Broken(f"{worker.name} has blocks of closed tables: {cache.leaks()}")

    def _look_for_stragglers(self) -> None:
        """Check, twice a second, that reachable workers have dropped requests that ended."""
        now, self._events = self.clock.now, 0
        over = {client.id: now - client.ended_at for client in self.clients if client.over}
        for name, worker in self.workers.items():
            if worker.gone or worker.process.stopped or name in self.suspects or not self.coordinator.process.alive:
                continue
            late = [each for each in worker.worker.holdings() if over.get(each.request, 0) > LONGEST_LINGER_S]
            if late and worker.engine.slowness <= 100:
                self.complain(f"{name}: {late[0]} is still held {over[late[0].request]:.1f} s after its end")
        self.clock.after(0.5, self._look_for_stragglers)

    def look_at_quiet(self) -> None:
        """Raise if anything is left anywhere."""
        if wrong := self.left_behind():
            raise Broken(f"left behind: {wrong}")

    def sore(self) -> bool:
        """Whether a circuit breaker is open."""
        return any(each.state is BreakerState.OPEN for each in self.coordinator.router.breakers._breakers.values())

    def left_behind(self) -> dict[str, Any]:
        """Return everything that is still in use, by a description."""
        dispatcher = self.coordinator.dispatcher
        left = {
            "tickets": dict(dispatcher.records), "queued requests": self.coordinator.admission.requests,
            "queued tokens": self.coordinator.admission.tokens,
            "suspects": dispatcher._crashes._suspects, "waiting for answers": dispatcher._pings._waiting,
            "lost or missing": self.coordinator.gateway._lost._losing | self.coordinator.gateway._lost._missing,
        }  # fmt: skip
        for name, worker in self.workers.items():
            if worker.gone:
                continue
            counts = worker.worker.cache.pool.counts
            left |= {f"{name} holds": worker.worker.holdings(), f"{name} blocks": counts.held}
            left |= {f"{name} leaks": worker.worker.cache.leaks(), f"{name} sessions": worker.sessions()}
            left |= {f"{name} deadlines": worker.worker.requests._deadlines}
            left |= {f"{name} announcements": worker.stale()}
            if self.coordinator.registry.get(worker.worker.incarnation) is None:
                left[f"{name} is not registered"] = True
            if self.network.severed(worker.process):
                left[f"{name} keeps a connection that carries nothing"] = True
        for name, account in self.coordinator.router.accounts.items():
            left[f"promised of {name}"] = account.blocks or account.sequences or account.prefill_tokens
        for _, _, event in self.clock.events:
            for timer in event.arguments:
                if isinstance(timer, Event) and timer.action in (dispatcher._active._expire, dispatcher._timer.soon):
                    left[f"a timer for {timer.action}"] = timer.arguments or True
        for pair, breaker in self.coordinator.router.breakers._breakers.items():
            if breaker.state is BreakerState.OPEN and breaker.opens_until < self.clock.now - 1.0:
                left[f"the breaker of {pair} is still open"] = True
        for who, on in dispatcher._assignments._on.items():
            left[f"index of {who}"] = on
        return {what: value for what, value in left.items() if value}


def _hello(name: str, incarnation: Incarnation, role: Role, engine: OracleEngine) -> Hello:
    return Hello(
        PROTOCOL, WorkerName(name), incarnation, role, "oracle", engine.fingerprint, engine.layout.fingerprint, 1,
        "localhost", "host", "", ("shm", "zmq"), engine.memory.blocks, engine.layout.block_size, engine.max_model_len,
        engine.vocab_size, 8, 32, "cpu", engine.layout.dtype,
    )  # fmt: skip
