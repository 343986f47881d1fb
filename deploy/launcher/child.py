"""One child of the launcher: a process, and every process that replaces it after a crash.

Owns the restarts and what is read from the child's pipes. Does not know what the others do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence

from common.config.coordinator import CoordinatorConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.net.keys import ClusterKeys
from common.platform.core_lease import Lending
from deploy.launcher import cores, process, status
from deploy.launcher.ipc import Launcher, serve
from deploy.launcher.screen import Screen

BACKOFF_S, MAX_BACKOFF_S, HEALTHY_S = 0.5, 30.0, 60.0
"""Before the first restart, before any, and how long a process must live for the count to begin anew."""


class ChildProcess:
    """One child process, and every process that replaces it.

    ``facts`` is what it said when it first became ready; before that, dying is a failed start. ``config`` may be
    replaced and is then the next process's. ``keys`` are those of its role, and of every process that replaces it.
    ``launcher`` is for a child that talks to it over IPC.
    """

    def __init__(
        self,
        label: str,
        config: WorkerConfig | CoordinatorConfig,
        share: cores.Share,
        screen: Screen,
        keys: ClusterKeys | None = None,
        launcher: Launcher | None = None,
        lending: Lending | None = None,
    ) -> None:
        self.label, self.config, self.share = label, config, share
        self._keys, self._lending = keys, lending
        self._cores: Sequence[int] | None = None
        self._at_once = False
        self._launcher = launcher
        self.facts: asyncio.Future[dict[str, status.Fact]] = asyncio.get_running_loop().create_future()
        self._leaving = asyncio.Event()
        self._screen = screen
        self._process: asyncio.subprocess.Process | None = None
        self._error: StartError | None = None
        self._hung: str | None = None
        self._ready = False
        self._ipc_tasks: set[asyncio.Task[None]] = set()
        self._last_lines: deque[str] = deque(maxlen=3)

    async def keep(self) -> None:
        """Keeps one process running until :meth:`leave`; StartError when the first one cannot start."""
        backoff_s = BACKOFF_S
        while True:
            started = time.monotonic()
            code = await self._run_once()
            if self._leaving.is_set():
                return
            if not self.facts.done():
                raise self._error or self._crash(code)
            if code == 0 and self._ready and not self._error:  # drained by name: no sign of trouble
                self._screen.fact(f"{self.label} has left as it was told; starting it again")
                continue
            if time.monotonic() - started > HEALTHY_S:
                backoff_s = BACKOFF_S
            ended = f"hangs ({self._hung}): killed" if self._hung else f"ended ({self._error or how_it_ended(code)})"
            self._screen.fact(f"{self.label} {ended}; starting it again in {backoff_s:g} s")
            if await self._left_within(backoff_s):
                return
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def leave(self) -> None:
        """From now on a process that ends is not replaced."""
        self._leaving.set()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it runs; there will be no other after it."""
        self.leave()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def replace(self, pid: int, why: str) -> None:
        """Kills the process, which hangs, if it still is ``pid``: another follows. What leaves has a limit anyway."""
        if self.running() and self.pid == pid and not self._leaving.is_set():
            assert self._process is not None
            self._hung = why
            self._process.kill()

    def bind(self, to: Sequence[int], *, at_once: bool) -> None:
        """This process, and those that follow it, run on these cores; for a child that does not pin itself. Those that
        follow interrupt whoever computes there, if ``at_once``."""
        self._cores, self._at_once = to, at_once
        self._pin()

    def _pin(self) -> None:
        if self._cores is not None and self._process is not None and self._process.returncode is None:
            cores.pin(self._process.pid, self._cores)

    def running(self) -> bool:
        """Whether there is a process now; one that has ended is none, although nobody may have been told of it yet."""
        if self._process is None or self._process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # whoever waits for it has heard, and is about to tell
            return False

    def serving(self) -> int | None:
        """The id of the process, if it has become ready and is to stay."""
        return self.pid if self._ready and self.running() and not self._leaving.is_set() else None

    async def close_ipc(self) -> None:
        """Gives up every change of the pools that this child has asked for."""
        for task in self._ipc_tasks:
            task.cancel()
        await asyncio.gather(*self._ipc_tasks, return_exceptions=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def _left_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._leaving.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _run_once(self) -> int:
        threads = str(self.share.threads)
        # read by OpenMP when torch is imported, which is before anybody can tell torch
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} if self.share.threads else {}
        self._error = self._hung = None
        self._ready = False
        with contextlib.ExitStack() as stack:
            ours = theirs = workers = None
            if self._launcher is not None:
                ours, theirs = socket.socketpair()
                stack.enter_context(theirs)
                workers = self._launcher.serving()
            self._process, reports = await process.start(
                self.label, self.config, environment, theirs, workers, self._lending, self._at_once, self._keys
            )
        if self._leaving.is_set():  # told to stop while it was being started
            self._process.kill()
        self._pin()
        assert self._process.stdout is not None
        readers = [asyncio.create_task(self._forward(self._process.stdout)), asyncio.create_task(self._follow(reports))]
        if ours is not None and self._launcher is not None:
            served = asyncio.create_task(serve(ours, self._launcher))  # a request outlives the process that passed it
            self._ipc_tasks.add(served)
            served.add_done_callback(self._ipc_tasks.discard)
        try:
            code = await self._process.wait()
            await asyncio.wait(readers, timeout=1.0)  # a grandchild may hold the pipes open
        finally:
            for reader in readers:
                reader.cancel()
        return code

    async def _forward(self, output: asyncio.StreamReader) -> None:
        async for raw in output:
            line = raw.decode(errors="replace").rstrip()
            self._last_lines.append(line)
            self._screen.log(line)

    async def _follow(self, reports: asyncio.StreamReader) -> None:
        async for line in reports:
            if (report := status.read(line)) is None:
                continue
            if report.error is not None:
                self._error = report.error.error()
            self._ready |= report.ready is not None
            if report.ready is not None and self.facts.done():
                self._screen.fact(f"{self.label} is back")
            elif report.ready is not None:
                self.facts.set_result(report.ready)
            if not self.facts.done() or report.ready is not None:
                self._screen.progress(self.label, report)

    def _crash(self, code: int) -> StartError:
        last = next((line for line in reversed(self._last_lines) if line.strip()), "it said nothing")
        return StartError(
            f"{self.label} died while starting ({how_it_ended(code)})",
            last[:300],
            "see its lines above, or add --debug",
        )


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, by somebody or for want of memory" if name == "SIGKILL" else name
