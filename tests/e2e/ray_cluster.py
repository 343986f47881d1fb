"""A Ray cluster on this machine, and ``tandem up --ray`` in it. Ray is in an environment of its own:
``make .cache/ray/bin/ray``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.net.http_client import HttpClient
from tests import leaked_keys
from tests.pace import scaled

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache/ray/bin/python"
WAIT_S = scaled(60.0)
MARKS = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.whole,
    pytest.mark.alone,
    pytest.mark.timeout(scaled(300)),
    pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed: make .cache/ray/bin/ray installs it"),
]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "RAY_"))},
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
}
SMALL = ("--threads", "1", "--port", "0", "--control-port", "0", "--num-kv-blocks", "600", "--ray-timeout", "60")


def until(true: Callable[[], Any], what: str) -> Any:
    """Poll the state of other processes; return the first true value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.05)
    return value


class Cluster:
    """A Ray cluster: its ``address`` and the folder ``logs``; ``process`` has all its processes below it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self._commands, self._answers = process, process.stdin, process.stdout
        self.address, logs = json.loads(self._answers.readline())
        self.logs = Path(logs)

    def do(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of :class:`tests.e2e.ray_nodes.Nodes`."""
        self._commands.write(json.dumps([method, arguments, named]) + "\n")
        self._commands.flush()
        return json.loads(self._answers.readline())


@contextmanager
def cluster(folder: Path, *words: int) -> Iterator[Cluster]:
    """Run a cluster; ``words`` are those of :mod:`tests.e2e.ray_nodes`."""
    log = folder / "nodes.log"
    leaked_keys.watch(log)
    with log.open("w") as out:
        running = subprocess.Popen(
            [PYTHON, "-m", "tests.e2e.ray_nodes", *map(str, words)], cwd=ROOT, env=ENVIRONMENT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out,
        )  # fmt: skip
        with running:
            yield Cluster(running)


class Up:
    """A running ``tandem up --ray``."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.url = until(lambda: self.said(r"serving tandem-builtin on (http://\S+)"), "it serves")[1]
        self.server = HttpClient(self.url, None, WAIT_S)

    def text(self) -> str:
        """Return its output."""
        return self._log.read_text(errors="replace")

    def said(self, pattern: str) -> re.Match[str] | None:
        """Return where its output matches ``pattern``. Fails if it has ended without having been stopped."""
        text = self.text()
        assert self.process.poll() is None or "stopped" in text, text
        return re.search(pattern, text)

    def pids(self, key: str | None = None) -> dict[str, int]:
        """Return the process ids of the workers by name."""
        server = HttpClient(self.url, key, WAIT_S)
        return {each["id"]: each["pid"] for each in server.get("/admin/workers")[1]["workers"]}

    def answers(self) -> bool:
        """Return whether a request is answered."""
        body = {"model": "tandem-builtin", "prompt": "A", "max_tokens": 3}
        return len(self.server.post("/v1/completions", body)["choices"]) == 1

    def interrupt(self) -> None:
        """Press Ctrl-C and wait until it has ended."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(WAIT_S) == 0
        assert self.said("up: stopped")


@contextmanager
def started(
    address: str, log: Path, *words: str | Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``tandem up --ray``; it runs until the end of the block, at the latest."""
    leaked_keys.watch(log)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [PYTHON, "-m", "deploy.cli", "up", "--ray", address, *SMALL, *words],
            cwd=ROOT, env={**ENVIRONMENT, **(environment or {})}, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def up(address: str, log: Path, *words: str | Path, environment: dict[str, str] | None = None) -> Iterator[Up]:
    """As :func:`started`, and wait until it serves."""
    with started(address, log, *words, environment=environment) as process:
        yield Up(process, log)


def refused(address: str, *words: str, before: str = "") -> str:
    """Return the error with which ``tandem up --ray`` ends at its start. ``before``: a program that runs before it."""
    main = f"{before}\nimport sys; from deploy.cli.main import main; sys.exit(main(sys.argv[1:]))"
    ran = subprocess.run(
        [PYTHON, "-c", main, "up", "--ray", address, *SMALL, *words],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=2 * WAIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout
    return ran.stderr[ran.stderr.index("error: ") :]


def gone(pids: Iterable[int]) -> Callable[[], bool]:
    """Return a function that returns whether none of these processes is left."""
    left = list(pids)
    return lambda: not any(map(psutil.pid_exists, left))
