"""A worker whose GPU has failed ends in words, and at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.worker import WorkerConfig
from common.core.errors import DeviceLost
from deploy import worker
from deploy.launcher import cores, process, status
from deploy.launcher.child import ChildProcess
from deploy.launcher.screen import Lines
from tests.pace import scaled

ILLEGAL = "CUDA error: an illegal memory access was encountered"
CONFIG = WorkerConfig(model="m", role="decode", device="cpu")


class Left(BaseException):
    """The process would have ended, with this exit code."""


def run_until(error: Exception, patch: pytest.MonkeyPatch) -> None:
    """Run a worker that raises ``error``."""

    class Failing:
        steps = SimpleNamespace(cores=None)

        def run(self) -> None:
            raise error

    def leave(code: int) -> None:
        raise Left(code)

    patch.setattr(worker, "open_checkpoint", lambda *_: None)
    patch.setattr(worker, "build", lambda *_: Failing())
    patch.setattr(os, "_exit", leave)
    worker.run(CONFIG)


@pytest.mark.torch
@pytest.mark.parametrize("error", [DeviceLost(ILLEGAL), RuntimeError(ILLEGAL + "\nCUDA kernel errors might be ...")])
def test_it_says_what_happened_and_leaves(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA's error may come from the engine, or raw from what moves KV."""
    reported: list[str] = []
    monkeypatch.setattr(status, "failed", lambda why: reported.append(str(why)))
    with pytest.raises(Left) as caught, caplog.at_level(logging.CRITICAL):
        run_until(error, monkeypatch)
    assert caught.value.args == (worker.DEVICE_LOST,)
    assert f"the GPU has failed: {ILLEGAL}; this worker ends" in caplog.text
    assert reported == [f"the GPU has failed: {ILLEGAL}"]


@pytest.mark.torch
def test_it_leaves_before_the_exchange_with_other_ranks_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To close it could wait for the GPU that has failed, or raise another error."""
    done: list[str] = []

    @contextlib.contextmanager
    def ranks(*_: Any) -> Iterator[Any]:
        try:
            yield SimpleNamespace(report_failure=lambda: done.append("gave another rank's failure time to be reported"))
        except Left:
            done.append("left")
            raise
        finally:
            done.append("closed")

    monkeypatch.setattr(worker, "_ranks", ranks)
    with pytest.raises(Left):
        run_until(DeviceLost(ILLEGAL), monkeypatch)
    assert done == ["gave another rank's failure time to be reported", "left", "closed"]


@pytest.mark.torch
def test_another_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        run_until(RuntimeError("shape mismatch"), monkeypatch)


@pytest.mark.processes
def test_no_thread_and_no_clean_up_holds_the_process() -> None:
    code = (
        "import atexit, threading\n"
        "from common.core.errors import DeviceLost\n"
        "from deploy import worker\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "atexit.register(print, 'cleaned up')\n"
        f"worker._leave(DeviceLost({ILLEGAL!r}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60))
    assert ended.returncode == worker.DEVICE_LOST and "cleaned up" not in ended.stdout
    assert ILLEGAL in ended.stderr


@pytest.mark.processes
async def test_the_launcher_says_it_and_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: asyncio.Queue[str] = asyncio.Queue()
    started: asyncio.Queue[int] = asyncio.Queue()

    async def start(spec: process.ChildSpec) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        lost = f"raise SystemExit({worker.DEVICE_LOST})"
        child = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", lost, stdout=asyncio.subprocess.PIPE)
        reports = asyncio.StreamReader()
        reports.feed_data(
            b'{"ready": {}}\n{"error": {"what": "the GPU has failed", "why": "CUDA error: x", "todo": ""}}\n'
        )
        reports.feed_eof()
        started.put_nowait(child.pid)
        return child, reports

    screen = Lines()
    monkeypatch.setattr(screen, "fact", facts.put_nowait)
    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr("deploy.launcher.child.BACKOFF_S", 0.01)
    child = ChildProcess("decode-0", CONFIG, cores.CoreShare(None, 0), screen)
    keeping = asyncio.create_task(child.keep())
    assert await facts.get() == "decode-0 exited (the GPU has failed: CUDA error: x); restarting it in 0.01 s"
    first, second = await started.get(), await started.get()
    assert first != second
    child.leave()
    await keeping
