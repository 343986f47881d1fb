"""``tandem bench observability``: CPU time per token that tracing, the live page and access lines add to a coordinator.

The coordinator runs in a process of its own between a client and mock workers that compute nothing
(:mod:`bench.goals.mocks`). It is started once, with everything configured, since two processes differ by more than what
is measured. In each round every setting is measured once: streams that begin together, and the CPU time of the process
until SETTLE_S after their end, per token of theirs. Without traces, the client's ``traceparent`` says that they are not
sampled; without access lines, their logger is switched off; the page is its stream of events, read by one client.

Traces go to a receiver in another process, and that it has all of them at the end is checked. Log lines go to a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import math
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from aiohttp import web
from rich.console import Console

from bench.goals.coordinator import Children, coordinating
from bench.goals.field import whole
from bench.load import results
from bench.load.client import Target
from bench.load.processes import die_with_parent
from bench.load.run import run_now
from bench.load.tokens import FileTokenizer, ordinary_ids
from bench.load.workloads import PlannedRequest, random_asks
from common import builtin
from common.config.bench.observability import BenchObservabilityConfig
from common.config.coordinator import CoordinatorConfig
from common.core.errors import StartError
from common.net.http_client import HttpClient

PLAIN, ALL = "plain", "all"
SETTLE_S = 2.0
"""Time after the last token that is measured too: the last traces are sent in it. The time is fixed instead of ending
with their arrival, since what a coordinator does meanwhile without requests must be the same with every setting; the
arrival is checked after it."""
EVENTS, COUNT = "/admin/events", "/count"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"
"""The ``traceparent`` of all requests, without its flags."""


@dataclass(frozen=True)
class Setting:
    """What is switched on."""

    traces: bool = False
    page: bool = False
    access: bool = False


SETTINGS = {
    PLAIN: Setting(),
    "traces": Setting(traces=True),
    "page": Setting(page=True),
    "access-lines": Setting(access=True),
    ALL: Setting(traces=True, page=True, access=True),
}


def _coordinate(model: str, options: Mapping[str, Any], log: str, switch: Connection, pipe: Connection) -> None:
    """Run a coordinator. Whether it logs access lines is what ``switch`` has received last."""
    from common.platform.log import setup_logging
    from coordinator.app import run

    die_with_parent()
    access = logging.getLogger("tandem.access")

    def listen() -> None:
        with contextlib.suppress(EOFError):
            while True:
                access.disabled = not switch.recv()

    threading.Thread(target=listen, daemon=True).start()
    config = CoordinatorConfig(model=model, port=0, control_port=0, expect_prefill=1, expect_decode=1, **options)
    with open(log, "w", encoding="utf-8") as stream:
        setup_logging("info", "json", "coordinator", stream)
        run(config, lambda url, address: pipe.send((url, address)))


def _receive(pipe: Connection) -> None:
    """Answer every export with success, and COUNT with the number of server spans so far; send the URL through
    ``pipe``."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    die_with_parent()
    count = 0

    async def export(request: web.Request) -> web.Response:
        nonlocal count
        message = ExportTraceServiceRequest.FromString(await request.read())
        scopes = (scope for each in message.resource_spans for scope in each.scope_spans)
        count += sum(span.kind == Span.SPAN_KIND_SERVER for scope in scopes for span in scope.spans)
        return web.Response(content_type="application/x-protobuf")

    async def tell(_: web.Request) -> web.Response:
        return web.json_response(count)

    async def serve() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", export)
        app.router.add_get(COUNT, tell)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    uvloop.run(serve())


@contextlib.contextmanager
def watched(url: str) -> Iterator[None]:
    """Read the page's events in a thread. Raises StartError if the server does not send them."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    connection.request("GET", EVENTS)
    response = connection.getresponse()
    if response.status != 200:
        raise StartError("there is no page to measure", f"{EVENTS} answers {response.status}", "update the server")

    def read() -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # closed at the end
            while response.read1(1 << 16):
                pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        response.close()
        connection.close()


@dataclass
class Observed:
    """A running coordinator. ``switch`` turns its access lines on and off; ``receiver`` is the URL of what gets its
    traces."""

    target: Target
    pid: int
    switch: Connection
    receiver: str
    traced: int = 0
    """Requests whose trace must arrive."""

    def us_per_token(self, setting: Setting, asks: Sequence[PlannedRequest]) -> float:
        """Return the CPU microseconds of the coordinator per output token of ``asks``, which are sent together. Raises
        StartError if one fails, or its trace does not arrive."""
        self.switch.send(setting.access)
        target = replace(self.target, headers={"traceparent": f"{PARENT}-0{int(setting.traces)}"})
        with watched(target.url) if setting.page else contextlib.nullcontext():
            before = _cpu_seconds(self.pid)
            console = Console(stderr=True, highlight=False)
            run = run_now(target, asks, [0.0] * len(asks), console=console, title="streams", at_once=False)
            time.sleep(SETTLE_S)
            spent_s = _cpu_seconds(self.pid) - before
        self.traced += len(asks) * setting.traces
        if (count := HttpClient(self.receiver).get(COUNT)[1]) != self.traced:
            raise StartError("there is no figure", f"{count} of {self.traced} traces arrived", "give fewer streams")
        return 1e6 * spent_s / sum(record.output_tokens for record in whole(run).records)


@contextlib.contextmanager
def observed(model: str) -> Iterator[Observed]:
    """Run a coordinator for ``model`` with its mock workers and the receiver of its traces."""
    children = Children()
    theirs, switch = multiprocessing.Pipe(duplex=False)
    try:
        with tempfile.TemporaryDirectory() as folder, switch, theirs:
            receiver = children.start_and_receive(_receive)
            options = {"access_log": True, "otlp_traces_endpoint": receiver}
            target, pid = coordinating(children, model, _coordinate, options, str(Path(folder) / "log"), theirs)
            yield Observed(target, pid, switch, receiver)
    finally:
        children.end()


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of the threads of a process, which the kernel counts in nanoseconds there."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


def added(plain: Sequence[float], each: Sequence[float]) -> tuple[float, float]:
    """Return the percentage by which the mean of ``each`` exceeds that of ``plain``, and its standard error, from the
    differences within a round (0 for one round)."""
    differences = [100 * (value - base) / statistics.fmean(plain) for value, base in zip(each, plain, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return statistics.fmean(differences), error


def chosen(only: str | None) -> list[str]:
    """Return PLAIN and the settings that ``only`` names, all without it. Raises StartError for an unknown name."""
    names = [*SETTINGS] if only is None else [PLAIN, *(name.strip() for name in only.split(","))]
    for name in names:
        if name not in SETTINGS:
            raise StartError(f"cannot measure {name!r}", "there is no such setting", f"--only {','.join(SETTINGS)}")
    return list(dict.fromkeys(names))


def run(config: BenchObservabilityConfig) -> int:
    """Print the CPU time per token with each setting, and what it is more than without any. Returns the exit code."""
    names = chosen(config.only)
    model = config.model or str(builtin.path())
    ids = ordinary_ids(FileTokenizer(Path(model)))
    lengths = config.random_input_len, config.random_output_len
    found: dict[str, list[float]] = {name: [] for name in names}
    with observed(model) as system:
        system.us_per_token(SETTINGS[ALL], random_asks(ids, config.max_concurrency, *lengths, seed=0))  # warm
        for number in range(config.rounds):
            asks = random_asks(ids, config.max_concurrency, *lengths, seed=number + 1)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(system.us_per_token(SETTINGS[name], asks))
    print(f"{config.max_concurrency} streams of {config.random_output_len} tokens; CPU of the coordinator per token")
    for name, each in found.items():
        more = "" if name == PLAIN else "  {:+.1f} % ± {:.1f}".format(*added(found[PLAIN], each))
        print(f"  {name:14} {statistics.fmean(each):7.2f} us{more}")
    print(results.provenance_line())
    if config.save:
        load = {"streams": config.max_concurrency, "input": config.random_input_len, "output": config.random_output_len}
        results.save(Path(config.save), {"load": load, "us_per_token": found})
    return 0
