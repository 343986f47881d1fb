"""Requests of the coordinator to its launcher, and the replacement of a process that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable

import pytest

from common.config.worker import WorkerConfig
from common.core.errors import RequestError, StartError
from common.core.ids import WorkerName
from deploy.launcher import cores, process
from deploy.launcher.child import ChildProcess
from deploy.launcher.ipc import AbsenceReport, Pools, SupervisorIPC, serve
from deploy.launcher.scaling import leaves_first
from deploy.launcher.screen import Lines


class RecordingLauncher:
    """A launcher that records the requests it gets."""

    def __init__(self) -> None:
        self.replaced: asyncio.Queue[tuple[str, int, str]] = asyncio.Queue()
        self.placed: asyncio.Queue[bool] = asyncio.Queue()
        self.followers: set[Callable[[AbsenceReport], None]] = set()

    async def scale(self, prefill: int | None, decode: int | None) -> Pools:
        if not prefill or not decode:
            raise StartError("no", "one worker is needed", "keep one")
        return prefill, decode

    def replace(self, name: str, pid: int, why: str) -> None:
        self.replaced.put_nowait((name, pid, why))

    def place_coordinator(self, deep: bool) -> None:
        self.placed.put_nowait(deep)

    def serving(self) -> dict[WorkerName, int]:
        return {}


async def test_ipc_carries_scale_requests_replacements_and_pressure() -> None:
    launcher, (ours, theirs) = RecordingLauncher(), socket.socketpair()
    serving, ipc = asyncio.create_task(serve(ours, launcher)), SupervisorIPC(theirs.dup().detach())
    ipc.replace("decode-0", 7, "silent for 10 s")
    pools, refused = await asyncio.gather(ipc.scale(1, 2), ipc.scale(0, 1), return_exceptions=True)
    assert pools == (1, 2) and isinstance(refused, RequestError) and "one worker is needed" in refused.message
    assert await launcher.replaced.get() == ("decode-0", 7, "silent for 10 s")
    assert launcher.replaced.empty()
    ipc.report_queue_pressure(True)
    assert await launcher.placed.get() and launcher.placed.empty()
    theirs.shutdown(socket.SHUT_RDWR)
    theirs.close()
    await serving
    assert not launcher.placed.get_nowait(), "the next coordinator starts without pressure"


async def test_the_launcher_reports_ended_workers_to_the_coordinator() -> None:
    launcher, (ours, theirs) = RecordingLauncher(), socket.socketpair()
    heard: asyncio.Queue[tuple[str, str, float]] = asyncio.Queue()
    ipc = SupervisorIPC(theirs.dup().detach())
    ipc.follow(lambda *report: heard.put_nowait(report))
    serving = asyncio.create_task(serve(ours, launcher))
    assert await ipc.scale(1, 2) == (1, 2)  # both ends are open now
    (follow,) = launcher.followers
    follow(AbsenceReport(WorkerName("decode-0"), "exited (exit code 1)", 0.5))
    assert await heard.get() == ("decode-0", "exited (exit code 1)", 0.5)
    assert await ipc.scale(2, 2) == (2, 2), "replies are distinguished from reports"
    theirs.shutdown(socket.SHUT_RDWR)
    theirs.close()
    await serving
    assert not launcher.followers


class RecordingScreen(Lines):
    """A screen that keeps its lines in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: asyncio.Queue[str] = asyncio.Queue()

    def fact(self, text: str) -> None:
        self.facts.put_nowait(text)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """Ids of the processes that a ChildProcess starts: ready at once, they do nothing and end at SIGTERM."""
    pids: asyncio.Queue[int] = asyncio.Queue()

    async def start(spec: process.ChildSpec) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        idle = "import signal; signal.pthread_sigmask(0, [15]); print(flush=True); signal.sigwait([15])"
        child = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", idle, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        await child.stdout.readline()  # its signal mask is set now
        reports = asyncio.StreamReader()
        reports.feed_data(b'{"ready": {}}\n')
        reports.feed_eof()
        pids.put_nowait(child.pid)
        return child, reports

    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr("deploy.launcher.child.BACKOFF_S", 0.01)
    return pids


@pytest.mark.processes
async def test_only_the_process_that_hangs_is_replaced(starts: asyncio.Queue[int]) -> None:
    screen = RecordingScreen()
    child = ChildProcess("decode-0", WorkerConfig(role="decode", model="m"), cores.CoreShare(None, 0), screen)
    keeper = asyncio.create_task(child.keep())
    assert child.serving() is None
    first = await starts.get()
    await child.facts
    assert child.serving() == first
    child.replace(first + 1, "silent for 10 s")
    child.replace(first, "silent for 10 s")
    second = await starts.get()
    while (fact := await screen.facts.get()) == "decode-0 is back":
        pass
    assert fact == "decode-0 hangs (silent for 10 s): killed; restarting it in 0.01 s"
    child.replace(first, "silent for 10 s")  # a repeated request
    child.send(signal.SIGSTOP)  # it is leaving now, and the deadline for that is the caller's
    child.replace(second, "silent for 10 s")
    assert child.running() and child.pid == second and child.serving() is None
    child.send(signal.SIGKILL)
    await keeper
    assert starts.empty()


@pytest.mark.processes
async def test_killed_child_leaves_before_serving_child(
    starts: asyncio.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds also before the event loop hears of the death: the serving worker must not be removed in its place."""
    monkeypatch.setattr("deploy.launcher.child.BACKOFF_S", 60.0)
    children = [
        ChildProcess(f"decode-{n}", WorkerConfig(role="decode", model="m"), cores.CoreShare(None, 0), RecordingScreen())
        for n in (0, 1)
    ]
    keepers = [asyncio.create_task(child.keep()) for child in children]
    await asyncio.gather(*(child.facts for child in children))
    killed, other = children
    assert min(children, key=leaves_first) is other, "the younger one, as long as both serve"
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # already reaped
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - before the loop hears of it
    assert not killed.running() and other.running()
    assert min(children, key=leaves_first) is killed
    for child in children:
        child.send(signal.SIGTERM)
    await asyncio.gather(*keepers)


@pytest.mark.processes
async def test_a_worker_that_is_drained_by_name_comes_back_at_once(
    starts: asyncio.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.launcher.child.BACKOFF_S", 60.0)
    screen, reports, name = RecordingScreen(), asyncio.Queue[AbsenceReport](), WorkerName("decode-0")
    config = WorkerConfig(role="decode", model="m")
    child = ChildProcess(name, config, cores.CoreShare(None, 0), screen, on_absence=reports.put_nowait)
    keeper = asyncio.create_task(child.keep())
    await child.facts
    for _ in range(3):
        os.kill(await starts.get(), signal.SIGTERM)
        assert await screen.facts.get() == "decode-0 has drained; restarting it"
        assert await screen.facts.get() == "decode-0 is back"
        assert reports.get_nowait() == AbsenceReport(name, "drained", 0.0)
    await starts.get()
    child.send(signal.SIGTERM)
    await keeper
    assert starts.empty()
    assert reports.get_nowait() == AbsenceReport(name, "", 0.0), "scaled away before it joined, it is not absent"


@pytest.mark.processes
async def test_a_worker_that_was_never_absent_is_not_reported_when_it_leaves(starts: asyncio.Queue[int]) -> None:
    reports: asyncio.Queue[AbsenceReport] = asyncio.Queue()
    config = WorkerConfig(role="decode", model="m")
    child = ChildProcess("decode-0", config, cores.CoreShare(None, 0), RecordingScreen(), on_absence=reports.put_nowait)
    keeper = asyncio.create_task(child.keep())
    await child.facts
    child.send(signal.SIGTERM)
    await keeper
    assert reports.empty()


@pytest.mark.processes
async def test_who_ends_again_and_again_is_reported_with_a_longer_wait_each_time(starts: asyncio.Queue[int]) -> None:
    """Each process is ready at once, and killed; the last wait ends because the worker is not wanted any more."""
    reports: asyncio.Queue[AbsenceReport] = asyncio.Queue()
    config = WorkerConfig(role="decode", model="m")
    child = ChildProcess("decode-0", config, cores.CoreShare(None, 0), RecordingScreen(), on_absence=reports.put_nowait)
    keeper = asyncio.create_task(child.keep())
    for restart_in_s in (0.01, 0.02, 0.04, 0.08):
        os.kill(await starts.get(), signal.SIGKILL)
        report = await reports.get()
        assert (report.name, report.restart_in_s) == ("decode-0", restart_in_s) and "SIGKILL" in report.why
    child.leave()
    await keeper
    assert reports.get_nowait() == AbsenceReport(WorkerName("decode-0"), "", 0.0)
