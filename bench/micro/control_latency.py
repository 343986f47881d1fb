"""``tandem bench control-latency``: round trips of control messages while KV streams between two workers.

A real gateway runs in an event loop, a prefill and a decode worker in processes of their own. Their engines compute
nothing, and KV travels over ZeroMQ on loopback. Meanwhile messages that are answered at once go back and forth: from an
unknown worker to the coordinator (answer: Rejoin), and from the coordinator to each worker (a request that cannot be
served; answer: RequestFailed). A worker that computes answers only after its step; here there are no steps. With
``--encrypted`` all processes have keys and KV is encrypted.

Round trips are also measured with nothing else going on, and beside processes that only copy memory, as many as threads
are at work while KV streams. The latter shows what the kernel's scheduler alone adds if there are fewer cores than
threads.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.load import results
from bench.load.processes import die_with_parent
from common.config.bench.control_latency import BenchControlLatencyConfig
from common.core.errors import StartError
from common.core.ids import Incarnation, RequestId, WorkerName, new_incarnation, new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Batch, StepResult
from common.engine.launched import StepLauncher
from common.grammar.masks import Grammars
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.net import keys
from common.net.hosts import host_id
from common.net.keys import Party
from common.net.messages import (
    PROTOCOL,
    Generate,
    Heartbeat,
    Hello,
    Lease,
    Measure,
    Measured,
    Peer,
    Prefill,
    PromptLogprobs,
    RequestFailed,
    Role,
    Timing,
    Tokens,
    ToWorker,
)
from common.net.sockets import Channels, identity, receive, send
from common.worker.held_requests import TRIAL_S
from common.worker.loop import WorkerSettings
from coordinator.cluster.events import Loss
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.registry import Registry, WorkerHandle
from decode.role import DecodeWorker
from prefill.role import PrefillWorker

LAYOUT = KvLayout((LayerLayout(8, 64, 64),) * 16, "float32", 16)
POOL_TOKENS, TRIAL_TOKENS, TRIALS = 4096, 256, 3
LONGEST = 1 << 20
PROBE_S = 0.002
"""Pause between an answer and the next message to the same process."""
STREAMING_THREADS, STARTED_S = 4, 0.5
"""Threads at work while KV streams: each worker's own, and its libzmq thread, which copies."""
STALLS = 5
"""The measurement fails after so many periods of TRIAL_S in which no hand-off ended."""
PERCENTILES = (0.5, 0.9, 0.99, 1.0)


class PoolOnly:
    """An engine that has memory and computes nothing."""

    def __init__(self) -> None:
        self.layout, self.memory = LAYOUT, KvMemory(LAYOUT, POOL_TOKENS // LAYOUT.block_size)
        self.memory.raw[:] = 1
        self.fingerprint, self.vocab_size, self.max_model_len = "none", 1000, LONGEST
        self.on_layer: Callable[[int], None] | None = None
        self.grammars: Grammars | None = None
        self.launch: StepLauncher | None = None

    def step(self, batch: Batch) -> StepResult:
        raise NotImplementedError

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        raise NotImplementedError


def channels_of(party: Party, key_file: Path | None) -> Channels:
    """Make channels with the keys of ``party``, or without keys if there is no file."""
    return Channels(keys.load(key_file, party) if key_file else None)


def serve(role: Role, coordinator: str, key_file: Path | None) -> None:
    """Run a worker as a process."""
    die_with_parent()
    engine = PoolOnly()
    settings = WorkerSettings(coordinator, host_id(), 1, 1, kv_transport="zmq")
    hello = Hello(
        PROTOCOL, WorkerName(role), new_incarnation(), role, "none", engine.fingerprint, LAYOUT.fingerprint,
        os.getpid(), "localhost", settings.host_id, "", ("zmq",), engine.memory.blocks, LAYOUT.block_size, LONGEST,
        engine.vocab_size, 1, 1, "cpu", LAYOUT.dtype,
    )  # fmt: skip
    (PrefillWorker if role == "prefill" else DecodeWorker)(engine, settings, hello, channels_of(role, key_file)).run()


def ask(coordinator: str, key_file: Path | None, pipe: Connection) -> None:
    """Run an unknown worker as a process: send (end, round trip in seconds) of each answer through ``pipe`` until it is
    closed."""
    die_with_parent()
    channels = channels_of("decode", key_file)
    socket = channels.dealer(coordinator, identity(WorkerName("stranger"), new_incarnation()))
    beat = Heartbeat(Incarnation("0"), 0, b"", 0, 0, 0, 0, 0, 0, -1, False)
    try:
        while True:
            began = time.monotonic()
            send(socket, beat)
            while receive(socket, ToWorker) is None:
                socket.poll()
            ended = time.monotonic()
            pipe.send((ended, ended - began))
            time.sleep(PROBE_S)
    except (BrokenPipeError, ConnectionResetError):
        channels.close()


class Cluster:
    """The coordinator's side: handles the workers' messages and collects round trips as (end, seconds) by name."""

    def __init__(self, key_file: Path | None) -> None:
        self.registry = Registry(None)
        self.gateway = Gateway(self.registry, "127.0.0.1", 0, channels=channels_of("coordinator", key_file))
        self.workers: dict[Role, WorkerHandle] = {}
        self.complete = asyncio.Event()
        self.streamed = 0
        self.wanted = 0
        self.stalls = 0
        self.trips: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
        self._asked: dict[RequestId, tuple[Role, float]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self.gateway.start(self, self._loop)

    def close(self) -> None:
        """Cancel all timers and close the gateway."""
        for timer in self._timers.values():
            timer.cancel()
        self.gateway.close()

    # -- callbacks of the gateway --------------------------------------------------------------------------------------

    def on_worker_joined(self, worker: WorkerHandle) -> None:
        self.workers[worker.role] = worker
        if len(self.workers) == 2:
            self._lease()
            for role in self.workers:
                self._probe(role)
            self.complete.set()

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None:
        role, began = self._asked.pop(message.request)
        ended = time.monotonic()
        self.trips[role].append((ended, ended - began))
        self._timers[role] = self._loop.call_later(PROBE_S, self._probe, role)

    def measured(self, worker: WorkerHandle, message: Measured) -> None:
        self.streamed += message.bytes
        if self.streamed >= self.wanted:
            self._timers["stall"].cancel()
            self.complete.set()
            return
        self._watch()
        if self.streamed + (TRIALS - 1) * message.bytes < self.wanted:
            self._trial()

    def on_worker_lost(self, worker: WorkerHandle, how: Loss) -> None:
        raise RuntimeError(f"{worker.hello.name} is gone")

    def on_worker_died(self, worker: Incarnation) -> None: ...

    def on_worker_reconnected(self, worker: Incarnation) -> None: ...

    def on_worker_left(self, worker: WorkerHandle) -> None: ...

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None: ...

    def prompt_logprobs(self, worker: WorkerHandle, message: PromptLogprobs) -> None: ...

    def timing(self, worker: WorkerHandle, message: Timing) -> None: ...

    def beat(self, worker: WorkerHandle) -> None: ...

    # -- messages to the workers ---------------------------------------------------------------------------------------

    def stream(self, count: int) -> None:
        """Start hand-offs of ``count`` bytes in total, a few at a time."""
        self.streamed, self.wanted = 0, count
        self.stalls = 0
        self.complete.clear()
        self._start()

    def _start(self) -> None:
        self._watch()
        for _ in range(TRIALS):
            self._trial()

    def _watch(self) -> None:
        """Start new hand-offs if none ends for so long that both workers have given up all open ones. They do not
        report that."""
        if "stall" in self._timers:
            self._timers["stall"].cancel()
        self._timers["stall"] = self._loop.call_later(TRIAL_S + 1, self._stalled)

    def _stalled(self) -> None:
        self.stalls += 1
        if self.stalls < STALLS:
            self._start()
        else:
            self.complete.set()

    def _trial(self) -> None:
        request = new_request_id()
        pairs: list[tuple[Role, Role]] = [("decode", "prefill"), ("prefill", "decode")]
        for role, other in pairs:
            hello = self.workers[other].hello
            peer = Peer(hello.name, hello.incarnation, hello.data_address, hello.host_id, hello.dtype)
            self.gateway.send(self.workers[role], Measure(request, 0, peer, TRIAL_TOKENS))

    def _probe(self, role: Role) -> None:
        """Send a request that is refused at once: too long for decode's pool, or for a peer that prefill cannot
        dial."""
        request = Request(new_request_id(), pack_tokens([1]), SamplingParams(max_tokens=LONGEST, seed=0))
        self._asked[request.id] = role, time.monotonic()
        nowhere = Peer(WorkerName("nobody"), Incarnation("0"), "nowhere", "", LAYOUT.dtype)
        message = Generate(request, 0) if role == "decode" else Prefill(request, 0, nowhere)
        self.gateway.send(self.workers[role], message)

    def _lease(self) -> None:
        for worker in self.workers.values():
            self.gateway.send(worker, Lease(b"", self.gateway.sent[worker.id] + 1))
        self._timers["lease"] = self._loop.call_later(self.registry.times.heartbeat_s, self._lease)


def copy_memory() -> None:
    """Copy memory until killed, as a process that is always runnable."""
    die_with_parent()
    source, target = (np.ones(1 << 20, np.uint8) for _ in range(2))
    while True:
        target[:] = source


async def until_done(cluster: Cluster, children: Iterable[SpawnProcess]) -> None:
    """Wait until what was started is complete. Raises RuntimeError if a process has died, StartError if no KV gets
    through."""
    loop, died = asyncio.get_running_loop(), asyncio.Event()
    sentinels = [child.sentinel for child in children]
    for sentinel in sentinels:
        loop.add_reader(sentinel, died.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (cluster.complete, died)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if died.is_set():
            raise RuntimeError("a process of the measurement has died; its output is above")
        if cluster.stalls >= STALLS:
            why = f"no hand-off ended within {TRIAL_S:g} s, {STALLS} times"
            raise StartError("cannot measure while KV streams", why, "")
    finally:
        for sentinel in sentinels:
            loop.remove_reader(sentinel)
        for wait in waits:
            wait.cancel()


async def measure(count: int, idle_s: float, key_file: Path | None) -> dict[str, Any]:
    """Print and return the round trips of each phase, and the rate at which KV streamed."""
    cluster = Cluster(key_file)
    processes = multiprocessing.get_context("spawn")
    mine, theirs = processes.Pipe(duplex=False)
    given = cluster.gateway.address, key_file
    children = [processes.Process(target=serve, args=(role, *given)) for role in ("prefill", "decode")]
    children.append(processes.Process(target=ask, args=(*given, theirs)))
    answers: list[tuple[float, float]] = []
    cluster.trips["coordinator"] = answers
    try:
        for child in children:
            child.start()
        asyncio.get_running_loop().add_reader(mine.fileno(), lambda: answers.append(mine.recv()))
        await until_done(cluster, children)
        cluster.stream(64 << 20)  # warm up: the first hand-off maps memory and connects
        await until_done(cluster, children)
        began = time.monotonic()
        await asyncio.sleep(idle_s)
        alone = report("nothing else going on", cluster.trips, began, time.monotonic())
        for _ in range(STREAMING_THREADS):
            children.append(processes.Process(target=copy_memory, daemon=True))
            children[-1].start()
        await asyncio.sleep(STARTED_S)
        began = time.monotonic()
        await asyncio.sleep(idle_s)
        beside = report(
            f"beside {STREAMING_THREADS} processes that copy memory", cluster.trips, began, time.monotonic()
        )
        for child in children[-STREAMING_THREADS:]:
            child.kill()
            child.join()
        del children[-STREAMING_THREADS:]
        cluster.stream(count)
        began = time.monotonic()
        await until_done(cluster, children)
        ended = time.monotonic()
        rate = cluster.streamed / (ended - began) / 1e9
        what = f"while {cluster.streamed >> 20} MiB stream at {rate:.2f} GB/s"
        streaming = report(what, cluster.trips, began, ended)
        trips_ms = {"alone": alone, "beside memory": beside, "streaming": streaming}
        return {"streamed_bytes": cluster.streamed, "bytes_per_s": 1e9 * rate, "round_trips_ms": trips_ms}
    finally:
        asyncio.get_running_loop().remove_reader(mine.fileno())
        cluster.close()
        for child in children:
            child.kill()
            child.join()


def report(
    title: str, trips: dict[str, list[tuple[float, float]]], began: float, ended: float
) -> dict[str, dict[str, float]]:
    """Print one line per end of the round trips that ended between two times; return their percentiles in ms by end."""
    print(title)
    found = {}
    for name, seen in trips.items():
        times = sorted(seconds * 1000 for at, seconds in seen if began <= at <= ended)
        each = found[name] = {
            f"p{100 * share:g}": times[min(len(times) - 1, int(share * len(times)))] for share in PERCENTILES
        }
        shown = ", ".join(f"{percent} {ms:.2f}" for percent, ms in each.items())
        print(f"  {name:12} {len(times):5} round trips, ms: {shown}")
    return found


def run(config: BenchControlLatencyConfig) -> int:
    """Print the round trips of each phase as they are measured."""
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "cluster.key" if config.encrypted else None
        if key_file:
            keys.make(key_file)
        found = uvloop.run(measure(config.mib << 20, config.idle_s, key_file))
    if config.save:
        results.save(Path(config.save), {"encrypted": config.encrypted} | found)
    return 0
