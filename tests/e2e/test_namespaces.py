"""Two hosts as two network namespaces with a wire between them: coordinator and prefill here, decode there.

The parts authenticate each other with keys of ``tandem keygen``; the decode host has only the keys of its role. The
engines are oracles (tests.fakes.oracle): a wrong KV byte anywhere changes the next token.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import aiohttp
import pytest

from tests import leaked_keys
from tests.chaos.cluster import oracle_checkpoint
from tests.chaos.request import ChaosRequest
from tests.chaos.worker import FIRST_FAULT
from tests.e2e.relay import enter as enter_namespace
from tests.fakes.oracle import oracle_layout
from tests.pace import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
HERE, THERE = "10.87.0.1", "10.87.0.2"
DELAY_MS = 5
PARTITION_S = 5.0
WAIT_S = scaled(30.0)
_SERVING = re.compile(r"serving \S+ at (http://\S+), workers at tcp://(\S+)")
T = TypeVar("T")


def until(true: Callable[[], T], what: str) -> T:
    """Poll the state of other processes; return the first true value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.05)
    return value


# -- the wire ---------------------------------------------------------------------------------------------------------


def run(*words: str) -> str:
    """Return a command's output; CalledProcessError if it failed."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@dataclass
class NamespaceWire:
    """Two namespaces and a wire between them, each end of which is named ``wire``. :meth:`close` removes them."""

    here: str = field(default_factory=lambda: f"tandem-{os.getpid()}-here")
    there: str = field(default_factory=lambda: f"tandem-{os.getpid()}-there")
    delayed: bool = True
    relay: subprocess.Popen[str] | None = None

    def open(self) -> None:
        for name in (self.here, self.there):
            run("ip", "netns", "add", name)
            run("ip", "netns", "exec", name, "true")
            run("ip", "-n", name, "link", "set", "lo", "up")
        self._lay()
        for name, address in ((self.here, HERE), (self.there, THERE)):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "wire", "up")

    def _lay(self) -> None:
        """Create a wire of 1 Gbit/s with a delay of DELAY_MS each way: by netem, else by the relay, else without
        delay."""
        only_rate = "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"
        self._pair()
        try:
            self._shape("netem", "delay", f"{DELAY_MS}ms", "rate", "1gbit", "limit", "10000")
        except subprocess.CalledProcessError:
            run("ip", "-n", self.here, "link", "delete", "wire")
            words = sys.executable, "-m", "tests.e2e.relay", str(DELAY_MS), self.here, self.there
            self.relay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert self.relay.stdout is not None
            if self.relay.stdout.readline() != "ready\n":
                self.delayed = False
                self._pair()
            self._shape(*only_rate)

    def _pair(self) -> None:
        run("ip", "link", "add", "wire", "netns", self.here, "type", "veth", "peer", "wire", "netns", self.there)

    def _shape(self, *words: str) -> None:
        for name in (self.here, self.there):
            run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *words)

    def set(self, state: str) -> None:
        """Set the link ``down`` (no packets pass) or ``up`` again."""
        run("ip", "-n", self.there, "link", "set", "wire", state)

    def arrived(self) -> int:
        """Return the bytes that have arrived at the far end of the wire."""
        (link,) = json.loads(run("ip", "-n", self.there, "-s", "-j", "link", "show", "wire"))
        return int(link["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        if self.relay is not None:
            self.relay.communicate()  # closes its input, which ends it
        for name in (self.here, self.there):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def inside(namespace: str, work: Callable[[], T]) -> T:
    """Run ``work()`` in a thread whose sockets are in ``namespace``, and return its result."""
    outcome: list[Any] = []

    def go() -> None:
        try:
            enter_namespace(namespace)
            outcome.extend((work(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    value, error = outcome
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def wire() -> Iterator[NamespaceWire]:
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs ip and tc (Debian: apt install iproute2)")
    wire = NamespaceWire()
    try:
        try:
            wire.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield wire
    finally:
        wire.close()


# -- the processes ----------------------------------------------------------------------------------------------------


class NamespacedProcess:
    """One process in a namespace, logging into a file."""

    def __init__(self, namespace: str, log: Path, *words: str) -> None:
        self._log = log
        leaked_keys.watch(log)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, "-m", *words],
                stdin=subprocess.PIPE,  # workers end when it is closed, whatever happens to this test
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=clean | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def until_said(self, words: str) -> None:
        until(lambda: words in self.said or self.process.poll() is not None, f"{words!r} in {self.said}")
        assert words in self.said, self.said

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send signal ``number``, wait, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
            leaked_keys.search(self._log)


class NamespacedCluster:
    """The system on both sides of the wire."""

    def __init__(self, wire: NamespaceWire, directory: Path) -> None:
        self.wire, self.directory, self.rng = wire, directory, Random(1)
        self.started: list[NamespacedProcess] = []
        self.model, self.fingerprint = oracle_checkpoint(directory / "model")
        self.keys = leaked_keys.keygen(directory / "cluster.key")
        part = "--role", "decode", "--cluster-key-file", str(self.keys)
        self.decode_key = leaked_keys.keygen(directory / "decode.key", *part)

    def open(self) -> None:
        self.coordinator = self.start(
            self.wire.here, "coordinator",
            "deploy.cli", "coordinator", str(self.model), "--served-model-name", "oracle", "--port", "0",
            "--control-host", HERE, "--control-port", "0", "--cluster-key-file", str(self.keys),
            "--expect-prefill", "1", "--expect-decode", "1",
            "--local-prefill", "never",  # all KV must cross the wire
        )  # fmt: skip
        until(lambda: _SERVING.search(self.coordinator.said) or self.coordinator.process.poll(), "it serves")
        found = _SERVING.search(self.coordinator.said)
        assert found is not None, self.coordinator.said
        self.url, self.control = found.groups()
        self.prefill = self.worker(self.wire.here, "prefill", "prefill-0", self.keys)
        self.decode = self.worker(self.wire.there, "decode", "decode-0", self.decode_key)
        until(lambda: inside(self.wire.here, self.ready), "every worker has joined")

    def start(self, namespace: str, name: str, *words: str) -> NamespacedProcess:
        self.started.append(NamespacedProcess(namespace, self.directory / f"{name}.log", *words))
        return self.started[-1]

    def worker(self, namespace: str, role: str, name: str, keys: Path | None) -> NamespacedProcess:
        host = HERE if namespace == self.wire.here else THERE
        return self.start(
            namespace, name, "tests.chaos.worker", "--role", role, "--name", name, "--coordinator", self.control,
            "--host", host, "--fingerprint", self.fingerprint, "--step-s", "0.02",
            *(("--cluster-key-file", str(keys)) if keys else ()),
        )  # fmt: skip

    def ready(self) -> bool:
        async def get() -> bool:
            async with aiohttp.ClientSession(self.url) as session, session.get("/ready") as response:
                return response.status == 200

        return asyncio.run(get())

    def ask(self, count: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[ChaosRequest]:
        """Send ``count`` requests at once and return them with their answers; ``meanwhile`` runs when half of them
        stream."""
        asks = [
            ChaosRequest([self.rng.randrange(FIRST_FAULT) for _ in range(200)], 60, self.rng.getrandbits(63))
            for _ in range(count)
        ]

        async def work() -> None:
            async with aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=120)) as session:
                load = asyncio.gather(*(each.send(session) for each in asks))
                while meanwhile and not load.done() and sum(bool(each.ids) for each in asks) < count // 2:
                    await asyncio.wait([load], timeout=0.01)
                if meanwhile:
                    assert not load.done()
                    await meanwhile()
                await load

        inside(self.wire.here, lambda: asyncio.run(work()))
        return asks

    def close(self) -> None:
        for each in reversed(self.started):
            each.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(wire: NamespaceWire, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamespacedCluster]:
    cluster = NamespacedCluster(wire, tmp_path_factory.mktemp("cluster"))
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


# -- what must hold ---------------------------------------------------------------------------------------------------


def test_the_wire_is_as_slow_as_it_says(wire: NamespaceWire) -> None:
    if not wire.delayed:
        pytest.skip(f"no netem and no taps here: the wire has 1 Gbit/s, but not the delay of {DELAY_MS} ms")
    with inside(wire.there, lambda: socket.create_server((THERE, 0))) as server:

        def dial() -> float:
            started = time.monotonic()
            socket.create_connection(server.getsockname(), timeout=WAIT_S).close()
            return time.monotonic() - started

        assert min(inside(wire.here, dial) for _ in range(3)) >= 2 * DELAY_MS / 1000


def test_it_serves_over_the_wire(cluster: NamespacedCluster) -> None:
    before = cluster.wire.arrived()
    asks = cluster.ask(8)
    assert [each.verdict() for each in asks] == ["exact"] * 8
    assert {each.headers["x-tandem-path"] for each in asks} == {"disagg"}
    kv_bytes = sum(len(each.prompt) for each in asks) * oracle_layout().token_bytes
    assert cluster.wire.arrived() - before > kv_bytes, "the KV has come this way"


def test_a_partition_of_five_seconds_costs_no_answer(cluster: NamespacedCluster) -> None:
    async def pull_the_plug() -> None:
        cluster.wire.set("down")
        try:
            await asyncio.sleep(PARTITION_S)
        finally:
            cluster.wire.set("up")

    lost = cluster.coordinator.said.count("worker decode-0 is gone")
    asks = cluster.ask(16, pull_the_plug)
    assert [each.verdict() for each in asks] == ["exact"] * 16, [each.error for each in asks]
    assert cluster.coordinator.said.count("worker decode-0 is gone") > lost, "the plug was out"
    assert [each.verdict() for each in cluster.ask(8)] == ["exact"] * 8, "and it goes on as before"


@pytest.mark.parametrize(
    ("whose", "words"), [("no cluster's", "it requires a key"), ("another cluster's", "keys of another tandem keygen")]
)
def test_coordinator_refuses_worker_with_wrong_key(
    cluster: NamespacedCluster, tmp_path: Path, whose: str, words: str
) -> None:
    other = leaked_keys.keygen(tmp_path / "other.key")
    name = f"stranger-{len(cluster.started)}"
    stranger = cluster.worker(cluster.wire.there, "decode", name, other if whose == "another cluster's" else None)
    stranger.until_said(words)
    assert "--cluster-key-file" in stranger.said
    assert name not in cluster.coordinator.said
    assert stranger.stop() == 0, "it can still be asked to leave"
    assert [each.verdict() for each in cluster.ask(2)] == ["exact"] * 2


def test_a_worker_without_keys_does_not_even_start(cluster: NamespacedCluster) -> None:
    words = "deploy.cli", "decode", str(cluster.model), "--coordinator", cluster.control, "--host", THERE
    bare = cluster.start(cluster.wire.there, "bare", *words)
    assert bare.process.wait(WAIT_S) == 1
    assert "--cluster-key-file" in bare.said and "tandem keygen" in bare.said
