"""Processes forked by the spawner behave like those that ``subprocess.Popen`` starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e import spawner
from tests.e2e.spawner import ROOT, Spawner
from tests.e2e.system import RunningSystem, TandemProcess
from tests.e2e.test_tokens import ONE_ONE
from tests.pace import scaled

pytestmark = pytest.mark.e2e


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def pids_of_workers(system: RunningSystem) -> list[int]:
    async with system.client() as client:
        return [worker["pid"] for worker in (await client.workers()).values()]


def test_workers_are_children_of_their_launcher_share_its_imports_and_die_with_it(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        system = stack.enter_context(RunningSystem.up(tmp_path, checkpoint("llama"), *ONE_ONE))
        launcher, pids = system.process.popen, asyncio.run(pids_of_workers(system))
        assert len(pids) == 2
        for pid in pids:
            worker = psutil.Process(pid)
            assert worker.ppid() == launcher.pid, "its exit code and signals are its launcher's to see"
            assert os.getpgid(pid) == pid, "a terminal's Ctrl-C goes to the launcher alone"
            assert "tests.e2e.spawner" in worker.cmdline(), "it was forked"
            assert worker.environ()["OMP_NUM_THREADS"] == "1"
        names = [child.cmdline() for child in psutil.Process(launcher.pid).children()]
        assert sum("coordinator" in each for each in names) == 1, "it never sees torch, so it is started as usual"
        launcher.kill()
        assert launcher.wait() == -signal.SIGKILL
        deadline = time.monotonic() + scaled(10.0)
        while not all(map(is_gone, pids)):
            assert time.monotonic() < deadline, "the kernel has not killed them"
            time.sleep(0.02)
        stack.pop_all()  # nothing is left to stop


def test_exit_code_output_and_folder_are_the_commands_own(tmp_path: Path) -> None:
    assert TandemProcess.spawner is not None
    words = [sys.executable, "-m", "deploy.cli", "up", str(tmp_path / "nowhere")]
    start = TandemProcess.spawner.popen()
    forked = start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    usual = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    said = forked.communicate(timeout=scaled(60))
    assert (forked.returncode, *said) == (usual.returncode, usual.stdout, usual.stderr)
    assert usual.returncode == 1 and "nowhere" in usual.stderr


def test_standard_input_is_handed_over() -> None:
    """A launcher passes the configuration and keys of its child processes this way."""
    assert TandemProcess.spawner is not None
    command = [sys.executable, "-m", "deploy.cli", "up", "--config", "/dev/stdin"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    forked = TandemProcess.spawner.popen()(command, **pipes, text=True, cwd=ROOT)
    said = "".join(forked.communicate("portt: 5", timeout=scaled(60)))
    assert forked.returncode == 1 and "unknown key portt" in said


def test_another_popen_is_refused_clearly() -> None:
    class Later(subprocess.Popen[bytes]):
        def _execute_child(self, args: object, executable: object, namespace: object) -> None: ...

    with pytest.raises(RuntimeError, match=r"has other parameters here than _DETAILS: .*namespace"):
        spawner._check_details(Later)


def test_a_worker_with_other_threads_than_the_spawner_is_started_as_usual() -> None:
    with Spawner.running() as another:
        start = another.popen()
        command = [sys.executable, "-m", "deploy.launcher.process", "--help"]
        with start(command, env=os.environ | {"OMP_NUM_THREADS": "7"}, stderr=subprocess.DEVNULL) as usual:
            assert "tests.e2e.spawner" not in Path(f"/proc/{usual.pid}/cmdline").read_text()
            usual.kill()
