"""The main loop of every worker, whatever its role.

One thread does all work that touches the engine, in turns: receive messages, move KV, run one step, report. Nothing
else competes for the interpreter lock while a step runs: Python code in a side thread would delay a step by several
times its own duration. When there is nothing to compute, the loop sleeps in ``poll`` until a socket, a signal or the
next timer wakes it.

    JOINING ── Welcome ──► READY ── Drain or SIGTERM ──► DRAINING ── empty, or out of time ──► GONE
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, KeysView
from dataclasses import dataclass
from typing import Any, Protocol

from common.core.errors import OutOfBlocks, StartError, WireError
from common.core.ids import MAX_ATTEMPT, TransferId, max_token, transfer_holder, unpack_transfers
from common.core.request import Request
from common.core.sequence import Batch, Sequence, StepResult
from common.engine.launched import Launch
from common.engine.scheduler import Planner, Sampled
from common.kv.cache import BlockCopy, KvCache
from common.kv.layout import KvLayout
from common.kv.storage.cuda import Memory
from common.kv.table import BlockTable
from common.net.messages import (
    DRAINED,
    MAX_HELD,
    MAX_KEYS,
    MAX_TEXT,
    STOPPED,
    Cached,
    Drain,
    Goodbye,
    Hello,
    Lease,
    LeaseAck,
    NameTaken,
    Rejected,
    Rejoin,
    RequestFailed,
    Welcome,
)
from common.net.sockets import Channels
from common.platform.core_lease import CoreLease
from common.platform.gpu_health import unusable
from common.platform.gpu_monitor import GpuMonitor
from common.worker.membership import Membership, Snapshot
from common.worker.overlap import Overlap
from common.worker.step_times import StepTimeEstimator

log = logging.getLogger("tandem.worker")

IDLE_S = 0.25
"""Longest sleep while no request is held."""
TIMER_S = 0.05
"""Longest sleep while requests are held but nothing can be computed."""
POPULATED_BYTES = 1 << 20
"""Bytes to pre-fault per idle turn. This takes about half a millisecond, and may delay a message by as much."""
SWEEP_S = 0.1
"""Interval between checks of the lease, the connection and deadlines."""
PUBLISH_S = 0.05
"""Interval at which a busy worker updates the snapshot that heartbeats report, and announces cached prefixes.
Announcing after every step would send a message per step, since some stream has nearly always just filled a block."""
TRIAL_S = 5.0
"""Deadline of a link trial. One that takes longer will not end: the peer was short of blocks, or is gone."""
LONELY_S = 5.0
"""Interval between log lines of a worker that has not joined a coordinator."""
_DEVICE_FAILED = b"\0"
"""The byte that wakes the loop when the device failed; signals, whose bytes arrive on the same socket, start at 1."""


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

    launch: Launch | None
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
    """Planner, cache and membership around one engine; a subclass adds what its role does with messages and tokens."""

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
        self.cores: CoreLease | None = None
        """The lease through which workers of this machine lend each other cores while idle; None if they do not."""
        self._populated = 0
        """Bytes of the pool, from its start, that have been pre-faulted."""
        self.counters: dict[str, float] = {}
        self.draining_until: float | None = None
        self._trials: dict[TransferId, BlockTable] = {}
        self._deadlines: dict[TransferId, float] = {}
        self._swept_at = self._published_at = 0.0
        self._lonely_since = self.clock()
        self._logged_refusals: set[str] = set()
        self._logged_lost = False
        self._lease_s = self._leased_until = math.inf
        self._unlisted: set[TransferId] = set()
        self._stopped = False
        self._device_fault = ""
        self._waker: socket.socket | None = None
        self._overlap = Overlap(self, engine.launch) if self.overlaps and engine.launch is not None else None
        self._advance = self._plan_and_run if self._overlap is None else self._overlap.advance
        self.open_links()
        self.membership = Membership(self.channels, settings.coordinator, self.introduce(hello))

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
    def bad_transfer_messages(self) -> int:
        """Return how many invalid messages and frames of hand-offs were dropped."""

    def stale_frames(self) -> int:
        """Return how many frames arrived after the end of their hand-off: they were in flight at that moment."""
        return 0

    @abc.abstractmethod
    def cut_off_peers(self) -> int:
        """Return how many hand-off peers are ignored for good, because they sent invalid messages."""

    @abc.abstractmethod
    def holdings(self) -> KeysView[TransferId]:
        """Return every (request, attempt) held here, in any state: requests in order of arrival, then link trials."""

    # -- the loop -----------------------------------------------------------------------------------------------------

    def watch_gpus(self, monitor: GpuMonitor) -> None:
        """Send the readings of ``monitor`` with heartbeats, and leave when it reports a fault. The worker stops the
        monitor when it closes. Call this before :meth:`run`."""
        self.membership.gpus = monitor
        monitor.on_fault = self.device_failed
        if monitor.fault:
            self.device_failed(monitor.fault)

    def device_failed(self, why: str) -> None:
        """Make the loop end after its current turn, and :meth:`run` raise, because the device cannot be used any more.
        ``why`` becomes the reason of the Goodbye. May be called from any thread, also before :meth:`run`."""
        self._device_fault = why
        if self._waker is not None:
            self._waker.send(_DEVICE_FAILED)

    def run(self) -> None:
        """Serve until drained or stopped, then close everything. Raises StartError if the device failed."""
        with self._signals() as waker:
            try:
                self._publish()  # heartbeats start in the first turn: the first must not report an empty pool
                while not self.finished():
                    self._wait(self.turn(), waker)
            except BaseException:
                self.close(crashed=True)
                raise
            self.close()
        if self._device_fault:
            raise unusable(self._device_fault)

    def turn(self) -> float:
        """Run one turn of the loop: messages, hand-offs, one step. Return how many seconds the loop may then sleep."""
        self.membership.stood_still_before_s = self.membership.stood_still_s()  # set first: heartbeats read it last
        now = self.membership.turning_since = self.clock()
        for message in self.membership.receive():
            self._dispatch(message, now)
        self.move_kv(self.clock())
        self._reap()
        self._sweep(self.clock())
        stepped = self._advance()
        done = self.clock()
        if not stepped or done - self._published_at >= PUBLISH_S:
            self._published_at = done
            self._publish()
        self.membership.turning_since = None
        if stepped or self.more_to_move():
            return 0.0
        if self.holdings():
            return self.rest_s()
        return 0.0 if self._populate() else IDLE_S

    def _populate(self) -> bool:
        """Pre-fault some memory of never-used blocks; return False if enough is ready."""
        size = self.engine.layout.block_bytes
        wanted = min(self.cache.pool.peak * size + self.settings.ahead_bytes, self.engine.memory.blocks * size)
        if not self.settings.ahead_bytes or self._populated >= wanted:
            return False
        try:
            self.engine.memory.populate(self._populated, last := min(self._populated + POPULATED_BYTES, wanted))
        except OSError as error:
            log.debug("KV blocks cannot be pre-faulted: %s", error)
            last = self.engine.memory.blocks * size
        self._populated = last
        return True

    def _wait(self, seconds: float, waker: socket.socket) -> None:
        if seconds and self.cores is not None:
            self.cores.lend()
        ready = self.channels.poll(seconds)
        if seconds and self.cores is not None:
            self.cores.take_back()
        if waker.fileno() in ready:
            for number in waker.recv(64):  # one byte per signal, its number
                if number == _DEVICE_FAILED[0]:
                    self._stopped = True
                else:
                    self._stop_asked()

    def _dispatch(self, message: Any, now: float) -> None:
        match message:
            case Welcome(lease_ms=lease_ms):
                self.configure(message)
                self._lease_s = lease_ms / 1000
                self._leased_until = now + self._lease_s
                self.cache.prefix.announce_all()
                self._logged_refusals.clear()
                self._log_unless_supervised("joined the coordinator at %s", self.settings.coordinator)
            case Rejected(reason=reason):
                raise StartError(
                    "the coordinator refuses this worker", reason, "use the model and options of the other workers"
                )
            case NameTaken():
                self._drop_all()
            case Rejoin():
                why = "it was restarted, or has given this worker up and placed its requests elsewhere"
                dropped = len(self.holdings())
                log.warning("the coordinator asks this worker to join again: %s (%d requests dropped)", why, dropped)
                self._drop_all()
            case Drain(timeout_ms=timeout_ms):
                self.drain(timeout_ms / 1000)
            case _ if not self.membership.joined:  # hold nothing before the duration of a lease is known
                log.warning("dropped a %s message: it arrived before Welcome", type(message).__name__)
            case Lease(live=live):
                self._renew(live, now)
                self.membership.send(LeaseAck(self.incarnation))
            case _:
                try:
                    self.handle(message, now)
                except WireError as error:  # drop only the message: the coordinator retries or fails its request
                    log.warning("dropped a %s message: %s", type(message).__name__, str(error))
                    self.membership.bad_messages += 1

    def drain(self, timeout_s: float) -> None:
        """Accept no new requests; leave when those held have finished, at the latest after ``timeout_s``."""
        if self.draining_until is None:
            for transfer in list(self._trials):
                self.abort(transfer)
            self.draining_until = self.clock() + timeout_s
            log.info("draining for at most %g s", timeout_s)

    def finished(self) -> bool:
        """Return whether the loop is to end: drained, out of time, or stopped by a signal."""
        if self._stopped:
            return True
        if self.draining_until is None:
            return False
        return not self.holdings() or self.clock() > self.draining_until

    # -- requests -----------------------------------------------------------------------------------------------------

    def accept(self, request: Request, attempt: int, now: float, tokens: int) -> bool:
        """Return whether this worker takes the request. If it does not, the reason has been sent to the coordinator,
        unless the message is a repeated one. ``tokens`` is the maximum length of one choice, prompt included. Raises
        WireError if the attempt or a token id is out of range, which no coordinator sends."""
        transfer = TransferId(request.id, attempt)
        if attempt > MAX_ATTEMPT:
            raise WireError(f"attempt {attempt} is out of range")
        if (most := max_token(request.prompt, *request.emitted)) >= self.engine.vocab_size:
            raise WireError(f"token {most} is outside the vocabulary of {self.engine.vocab_size}")
        if transfer in self._deadlines:
            return False  # a repeated message
        if self.draining_until is not None:
            self.fail(transfer, "draining", "this worker is leaving", retriable=True)
        elif len(self._deadlines) >= MAX_HELD:
            self.fail(transfer, "no_memory", "heartbeats cannot report more requests", retriable=True)
        elif self.engine.layout.blocks_for(tokens) > self.engine.memory.blocks or tokens > self.engine.max_model_len:
            room = min(self.engine.max_model_len, self.engine.memory.blocks * self.engine.layout.block_size)
            self.fail(transfer, "too_long", f"{tokens} tokens, this worker holds at most {room}", retriable=False)
        else:
            self._deadlines[transfer] = now + request.deadline_ms / 1000
            return True
        return False

    def sequences(self, transfer: TransferId) -> list[Sequence]:
        """Return the sequences of (request, attempt) that are in the planner."""
        return [sequence for sequence in self.planner.sequences() if sequence.id.transfer == transfer]

    def over(self, transfer: TransferId) -> None:
        """Forget the deadline of (request, attempt), once nothing of it is held here."""
        self._deadlines.pop(transfer, None)

    def fail(self, transfer: TransferId, code: str, detail: str, *, retriable: bool) -> None:
        """Abort (request, attempt) and report it as failed; ``code`` is one of :data:`common.net.messages.FAILURES`."""
        self.abort(transfer)
        self.membership.send(RequestFailed(transfer.request, transfer.attempt, code, detail[:MAX_TEXT], retriable))

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter that heartbeats report."""
        self.counters[name] = self.counters.get(name, 0) + by

    def _sweep(self, now: float) -> None:
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        self._expire(now)
        self.membership.reconnect()
        self._complain(now)
        for transfer in [each for each, deadline in self._deadlines.items() if deadline < now]:
            if transfer in self._trials:
                self.abort(transfer)
                continue
            self.fail(transfer, "deadline", "the request's deadline has passed", retriable=False)

    def _complain(self, now: float) -> None:
        """Log why this worker is without a coordinator: at once for a new reason of refusal, and again every LONELY_S.
        One refused connection can show several reasons, since its two ends do not always see the same one first."""
        refusal = self.membership.refusal
        logged = not refusal or refusal in self._logged_refusals
        silent = now > self._leased_until
        lost = self.membership.joined and not self.membership.connected
        if lost and not self._logged_lost:
            self._log_unless_supervised(
                "the connection to the coordinator at %s is lost: dialling again", self.settings.coordinator
            )
        self._logged_lost = lost
        if self.membership.joined and not (refusal or silent):
            return
        if logged and now - self._lonely_since <= LONELY_S:
            return
        self._lonely_since = now
        if refusal:
            self._logged_refusals.add(refusal)
            log.warning(
                "the coordinator at %s does not let this worker in: %s (trying again)",
                self.settings.coordinator,
                refusal,
            )
        elif silent:
            words = "the coordinator at %s has been silent for %.1f s: waiting for it"
            log.warning(words, self.settings.coordinator, now - self._leased_until + self._lease_s)
        elif self._logged_refusals:
            log.warning(
                "the coordinator at %s has not let this worker in so far: trying again", self.settings.coordinator
            )
        else:
            log.warning("still waiting for the coordinator at %s: is it started?", self.settings.coordinator)

    def _renew(self, live: bytes, now: float) -> None:
        """Renew the lease. Messages arrive in order, so a request held here but not in ``live`` was given up, and its
        Abort was lost."""
        try:
            listed = set(unpack_transfers(live))
        except ValueError as error:
            log.warning("dropped a Lease message: %s", str(error))
            self.membership.bad_messages += 1
            return
        self._leased_until = now + self._lease_s
        self._unlisted = self.holdings() - self._trials.keys() - listed

    def _reap(self) -> None:
        """Drop the requests that the last Lease did not list. Called after :meth:`move_kv`, so that a hand-off which
        ends in this turn anyway does not count as a lost Abort."""
        if not self._unlisted:
            return
        unlisted, self._unlisted = self._unlisted, set()
        for transfer in [each for each in self.holdings() if each in unlisted]:
            log.warning("dropped request %s: the coordinator no longer lists it", transfer)
            self.abort(transfer)
            self.count("reaped_requests")

    def _expire(self, now: float) -> None:
        """Drop everything once the lease has expired: without its coordinator a worker holds nothing."""
        if now > self._leased_until and (held := self.holdings()):
            log.warning("the coordinator has been silent for %g s: dropping %d requests", self._lease_s, len(held))
            self.count("reaped_requests", len(held))
            self._drop_all()

    def _drop_all(self) -> None:
        for transfer in self.holdings():
            self.abort(transfer)

    # -- link trials --------------------------------------------------------------------------------------------------

    def open_trial(self, transfer: TransferId, tokens: int, now: float) -> BlockTable | None:
        """Take blocks, with arbitrary contents, for a hand-off that measures a link. None for a repeated message, while
        draining, or when blocks are short."""
        if transfer in self.holdings() or self.draining_until is not None or not tokens:
            return None
        table = self.cache.open(transfer_holder(transfer), [], "")
        try:
            self.cache.grow(table, tokens)
        except OutOfBlocks:
            self.cache.close(table)
            return None
        self._trials[transfer] = table
        self._deadlines[transfer] = now + TRIAL_S
        return table

    def close_trial(self, transfer: TransferId) -> bool:
        """Return the blocks of a link trial to the pool; False if there is no such trial."""
        table = self._trials.pop(transfer, None)
        if table is None:
            return False
        self.cache.close(table)
        self.over(transfer)
        return True

    # -- a step -------------------------------------------------------------------------------------------------------

    def _plan_and_run(self) -> bool:
        """Run one step if there is anything to compute; return whether there was."""
        batch = self.plan()
        if batch is not None:
            self.run_step(batch)
        return batch is not None

    def run_step(self, batch: Batch) -> None:
        """Compute ``batch`` and take in its tokens."""
        now, length, attended = self.clock(), batch.length, batch.attended
        self.before_step(batch, now)
        self.membership.expected_s = self.step_times.expect(length, attended)
        stood_still_s, helped_s = -self.membership.stood_still_s(), -self._helped_s()
        result = self.engine.step(batch)
        self.membership.expected_s = 0.0
        stood_still_s += self.membership.stood_still_s()  # time in which the process was stopped is not compute time
        helped_s += self._helped_s()  # count what borrowed cores saved: the next step may have none
        self.step_times.took(length, attended, max(0.0, self.clock() - now - stood_still_s + helped_s))
        self.take_in(batch, result)

    def take_in(self, batch: Batch, result: StepResult) -> None:
        """Give the tokens of a finished step to their sequences, and fail the requests that failed in it."""
        samples = self.planner.complete(batch, result)
        for index, why in result.errors.items():
            sequence = batch.segments[index].sequence
            if sequence.id in self.planner:  # a sibling's failure may have ended it already
                log.error("a request failed in the engine: %s", why)
                self.fail(sequence.id.transfer, "engine_error", "the model failed on this request", retriable=True)
        if result.errors:
            samples = [sample for sample in samples if sample.sequence.id in self.planner]
        self.sampled(batch, samples, self.clock())
        self.count("steps")
        self.count("step_seconds", result.seconds)
        self.count("step_tokens", batch.length)

    def _helped_s(self) -> float:
        """Return how many seconds longer all steps so far would have taken without borrowed cores."""
        return 0.0 if self.cores is None else self.cores.borrowed_s() / max(1, len(self.cores.own))

    # -- reporting ----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        counts = self.cache.pool.counts
        self.counters["prefix_cache_queries"] = self.planner.queried_tokens
        self.counters["prefix_cache_hits"] = self.planner.hit_tokens
        self.counters["num_preemptions"] = self.planner.preemptions
        self.counters["bad_messages"] = self.membership.bad_messages + self.bad_transfer_messages()
        self.counters["stale_frames"] = self.stale_frames()
        self.counters["cut_off_peers"] = self.cut_off_peers()
        self.counters["leaked_blocks"] = self.cache.strays()
        if self.cores is not None:
            self.counters["borrowed_core_seconds"] = self.cores.borrowed_s()
        self.membership.snapshot = Snapshot(
            live=b"".join({transfer.request: None for transfer in self.holdings()}),
            acted_on=self.membership.acted_on,
            free=counts.free,
            cached=counts.cached,
            held=counts.held,
            running=self.planner.running,
            waiting=self.waiting(),
            waiting_tokens=self.planner.waiting_tokens,
            draining=self.draining_until is not None,
            counters=dict(self.counters),
            longest_step_s=self.step_times.longest,
            resting=b"".join(self.planner.resting()),
        )
        added, removed = self.cache.prefix.take_changes()
        for first in range(0, max(len(added), len(removed)), MAX_KEYS):
            part = slice(first, first + MAX_KEYS)
            self.membership.send(Cached(b"".join(added[part]), b"".join(removed[part])))

    def waiting(self) -> int:
        """Return how many requests have not started."""
        return self.planner.waiting

    # -- signals and shutdown -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Handle SIGTERM and Ctrl-C: the first drains, the second stops. Yield a socket that gets a byte for each.

        A signal only wakes the poll and is acted on there, since a handler may run in the middle of anything. Under a
        launcher SIGINT is already ignored and stays ignored: a terminal sends it to all processes, and only the
        launcher knows in which order to stop them. A second SIGTERM does not stop a supervised worker either: the first
        may have been sent to every process of the service, and the launcher then sends its own.
        """
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self.channels.register(reader.fileno())
        alone = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        numbers = (signal.SIGTERM, signal.SIGINT) if alone else (signal.SIGTERM,)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._waker = writer
        if self._device_fault:  # reported before there was a waker
            writer.send(_DEVICE_FAILED)
        try:
            yield reader
        finally:
            self._waker = None
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()

    def _stop_asked(self) -> None:
        if self.draining_until is not None and not self.settings.supervised:
            self._stopped = True
        self.drain(self.settings.drain_timeout_s)

    def close(self, *, crashed: bool = False) -> None:
        """Drop everything, send Goodbye, and leave no socket or thread behind. After a crash no Goodbye is sent: it
        would clear this worker's requests of the suspicion that one of them caused the crash."""
        self._drop_all()
        if self._overlap is not None and not (crashed or self._device_fault):  # steps on a lost GPU never end
            self._overlap.settle()
        reason = self._device_fault or (DRAINED if self.draining_until else STOPPED)
        self.membership.close(None if crashed else Goodbye(self.incarnation, reason))
        if self.membership.gpus is not None:  # not earlier: until here it detects a worker that is stuck
            self.membership.gpus.stop()
        self.close_links()
        self.channels.close()  # closes any socket that an exception left open, too
        if not crashed:
            self._log_unless_supervised("%s: this worker has left", reason)

    def _log_unless_supervised(self, text: str, *arguments: Any) -> None:
        """Log at INFO; under a launcher at DEBUG, since the coordinator's log beside this one reports the same."""
        log.log(logging.DEBUG if self.settings.supervised else logging.INFO, text, *arguments)
