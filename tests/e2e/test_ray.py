"""``tandem up --ray`` on a Ray cluster of three nodes, all on this machine: a node is killed under load, and another is
added."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import aiohttp
import pytest

from common.net.http_client import HttpClient
from tests import leaked_keys
from tests.pace import scaled

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache/ray/bin/python"
WAIT_S = scaled(60.0)
pytestmark = [
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


class Nodes:
    """A Ray cluster: its ``address``; nodes are added to it and killed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._commands: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self.address = self._answers.readline().split()[1]

    def do(self, command: str) -> None:
        """Send a command of :mod:`tests.e2e.ray_nodes` and wait until it is done."""
        self._commands.write(command + "\n")
        self._commands.flush()
        assert self._answers.readline() == "done\n"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """A Ray cluster of three nodes: one for the coordinator, two with room for a pair of workers each."""
    leaked_keys.watch(tmp_path / "nodes.log")
    with (tmp_path / "nodes.log").open("w") as log:
        running = subprocess.Popen(
            [PYTHON, "-m", "tests.e2e.ray_nodes"], cwd=ROOT, env=ENVIRONMENT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        with running:
            cluster = Nodes(running)
            cluster.do("add 2")
            cluster.do("add 2")
            yield cluster


def until(true: Callable[[], Any], what: str) -> Any:
    """Poll the state of other processes; return the first true value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.05)
    return value


async def request(session: aiohttp.ClientSession, url: str, prompt: str) -> int:
    """Stream one answer of 60 tokens; return the number of its tokens. Raises if it fails or ends early."""
    body = {"model": "tandem-builtin", "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True,
            "temperature": 0, "stream_options": {"include_usage": True}}  # fmt: skip
    tokens, ended = 0, False
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            ended |= line.startswith(b"data: [DONE]")
    assert ended
    return tokens


def load(url: str, while_running: Callable[[], object]) -> int:
    """As :func:`_load`, in an event loop of its own."""
    return asyncio.run(_load(url, while_running))


async def _load(url: str, while_running: Callable[[], object]) -> int:
    """Send requests from six clients until ``while_running``, run in a thread, has returned; return their number."""
    working = asyncio.create_task(asyncio.to_thread(while_running))
    async with aiohttp.ClientSession() as session:

        async def client(name: int) -> int:
            sent = 0
            while not working.done():
                assert await request(session, url, f"Story {sent} of {name}:") == 60
                sent += 1
            return sent

        counts = await asyncio.gather(*map(client, range(6)))
    await working
    return sum(counts)


def test_a_killed_node_fails_no_request_and_an_added_one_is_used(nodes: Nodes, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    leaked_keys.watch(log)
    with log.open("wb") as out:
        up = subprocess.Popen(
            [PYTHON, "-m", "deploy.cli", "up", "--ray", nodes.address, "--prefill", "2", "--decode", "2",
             "--threads", "1", "--port", "0", "--control-port", "0", "--num-kv-blocks", "600", "--ray-timeout", "60"],
            cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def said(pattern: str) -> re.Match[str] | None:
        text = log.read_text(errors="replace")
        assert up.poll() is None or "stopped" in text, text
        return re.search(pattern, text)

    try:
        url = until(lambda: said(r"serving tandem-builtin on (http://\S+)"), "it serves")[1]
        server = HttpClient(url, None, WAIT_S)

        def pids() -> dict[str, int]:
            return {each["id"]: each["pid"] for each in server.get("/admin/workers")[1]["workers"]}

        before = pids()
        assert sorted(before) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]

        def kill_one() -> None:
            nodes.do("kill 0")
            until(lambda: said(r"up: \S+ (?:exited|hangs) \("), "the loss of the node is noticed")

        assert load(url, kill_one) > 20
        left = {name: pid for name, pid in before.items() if os.path.exists(f"/proc/{pid}")}
        assert sorted(name.partition("-")[0] for name in left) == ["decode", "prefill"], "pairs were on one node"
        assert len({name.partition("-")[2] for name in left}) == 1

        def add_one() -> None:
            nodes.do("add 2")
            until(lambda: len(said_back()) == 2, "the lost workers are back, on the new node")

        def said_back() -> list[str]:
            return re.findall(r"(\S+) is back", log.read_text(errors="replace"))

        assert load(url, add_one) > 0
        assert sorted(said_back()) == sorted(before.keys() - left.keys())

        def scale_up() -> None:
            nodes.do("add 2")
            assert server.post("/admin/scale", {"prefill": 3, "decode": 3}) == {"prefill": 3, "decode": 3}

        assert load(url, scale_up) > 0
        after = pids()
        assert len(after) == 6
        up.send_signal(signal.SIGINT)
        assert up.wait(WAIT_S) == 0
        assert said("up: stopped")
        until(lambda: not [pid for pid in after.values() if os.path.exists(f"/proc/{pid}")], "all workers have ended")
    finally:
        if up.poll() is None:
            up.kill()
            up.wait()
