"""Rank 0's side of a tensor-parallel worker: starts the other ranks as child processes, and watches them.

    STARTING ── loaded ──► SERVING ── rank 0 leaves ──► all exit
        └── a rank dies, hangs or reports an error ──► the others are killed, and this process ends with the reason

The watch is a thread of its own, since the main thread may wait inside a step for the very rank that died. A rank never
outlives rank 0: the kernel kills it (PR_SET_PDEATHSIG), and the closed sockets end it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.platform.threads import answer
from common.platform.wiring import Wiring
from deploy.launcher.child import how_it_ended
from deploy.launcher.cores import CoreShare
from deploy.launcher.status import Reason
from deploy.ranks.channel import LeaderChannel

if TYPE_CHECKING:
    from common.model.collective import Collective
    from common.platform.device import Device

log = logging.getLogger("tandem.ranks")

PING_S, HUNG_S, STARVED_S = 0.25, 1.5, 15.0
"""Interval between pings; the silence after which a rank hangs; the same for one that wants to run and gets no core."""
_LEAVE_S, _LAST_WORDS_S = 2.0, 0.3
PING, PONG, LOADED = b"?", b"!", b"+"
_MOST_BYTES = 4096


class RankLaunch(msgspec.Struct, frozen=True):
    """What another rank reads from standard input. ``steps``, ``watch``, ``memory`` and ``signals`` (from, to, number)
    are descriptors that it inherits. ``device``: where it computes, as ``--device`` names it."""

    config: dict[str, Any]
    rank: int
    size: int
    cores: tuple[int, ...] | None
    threads: int
    batch_hint: int
    steps: int
    watch: int
    memory: int
    signals: list[tuple[int, int, int]]
    device: str


@dataclasses.dataclass
class _Rank:
    """Another rank, as the watch sees it. ``asked_at``: the time of the first ping without an answer, 0 if all are
    answered. ``loaded``: whether it has loaded its share; from then on it must answer pings."""

    number: int
    process: subprocess.Popen[bytes]
    watch: socket.socket
    asked_at: float = 0.0
    loaded: bool = False


class RankGroup:
    """The other ranks of this process's worker, for the duration of a ``with`` block.

    If a rank fails, all others are killed, then ``end`` is called with the reason from the watch's thread; a worker's
    ``end`` does not return. ``gpus`` are the GPUs of all ranks, rank 0's first; without them all compute on the CPU.
    ``channel`` and :meth:`connect` are for rank 0's engine.
    """

    def __init__(
        self,
        config: WorkerConfig,
        shares: Sequence[CoreShare],
        batch_hint: int,
        end: Callable[[StartError], None],
        gpus: Sequence[str] = (),
    ) -> None:
        self.size = len(shares)
        self._devices = gpus or ["cpu"] * self.size
        self._end, self._closing, self._failed = end, threading.Event(), threading.Event()
        self._ranks: list[_Rank] = []
        self._stack = ExitStack()
        with ExitStack() as undo:
            undo.push(self._stack)
            self.wiring = Wiring.create_store() if gpus else Wiring.create(self.size)
            self._stack.callback(self.wiring.close)
            undo.callback(self._kill)
            steps = [self._start(config, rank, share, batch_hint) for rank, share in enumerate(shares) if rank]
            undo.pop_all()
        self.channel = LeaderChannel(steps)
        self._waker, self._woken = socket.socketpair()
        self._stack.enter_context(self._waker)
        self._stack.enter_context(self._woken)
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def _start(self, config: WorkerConfig, rank: int, share: CoreShare, batch_hint: int) -> socket.socket:
        """Start one rank; return our end of its socket for steps. Must be called from the main thread, because the
        kernel kills the rank when the thread that started it ends."""
        ours, steps = socket.socketpair()
        self._stack.enter_context(ours)
        watching, watched = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.enter_context(watching)
        watching.setblocking(False)
        signals = [(one, other, number) for (one, other), number in self.wiring.signals.items()]
        launch = RankLaunch(
            dataclasses.asdict(config), rank, self.size, share.cores, share.threads, batch_hint,
            steps.fileno(), watched.fileno(), self.wiring.memory, signals, self._devices[rank],
        )  # fmt: skip
        label = f"{config.name or config.role}/{rank}"
        with steps, watched:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.ranks.follower", label, str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=(steps.fileno(), watched.fileno(), *self.wiring.descriptors),
                env={**os.environ, "OMP_NUM_THREADS": str(share.threads), "MKL_NUM_THREADS": str(share.threads)},
            )
        self._ranks.append(_Rank(rank, process, watching))
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(msgspec.json.encode(launch))
        return ours

    def connect(self, machine: Device) -> Collective:
        """Return rank 0's end of the exchange between the ranks, on ``machine``; it is closed with the group. Imports
        torch."""
        from common.model.process_group import connect

        collective = connect(0, self.size, self.wiring, machine)
        self._stack.callback(collective.close)
        return collective

    def report_failure(self) -> None:
        """Give the watch time to report that another rank has failed, if one has: this process then ends."""
        if self._failed.wait(_LAST_WORDS_S):
            self._thread.join(_LEAVE_S)

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 and up."""
        return [rank.process.pid for rank in self._ranks]

    # -- the watch ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        answer()
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank in self._ranks:
                selector.register(rank.watch, selectors.EVENT_READ, rank)
            due = time.monotonic()
            while not self._closing.is_set():
                events = selector.select(max(0.0, due - time.monotonic()))
                errors = [self._read(key.data) for key, _ in events if isinstance(key.data, _Rank)]
                if (now := time.monotonic()) >= due:
                    errors += [self._ask(rank, now, stood_still=now - due > PING_S) for rank in self._ranks]
                    due = now + PING_S
                for error in errors:
                    if error is not None:
                        self._fail(error)
                        return

    def _read(self, rank: _Rank) -> StartError | None:
        """Read a message of ``rank``; return the error if it reports one or has died, else None."""
        try:
            said = rank.watch.recv(_MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        if not said:
            return self._died(rank)
        rank.asked_at = 0.0
        rank.loaded |= said == LOADED
        if said.startswith(b"{"):
            return msgspec.json.decode(said, type=Reason).error()
        return None

    def _died(self, rank: _Rank) -> StartError:
        try:
            ended = how_it_ended(rank.process.wait(1.0))
        except subprocess.TimeoutExpired:
            ended = "it has closed its connection"
        return self._error(rank, "has died", ended)

    def _ask(self, rank: _Rank, now: float, *, stood_still: bool) -> StartError | None:
        """Ping ``rank``; return an error if it has not answered for too long. Time in which this process itself stood
        still does not count."""
        if stood_still:
            rank.asked_at = 0.0
        silent_s = now - rank.asked_at if rank.asked_at and rank.loaded else 0.0
        if silent_s > HUNG_S and (silent_s > STARVED_S or not _wants_to_run(rank.process.pid)):
            return self._error(rank, "hangs", f"it has not answered for {silent_s:.1f} s")
        try:
            rank.watch.send(PING)
        except OSError:  # its buffer is full, or it has died, which the next event shows
            pass
        rank.asked_at = rank.asked_at or now
        return None

    def _error(self, rank: _Rank, what: str, why: str) -> StartError:
        who = f"rank {rank.number} of {self.size} (process {rank.process.pid})"
        return StartError(f"{who} {what}", why, "the worker ends with all its ranks, since none can compute without it")

    def _fail(self, error: StartError) -> None:
        self._failed.set()
        self._kill()
        self._end(error)

    # -- the end ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let the other ranks end, and kill those that do not. After an exception, first give the watch time to report
        the failure of another rank, which may have caused it."""
        if error is not None:
            self.report_failure()
        self._closing.set()
        self._waker.send(b"\0")
        self._thread.join(_LEAVE_S)
        if error is None:
            self.channel.close()
            deadline = time.monotonic() + _LEAVE_S
            for rank in self._ranks:
                try:
                    rank.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.warning("rank %d does not leave: killing it", rank.number)
        self._kill()
        self._stack.close()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()


def _wants_to_run(pid: int) -> bool:
    """Return whether a thread of the process waits for a core or for a disk: it is late, but does not hang."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "RD":
                    return True
    except OSError:  # it has just ended
        pass
    return False
