"""The main loop of every worker, whatever its role.

One thread does all work that touches the engine, in turns: receive messages, move KV, run one step, report. Nothing
else competes for the interpreter lock while a step runs: Python code in a side thread would delay a step by several
times its own duration. When there is nothing to compute, the loop sleeps in ``poll`` until a socket, a signal or the
next timer wakes it.

    JOINING ── Welcome ──► READY ── Drain or SIGTERM ──► DRAINING ── empty, or out of time ──► GONE
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterable, KeysView
from dataclasses import dataclass
from typing import Any, Protocol

from common.core.errors import StartError, WireError
from common.core.ids import TransferId
from common.core.sequence import Batch, StepResult
from common.engine.launched import StepLauncher
from common.engine.scheduler import Planner, Sampled
from common.grammar.masks import WAIT_S, Grammars
from common.kv.cache import BlockCopy, KvCache
from common.kv.layout import KvLayout
from common.kv.storage.cuda import Memory
from common.net.messages import (
    DRAINED,
    STOPPED,
    Drain,
    Goodbye,
    Hello,
    Lease,
    LeaseAck,
    Leaving,
    Measure,
    NameTaken,
    Rejected,
    Rejoin,
    ResendPrompt,
    Welcome,
)
from common.net.sockets import Channels
from common.platform.gpu_health import unusable
from common.platform.gpu_monitor import GpuMonitor
from common.worker.connection_log import ConnectionLog
from common.worker.former import FormerCoordinator
from common.worker.held_requests import HeldRequests
from common.worker.membership import Membership
from common.worker.overlap import Overlap
from common.worker.prefault import PoolPrefault
from common.worker.prompt_reports import PromptReports
from common.worker.report import HandoffCounts, WorkerReport
from common.worker.step_times import StepTimeEstimator
from common.worker.steps import StepRunner
from common.worker.waker import DEVICE_FAILED, MASK_READY, LoopWaker

log = logging.getLogger("tandem.worker")

IDLE_S = 0.25
"""Longest sleep while no request is held."""
TIMER_S = 0.05
"""Longest sleep while requests are held but nothing can be computed."""
SWEEP_S = 0.1
"""Interval between checks of the lease, the connection and deadlines."""
PUBLISH_S = 0.05
"""Interval at which a busy worker updates the snapshot that heartbeats report, and announces cached prefixes.
Announcing after every step would send a message per step, since some stream has nearly always just filled a block."""

STUCK_S, STUCK_STEPS = 30.0, 10
"""A turn of the loop that takes longer than STUCK_S, and than STUCK_STEPS times its step was expected to take, will not
end. Far more than the coordinator's own limit, which moves requests away: this one costs the process."""


class Engine(Protocol):
    """What a worker needs from an engine; :class:`common.engine.runner.ModelEngine` is the one with a model."""

    layout: KvLayout
    fingerprint: str
    vocab_size: int
    max_model_len: int
    on_layer: Callable[[int], None] | None
    """Called with the index of each layer once its keys and values of the running step are in the pool."""

    @property
    def memory(self) -> Memory:
        """The memory of the KV pool, which hand-offs read and write."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """Compute and store the KV of every row, and sample for the segments that want a token."""
        ...

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole KV blocks; called before the step that reads the targets."""
        ...

    grammars: Grammars | None
    """Constrains outputs to grammars; None if the engine cannot."""
    launch: StepLauncher | None
    """Starts a step without waiting for its tokens; None on devices that compute while Python waits."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of the loop. Times in seconds."""

    coordinator: str
    host_id: str
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = True
    kv_transport: str = "auto"
    data_address: str = "tcp://127.0.0.1:*"
    drain_timeout_s: float = 30.0
    ahead_bytes: int = 0
    """Bytes of never-used blocks to pre-fault while idle; a page fault inside a step delays it."""
    supervised: bool = False
    """Whether a launcher runs this worker. The coordinator's log, which reports joins, is then in the same terminal."""


class Worker(abc.ABC):
    """The loop around one engine, and the parts that it drives. A subclass, the role, adds what is done with messages
    about requests, with KV and with tokens.

    ``requests`` keeps deadlines and the lease, ``steps`` runs steps, ``membership`` exchanges messages with the
    coordinator, ``report`` makes what heartbeats report. Raises StartError if a socket cannot be opened.
    """

    overlaps = False
    """Whether a step may be launched before the tokens of the last one are read, if the engine can."""

    def __init__(
        self, engine: Engine, settings: WorkerSettings, hello: Hello, channels: Channels | None = None
    ) -> None:
        self.engine, self.settings, self.incarnation = engine, settings, hello.incarnation
        self.role = hello.role
        self.channels = channels or Channels()
        self.clock = self.channels.clock
        self.cache = KvCache(
            engine.memory.blocks,
            engine.layout.block_size,
            model_fingerprint=engine.fingerprint,
            kv_dtype=engine.layout.dtype,
            prefix_caching=settings.prefix_caching,
            generations=engine.memory.generations,
        )
        self.planner = Planner(
            self.cache, max_tokens=settings.max_num_batched_tokens, max_sequences=settings.max_num_seqs
        )
        self.step_times = StepTimeEstimator()
        self.report = WorkerReport(self)
        self.steps = StepRunner(self)
        self.draining_until: float | None = None
        self._stopped = False
        self._swept_at = self._published_at = 0.0
        self._waker = LoopWaker(self.channels)
        if engine.grammars is not None:
            self.planner.held = engine.grammars.held
            engine.grammars.wait_s, engine.grammars.on_mask = WAIT_S, self._waker.mask_ready
        self._prefault = PoolPrefault(engine.memory, self.cache.pool, settings.ahead_bytes)
        self._overlap = Overlap(self, engine.launch) if self.overlaps and engine.launch is not None else None
        self._advance = self.steps.advance if self._overlap is None else self._overlap.advance
        started_at = self.clock()
        self.open_links()
        self.membership = Membership(self.channels, settings.coordinator, self.introduce(hello))
        self.prompt_reports = PromptReports(self.membership.send)
        self.requests = HeldRequests(self, engine, self.cache, self.membership, self.report)
        self._connection_log = ConnectionLog(
            self.membership, self.requests, settings.coordinator, supervised=settings.supervised, now=started_at
        )

    # -- what a role adds ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def open_links(self) -> None:
        """Create the role's state and open the sockets of its hand-offs; called once, before Hello is sent."""

    @abc.abstractmethod
    def close_links(self) -> None:
        """Give all hand-offs up and close their sockets; called once, when the worker has left."""

    def introduce(self, hello: Hello) -> Hello:
        """Return ``hello`` completed with what only the role knows (a decode worker's data address)."""
        return hello

    @abc.abstractmethod
    def configure(self, welcome: Welcome) -> None:
        """Apply the timeouts in ``welcome`` to hand-offs."""

    @abc.abstractmethod
    def handle(self, message: Any, now: float) -> None:
        """Act on one control message about a request; WireError if it cannot be acted on."""

    @abc.abstractmethod
    def move_kv(self, now: float) -> None:
        """Receive and send what hand-offs have to exchange, without blocking."""

    def more_to_move(self) -> bool:
        """Return whether the last :meth:`move_kv` left work that need not wait for a message."""
        return False

    def rest_s(self) -> float:
        """Return how many seconds to sleep while requests are held but nothing can be computed."""
        return TIMER_S

    def plan(self) -> Batch | None:
        """Return the next step; None if nothing can be computed now."""
        return self.planner.plan()

    @abc.abstractmethod
    def before_step(self, batch: Batch, now: float) -> None:
        """Record that ``batch`` is about to be computed."""

    @abc.abstractmethod
    def sampled(self, batch: Batch, samples: list[Sampled], now: float) -> None:
        """Append the tokens sampled in ``batch`` to their sequences and send them on."""

    @abc.abstractmethod
    def abort(self, transfer: TransferId) -> None:
        """Drop everything that (request, attempt) has here; unknown ones are fine."""

    @abc.abstractmethod
    def holdings(self) -> KeysView[TransferId]:
        """Return every (request, attempt) held here, in any state: requests in order of arrival, then link trials."""

    @abc.abstractmethod
    def handoff_counts(self) -> HandoffCounts:
        """Return the counts of hand-offs that heartbeats report."""

    # -- health, asked from another thread ----------------------------------------------------------------------------

    def why_stuck(self) -> str:
        """Return why the loop will not go on by itself: its current turn has taken far longer than its step may. ""
        if it goes on, also without a coordinator."""
        since, expected_s = self.membership.turning_since, self.membership.expected_s
        turn_s = 0.0 if since is None else self.clock() - since
        longest_s = max(STUCK_S, STUCK_STEPS * expected_s)
        return f"one turn of the loop has taken {turn_s:.0f} s so far" if turn_s > longest_s else ""

    def why_not_ready(self) -> str:
        """Return why the coordinator places no new requests here, "" if it may."""
        if self.draining_until is not None:
            return "this worker drains"
        if not self.membership.joined:
            return "this worker has not joined a coordinator"
        return "" if self.membership.connected else "the connection to the coordinator is down"

    # -- the loop -----------------------------------------------------------------------------------------------------

    def watch_gpus(self, monitor: GpuMonitor) -> None:
        """Send the readings of ``monitor`` with heartbeats. When it reports a fault, the loop ends after its current
        turn, :meth:`run` raises, and the fault becomes the reason of the Goodbye. The worker stops the monitor when it
        closes. Call this before :meth:`run`."""
        self.membership.gpus = monitor
        monitor.on_fault = self._waker.device_failed
        if monitor.fault:
            self._waker.device_failed(monitor.fault)

    def run(self) -> None:
        """Serve until drained or stopped, then close everything. Raises StartError if the device failed."""
        with self._waker.attached():
            try:
                self.report.publish()  # heartbeats start in the first turn: the first must not report an empty pool
                while not self.finished():
                    self._wait(self.turn())
            except BaseException:
                self.close(crashed=True)
                raise
            self.close()
        if self._waker.device_fault:
            raise unusable(self._waker.device_fault)

    def turn(self) -> float:
        """Run one turn of the loop: messages, hand-offs, one step. Return how many seconds the loop may then sleep."""
        self.membership.stood_still_before_s = self.membership.stood_still_s()  # set first: heartbeats read it last
        now = self.membership.turning_since = self.clock()
        for message in self.membership.receive():
            self._dispatch(message, now)
        for former in self.membership.former:
            for message in former.receive():
                self._dispatch_former(former, message, now)
        self.move_kv(self.clock())
        self.requests.reap()
        self._sweep(self.clock())
        stepped = self._advance()
        done = self.clock()
        if not stepped or done - self._published_at >= PUBLISH_S:
            self._published_at = done
            self.report.publish()
        self.membership.turning_since = None
        if stepped or self.more_to_move():
            return 0.0
        if self.holdings():
            return self.rest_s()
        return 0.0 if self._prefault.advance() else IDLE_S

    def _dispatch(self, message: Any, now: float) -> None:
        match message:
            case Welcome(lease_ms=lease_ms):
                self.configure(message)
                self.requests.begin_lease(lease_ms / 1000, now)
                self.cache.prefix.announce_all()
                self._connection_log.joined()
            case Rejected(reason=reason):
                raise StartError(
                    "the coordinator refuses this worker", reason, "use the model and options of the other workers"
                )
            case NameTaken():
                self.requests.drop_own()
            case Rejoin():
                why = "it was restarted, or has given this worker up and placed its requests elsewhere"
                dropped = len(self.holdings())
                log.warning("the coordinator asks this worker to join again: %s (%d requests dropped)", why, dropped)
                self.requests.drop_own()
            case Leaving():
                if self.requests.hand_over():
                    log.info(
                        "the coordinator is leaving: dialling the next one, %d requests go on", len(self.holdings())
                    )
            case Drain(timeout_ms=timeout_ms):
                self.drain(timeout_ms / 1000)
            case _ if not self.membership.joined:  # hold nothing before the duration of a lease is known
                log.warning("dropped a %s message: it arrived before Welcome", type(message).__name__)
            case Lease(live=live):
                self.requests.renew_lease(live, now)
                self.membership.send(LeaseAck(self.incarnation))
            case ResendPrompt(request=request, attempt=attempt, start=start):
                self.prompt_reports.resend(TransferId(request, attempt), start)
            case _:
                try:
                    self.handle(message, now)
                except WireError as error:  # drop only the message: the coordinator retries or fails its request
                    log.warning("dropped a %s message: %s", type(message).__name__, str(error))
                    self.membership.bad_messages += 1

    def _dispatch_former(self, former: FormerCoordinator, message: Any, now: float) -> None:
        """Act on a message of a coordinator that is leaving."""
        match message:
            case Lease(live=live):
                self.requests.renew_former(former, live)
                former.send(LeaseAck(self.incarnation))
            case ResendPrompt(request=request, attempt=attempt, start=start):
                self.prompt_reports.resend(TransferId(request, attempt), start)
            case Drain(timeout_ms=timeout_ms):
                self.drain(timeout_ms / 1000)
            case Welcome() | Leaving() | Measure():
                pass
            case _:
                try:
                    self.handle(message, now)
                except WireError as error:
                    log.warning("dropped a %s message: %s", type(message).__name__, str(error))
                    self.membership.bad_messages += 1

    def _sweep(self, now: float) -> None:
        """Every SWEEP_S, look for an expired lease, a broken connection and requests whose deadlines have passed."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        self.prompt_reports.forget(now)
        self.requests.expire_lease(now)
        self.membership.reconnect()
        for former in self.membership.take_gone():
            if dropped := self.requests.drop_of(former):
                log.warning("the coordinator that was leaving is gone: %d of its requests are dropped", dropped)
        self._connection_log.check(now)
        self.requests.expire_deadlines(now)

    def _wait(self, seconds: float) -> None:
        """Sleep until there is input, at most ``seconds``; then act on signals: the first drains, the second stops. A
        second one does not stop a supervised worker: the first may have been sent to every process of the service, and
        the launcher then sends its own."""
        cores = self.steps.cores
        if seconds and cores is not None:
            cores.lend()
        ready = self.channels.poll(seconds)
        if seconds and cores is not None:
            cores.take_back()
        for number in self._waker.read(ready):
            if number == MASK_READY:
                continue
            if number == DEVICE_FAILED:
                self._stopped = True
                continue
            if self.draining_until is not None and not self.settings.supervised:
                self._stopped = True
            self.drain(self.settings.drain_timeout_s)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> None:
        """Accept no new requests; leave when those held have finished, at the latest after ``timeout_s``."""
        if self.draining_until is None:
            self.requests.accept_no_more()
            self.draining_until = self.clock() + timeout_s
            log.info("draining for at most %g s", timeout_s)

    def finished(self) -> bool:
        """Return whether the loop is to end: drained, out of time, or stopped by a signal."""
        if self._stopped:
            return True
        if self.draining_until is None:
            return False
        return not self.holdings() or self.clock() > self.draining_until

    def close(self, *, crashed: bool = False) -> None:
        """Drop everything, send Goodbye, and leave no socket or thread behind. After a crash no Goodbye is sent: it
        would clear this worker's requests of the suspicion that one of them caused the crash."""
        self.requests.drop_all()
        fault = self._waker.device_fault
        if self._overlap is not None and not (crashed or fault):  # steps on a lost GPU never end
            self._overlap.settle()
        reason = fault or (DRAINED if self.draining_until else STOPPED)
        self.membership.close(None if crashed else Goodbye(self.incarnation, reason))
        if self.membership.gpus is not None:  # not earlier: until here it detects a worker that is stuck
            self.membership.gpus.stop()
        self.close_links()
        self.channels.close()  # closes any socket that an exception left open, too
        if not crashed:
            self._connection_log.unless_supervised("%s: this worker has left", reason)
