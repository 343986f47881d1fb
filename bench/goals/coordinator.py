"""C6: what the coordinator costs, between a client and workers that compute nothing.

The prefill and the decode worker are the real ones around engines that compute nothing: each sequence says the first
token of its prompt again and again, a prompt takes no time and a step of decode ``STEP_S``, so that nobody waits for a
step. So a request's time to the first token, less what the worker says that its prompt took, is what HTTP, tokenizing,
placing, messages and the client itself add. CPU time of the coordinator's process alone gives the tokens that one core
of it could pass on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np

from bench.arrivals import arrivals
from bench.client import Record, Target
from bench.goals.field import Field, good
from bench.goals.figures import Row
from bench.goals.figures import Target as Wanted
from bench.handoff_cost import cpu_seconds
from bench.load import run_now
from bench.systems import READY_S, is_ready
from common.checkpoint import open_checkpoint
from common.client import Server
from common.config import CoordinatorConfig
from common.errors import StartError
from common.ids import WorkerName, new_incarnation
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout, LayerLayout
from common.kv.memory import KvMemory, host_id
from common.messages import PROTOCOL, Hello, Role
from common.sequence import Batch, StepResult
from common.worker import WorkerSettings

LAYOUT = KvLayout((LayerLayout(1, 16, 16),), "float32", 16)
POOL_TOKENS, LONGEST = 1 << 17, 8192
SEQUENCES, BUDGET = 64, 8192
STEP_S, ANSWER_S = 0.01, 60.0
INPUT, OUTPUT, RATE = 1024, 32, 20.0
STREAMS, STREAM_INPUT = 64, 64


class WaitingEngine:
    """An engine with memory, one layer of which nothing is computed."""

    def __init__(self, fingerprint: str, vocab_size: int, step_s: float) -> None:
        self.step_s = step_s
        self.layout, self.memory = LAYOUT, KvMemory(LAYOUT, POOL_TOKENS // LAYOUT.block_size)
        self.fingerprint, self.vocab_size, self.max_model_len = fingerprint, vocab_size, LONGEST
        self.on_layer: Callable[[int], None] | None = None

    def step(self, batch: Batch) -> StepResult:
        time.sleep(self.step_s)
        if self.on_layer is not None:
            self.on_layer(0)
        said = [[segment.sequence.tokens[0]] if segment.wants_token else [] for segment in batch.segments]
        return StepResult(said, [[] for _ in batch.segments], self.step_s)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for _ in copies:  # nothing is in them
            pass


def _coordinate(model: str, pipe: Connection) -> None:
    from coordinator.app import run

    config = CoordinatorConfig(model=model, port=0, control_port=0, expect_prefill=1, expect_decode=1)
    run(config, lambda url, address: pipe.send((url, address)))


def _work(model: str, role: Role, coordinator: str) -> None:
    from decode.worker import DecodeWorker
    from prefill.worker import PrefillWorker

    checkpoint = open_checkpoint(model)
    engine = WaitingEngine(checkpoint.fingerprint, checkpoint.vocab_size, 0.0 if role == "prefill" else STEP_S)
    settings = WorkerSettings(coordinator, host_id(), SEQUENCES, BUDGET, prefix_caching=False)
    hello = Hello(
        PROTOCOL, WorkerName(role), new_incarnation(), role, model, engine.fingerprint, LAYOUT.fingerprint,
        os.getpid(), "localhost", settings.host_id, "", ("shm",), engine.memory.blocks, LAYOUT.block_size, LONGEST,
        engine.vocab_size, SEQUENCES, BUDGET, "cpu", LAYOUT.dtype,
    )  # fmt: skip
    (PrefillWorker if role == "prefill" else DecodeWorker)(engine, settings, hello).run()


@dataclass(frozen=True)
class House:
    """A serving coordinator: how it is asked, and its process."""

    target: Target
    pid: int


@contextmanager
def house(model: str) -> Iterator[House]:
    """A coordinator and its workers in processes of their own."""
    processes = multiprocessing.get_context("spawn")
    mine, theirs = processes.Pipe(duplex=False)
    children: list[BaseProcess] = [processes.Process(target=_coordinate, args=(model, theirs), daemon=True)]
    try:
        children[0].start()
        theirs.close()
        try:
            url, address = mine.recv()
        except EOFError as error:
            raise StartError("the coordinator did not start", "see above", "try tandem coordinator") from error
        for role in ("prefill", "decode"):
            children.append(processes.Process(target=_work, args=(model, role, address), daemon=True))
            children[-1].start()
        _wait_until_ready(url, children)
        name = str(Server(url).served(None)["id"])
        extra = {"ignore_eos": True, "temperature": 0, "return_metrics": True}
        pid = children[0].pid
        assert pid is not None
        yield House(Target(url, name, timeout_s=ANSWER_S, extra=extra), pid)
    finally:
        mine.close()
        for child in children:
            if child.pid is not None and child.is_alive():
                os.kill(child.pid, signal.SIGKILL)
            child.join()
            child.close()


def _wait_until_ready(url: str, children: list[BaseProcess]) -> None:
    deadline = time.monotonic() + READY_S
    while not is_ready(url, "/ready"):
        if time.monotonic() > deadline or not all(child.is_alive() for child in children):
            raise StartError("the coordinator serves nobody", "its workers did not join", "see above")
        time.sleep(0.05)


def added_ms(record: Record) -> float:
    """Of the time to the first token, what was not the worker's."""
    stages = record.stages or {}
    return record.ttft * 1000 - float(stages["prefill_ms"])


def c6(field: Field) -> list[Row]:
    """Added time to the first token at a moderate rate, and tokens per second of the coordinator's CPU time."""
    field.open()
    effort = field.effort
    medians, tails, rates = [], [], []
    with house(str(field.model)) as served:
        run_now(served.target, field.asks(8, INPUT, OUTPUT), [0.0] * 8, console=field.console, title="warming up")
        for number in range(effort.rounds):
            asks = field.asks(5 * effort.requests, INPUT, OUTPUT)
            times = arrivals(len(asks), RATE, burstiness=1.0, seed=number)
            records = good(run_now(served.target, asks, times, console=field.console, title="coordinator, paced"))
            added = [added_ms(record) for record in records]
            medians.append(statistics.median(added))
            tails.append(float(np.percentile(added, 99)))
            asks = field.asks(STREAMS, STREAM_INPUT, 4 * effort.streamed_tokens)
            before = cpu_seconds(served.pid)
            run = run_now(served.target, asks, [0.0] * STREAMS, console=field.console, title="coordinator, streams")
            tokens = sum(record.output_tokens for record in good(run))
            rates.append(tokens / (cpu_seconds(served.pid) - before))
    paced = f"{INPUT:,}-token prompts, {RATE:g} per second"
    return [
        Row("C6", f"time to first token that the coordinator adds, median, {paced}", "ms", statistics.median(medians),
            (Wanted("value", 1, at_most=True),), note="the client's and the workers' own time is in it"),
        Row("C6", f"the same, P99, {paced}", "ms", statistics.median(tails), (Wanted("value", 3, at_most=True),)),
        Row("C6", f"tokens that a core of the coordinator passes on, {STREAMS} streams", "tok/s",
            statistics.median(rates), (Wanted("value", 30_000),), note="of its CPU time, prompts included"),
    ]  # fmt: skip
