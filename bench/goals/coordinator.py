"""C6: what the coordinator costs, between a client and workers that compute nothing (:mod:`bench.goals.mocks`).

Those workers take no time for a prompt and ``STEP_S`` for a decode step. The time to the first token is therefore that
of HTTP, validation (a prompt is token ids, as from a load generator), placement, messages and the client itself. A bare
HTTP server in the same run shows what part the coordinator adds: it gets the same requests from the same client at the
same times, and sends the same bytes without parsing the requests. The difference, request by request, is the time of
the coordinator, including its messages to the workers and back. The CPU time of its process shows how many tokens per
second it could pass on with one core.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import uvloop

from bench.goals import mocks
from bench.goals.field import Field, good, whole
from bench.goals.figures import GoalTarget, Row
from bench.load.arrivals import arrivals
from bench.load.client import PATHS, Record, Target
from bench.load.processes import cpu_seconds, die_with_parent
from bench.load.run import run_now
from bench.load.systems import READY_S, is_ready
from common.config.coordinator import CoordinatorConfig
from common.core.errors import StartError
from common.net.http_client import HttpClient

STEP_S, ANSWER_S = 0.01, 60.0
INPUT, OUTPUT, RATE = 1024, 32, 20.0
STREAMS, STREAM_INPUT = 64, 64


def _coordinate(model: str, pipe: Connection) -> None:
    from coordinator.app import run

    die_with_parent()
    config = CoordinatorConfig(model=model, port=0, control_port=0, expect_prefill=1, expect_decode=1)
    run(config, lambda url, address: pipe.send((url, address)))


@dataclass(frozen=True)
class Served:
    """A serving coordinator and the bare server: where to send requests, and the coordinator's process id."""

    target: Target
    pid: int
    bare: Target


class Children:
    """Child processes that are killed at the end."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.processes: list[BaseProcess] = []

    def start(self, function: Callable[..., None], *arguments: object) -> BaseProcess:
        """Start ``function(*arguments)`` in a new process and return it. The process is spawned, so both must be
        picklable."""
        process = self._context.Process(target=function, args=arguments, daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def start_and_receive(self, function: Callable[..., None], *arguments: object) -> Any:
        """Start a process and return the first object that it sends through the pipe that is its last argument. Raises
        StartError if it ends without one."""
        mine, theirs = self._context.Pipe(duplex=False)
        with mine:
            self.start(function, *arguments, theirs)
            theirs.close()
            try:
                return mine.recv()
            except EOFError as error:
                raise StartError(
                    f"{function.__name__} did not start", "see its output above", "try tandem coordinator"
                ) from error

    def end(self) -> None:
        """Kill the processes that still run, and wait until all have ended."""
        for child in self.processes:
            if child.pid is not None and child.is_alive():
                os.kill(child.pid, signal.SIGKILL)
            child.join()
            child.close()


@contextmanager
def serving(field: Field) -> Iterator[Served]:
    """Run a coordinator, its workers and the bare server in processes of their own."""
    children = Children()
    try:
        target, pid = coordinating(children, str(field.model), _coordinate)
        events = uvloop.run(events_of(target, target.body(field.asks(1, INPUT, OUTPUT)[0])))
        yield Served(target, pid, replace(target, url=children.start_and_receive(mocks.replay, events, STEP_S)))
    finally:
        children.end()


def coordinating(
    children: Children, model: str, coordinate: Callable[..., None], *arguments: object
) -> tuple[Target, int]:
    """Start the coordinator ``coordinate(model, *arguments, pipe)`` and its workers. Return where to send requests, and
    the coordinator's process id. Raises StartError if they do not become ready."""
    url, address = children.start_and_receive(coordinate, model, *arguments)
    pid = children.processes[-1].pid
    assert pid is not None
    for role in ("prefill", "decode"):
        children.start(mocks.work, model, role, address, STEP_S)
    _wait_until_ready(url, children.processes)
    extra = {"ignore_eos": True, "temperature": 0, "return_metrics": True}
    return Target(url, str(HttpClient(url).served(None)["id"]), timeout_s=ANSWER_S, extra=extra), pid


def _wait_until_ready(url: str, children: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + READY_S
    while not is_ready(url, "/ready"):
        if time.monotonic() > deadline or not all(child.is_alive() for child in children):
            raise StartError("the coordinator is not ready", "its workers did not join", "see its output above")
        time.sleep(0.05)


async def events_of(target: Target, body: bytes) -> list[bytes]:
    """Return the server-sent events of one answer, byte for byte."""
    async with target.session() as session, session.post(target.url + PATHS[target.backend], data=body) as response:
        return [event + b"\n\n" for event in (await response.read()).split(b"\n\n") if event]


def added_ms(through: Sequence[Record], bare: Sequence[Record]) -> list[float]:
    """Return by how much each request's time to the first token exceeds that of the same request to the bare server, in
    ms."""
    return [1000 * (ours.ttft - theirs.ttft) for ours, theirs in zip(through, bare, strict=True)]


def _percentile_ms(records: Sequence[Record], percent: float) -> float:
    return float(np.percentile([record.ttft for record in records], percent)) * 1000


def c6(field: Field) -> list[Row]:
    """Time to the first token that the coordinator adds at a moderate rate, and tokens per second of its CPU time."""
    field.open()
    effort = field.effort
    send = partial(run_now, at_once=False)  # as a client on another machine, which does not preempt the server
    rates: list[float] = []
    added: dict[float, list[float]] = {50: [], 99: []}
    seen: dict[float, list[tuple[float, float]]] = {50: [], 99: []}
    with serving(field) as served:
        for target in (served.target, served.bare):
            send(target, field.asks(8, INPUT, OUTPUT), [0.0] * 8, console=field.console, title="warming up")
        for number in range(effort.rounds):
            asks = field.asks(5 * effort.requests, INPUT, OUTPUT)
            times = arrivals(len(asks), RATE, burstiness=1.0, seed=number)
            bare, through = (
                whole(send(target, asks, times, console=field.console, title=f"{who}, paced")).records
                for target, who in ((served.bare, "bare server"), (served.target, "coordinator"))
            )
            for percent in added:
                added[percent].append(float(np.percentile(added_ms(through, bare), percent)))
                seen[percent].append((_percentile_ms(through, percent), _percentile_ms(bare, percent)))
            asks = field.asks(STREAMS, STREAM_INPUT, 4 * effort.streamed_tokens)
            before = cpu_seconds(served.pid)
            run = send(served.target, asks, [0.0] * STREAMS, console=field.console, title="coordinator, streams")
            tokens = sum(record.output_tokens for record in good(run))
            rates.append(tokens / (cpu_seconds(served.pid) - before))
    what = "time to first token added by the coordinator"
    paced = f"{INPUT:,}-token prompts at {RATE:g} req/s"
    whole_ms = {
        percent: f"total {statistics.median(ours for ours, _ in each):.2f} ms, "
        f"with the bare server {statistics.median(theirs for _, theirs in each):.2f}"
        for percent, each in seen.items()
    }
    return [
        Row("C6", f"{what}, median, {paced}", "ms", statistics.median(added[50]),
            (GoalTarget("value", 1, at_most=True),),
            note=f"beside a bare server that sends the same bytes; {whole_ms[50]}", detail={"added_ms": added[50]}),
        Row("C6", f"{what}, P99, {paced}", "ms", statistics.median(added[99]), (GoalTarget("value", 3, at_most=True),),
            note=f"of the difference request by request; P99 {whole_ms[99]}", detail={"added_ms": added[99]}),
        Row("C6", f"tokens per CPU second of the coordinator, {STREAMS} streams", "tok/s",
            statistics.median(rates), (GoalTarget("value", 30_000),), note="prompts included",
            detail={"tokens_per_s": rates}),
    ]  # fmt: skip
