"""One child of the launcher: a process and its replacements after crashes.

Owns restarts with backoff and the child's output and status pipes. Must not know the other children.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from common.config.coordinator import CoordinatorConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.core.ids import WorkerName
from common.net.keys import ClusterKeys
from common.platform import gpu
from common.platform.core_lease import Lending
from deploy.launcher import cores, process, status
from deploy.launcher.hosts import Running, Start
from deploy.launcher.ipc import AbsenceReport, Launcher, serve
from deploy.launcher.screen import Screen

BACKOFF_S, MAX_BACKOFF_S, HEALTHY_S = 0.5, 30.0, 60.0
"""Delay before the first restart, its upper bound, and the lifetime after which the delay is reset, in seconds."""


class ChildProcess:
    """One child process and its replacements.

    ``facts`` resolves with the first "ready" report. A child that exits before that has failed to start; later it is
    restarted. ``config`` may be replaced; the next process gets the new one. ``keys``: cluster keys of its role, the
    same for all replacements. ``launcher``: serves the IPC requests of the child; for the coordinator only.
    ``on_absence``: called when the process has ended and is to be restarted, and when that is given up.
    ``visible_gpus``: CUDA_VISIBLE_DEVICES of the process and its replacements, as UUIDs; "" for the launcher's own.
    ``start``: starts a process elsewhere than as a child of this process.
    """

    def __init__(
        self,
        label: str,
        config: WorkerConfig | CoordinatorConfig,
        share: cores.CoreShare,
        screen: Screen,
        keys: ClusterKeys | None = None,
        launcher: Launcher | None = None,
        lending: Lending | None = None,
        on_absence: Callable[[AbsenceReport], None] | None = None,
        visible_gpus: str = "",
        start: Start | None = None,
    ) -> None:
        self.label, self.config, self.share, self.visible_gpus = label, config, share, visible_gpus
        self._keys, self._lending, self._start = keys, lending, start
        self._cores: Sequence[int] | None = None
        self._at_once = False
        self._launcher, self._on_absence = launcher, on_absence
        self.facts: asyncio.Future[dict[str, status.Fact]] = asyncio.get_running_loop().create_future()
        self._leaving = asyncio.Event()
        self._screen = screen
        self._process: Running | None = None
        self._error: StartError | None = None
        self._hung: str | None = None
        self._ready = False
        self._ipc_tasks: set[asyncio.Task[None]] = set()
        self._last_lines: deque[str] = deque(maxlen=3)

    async def keep(self) -> None:
        """Keep one process running until :meth:`leave`. Raises StartError if the first one cannot start."""
        backoff_s = BACKOFF_S
        reported = False
        while True:
            started = time.monotonic()
            code = await self._run_once()
            if self._leaving.is_set():
                if reported:  # it may not have joined since
                    self._report("", 0.0)
                return
            if not self.facts.done():
                raise self._error or self._crash(code)
            if code == 0 and self._ready and not self._error:  # drained through the admin API: restart without backoff
                self._screen.fact(f"{self.label} has drained; restarting it")
                self._report("drained", 0.0)
                reported = True
                continue
            if time.monotonic() - started > HEALTHY_S:
                backoff_s = BACKOFF_S
            ended = f"hangs ({self._hung}): killed" if self._hung else f"exited ({self._error or how_it_ended(code)})"
            self._screen.fact(f"{self.label} {ended}; restarting it in {backoff_s:g} s")
            self._report(ended, backoff_s)
            reported = True
            if await self._left_within(backoff_s):
                self._report("", 0.0)
                return
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _report(self, why: str, restart_in_s: float) -> None:
        if self._on_absence is not None:
            self._on_absence(AbsenceReport(WorkerName(self.label), why, restart_in_s))

    def leave(self) -> None:
        """Stop replacing the process when it ends."""
        self._leaving.set()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs, and do not replace it when it ends."""
        self.leave()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def replace(self, pid: int, why: str) -> None:
        """Kill the process because it hangs (``why``); :meth:`keep` starts another. Does nothing if the current process
        is not ``pid``, or if it is leaving, for which there is a time limit already."""
        if self.running() and self.pid == pid and not self._leaving.is_set():
            assert self._process is not None
            self._hung = why
            self._process.kill()

    def bind(self, to: Sequence[int], *, at_once: bool) -> None:
        """Pin this process and its replacements to the cores ``to``. For a child that does not pin itself. ``at_once``:
        replacements use real-time threads, which preempt computations on these cores."""
        self._cores, self._at_once = to, at_once
        self._pin()

    def _pin(self) -> None:
        if self._cores is not None and self._process is not None and self._process.returncode is None:
            cores.pin(self._process.pid, self._cores)

    def running(self) -> bool:
        """Return whether the process is alive. Checks for an exit that asyncio has not reported yet."""
        if self._process is None or self._process.returncode is not None:
            return False
        if self._start is not None:  # another machine's
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # asyncio's watcher has reaped it and is about to report it
            return False

    def serving(self) -> int | None:
        """Return the process id if the process is ready and not leaving, else None."""
        return self.pid if self._ready and self.running() and not self._leaving.is_set() else None

    async def close_ipc(self) -> None:
        """Cancel all scale requests that this child has sent."""
        for task in self._ipc_tasks:
            task.cancel()
        await asyncio.gather(*self._ipc_tasks, return_exceptions=True)

    @property
    def pid(self) -> int | None:
        """Process id of the current or the last process; None before the first one."""
        return self._process.pid if self._process is not None else None

    async def _left_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._leaving.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _run_once(self) -> int:
        threads = str(self.share.threads)
        # OpenMP reads these when torch is imported, before torch.set_num_threads can be called
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} if self.share.threads else {}
        if self.visible_gpus:
            environment[gpu.VISIBLE] = self.visible_gpus
        self._error = self._hung = None
        self._ready = False
        with contextlib.ExitStack() as stack:
            ours = theirs = workers = None
            if self._launcher is not None:
                ours, theirs = socket.socketpair()
                stack.enter_context(theirs)
                workers = self._launcher.serving()
            spec = process.ChildSpec(
                self.label, self.config, environment, theirs, workers, self._lending, self._at_once, self._keys
            )
            self._process, reports = await (self._start or process.start)(spec)
        if self._leaving.is_set():  # asked to leave while the process was being started
            self._process.kill()
        self._pin()
        assert self._process.stdout is not None
        readers = [asyncio.create_task(self._forward(self._process.stdout)), asyncio.create_task(self._follow(reports))]
        if ours is not None and self._launcher is not None:
            served = asyncio.create_task(serve(ours, self._launcher))  # outlives the process: a request goes on
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
        last = next((line for line in reversed(self._last_lines) if line.strip()), "it printed nothing")
        return StartError(
            f"{self.label} died while starting ({how_it_ended(code)})",
            last[:300],
            "see its log lines above, or add --debug",
        )


def how_it_ended(code: int) -> str:
    """Return an exit code or the signal that ended the process as text."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, from outside or for lack of memory" if name == "SIGKILL" else name
