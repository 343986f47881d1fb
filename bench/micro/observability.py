"""``tandem bench observability``: CPU time per token that tracing, the live page and access lines add to a coordinator.

The coordinator runs in a process of its own between a client and mock workers that compute nothing
(:mod:`bench.goals.mocks`). In each round every setting is measured once, with a new coordinator: streams that begin
together, and the CPU time of its process over all of their tokens. Traces go to a receiver in another process, which
decodes nothing; each request is traced, and that all traces arrived is checked. Access lines go to a file. The page is
its stream of events, read by one client.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from bench.load.processes import cpu_seconds, die_with_parent
from bench.load.run import run_now
from bench.load.tokens import FileTokenizer, ordinary_ids
from bench.load.workloads import PlannedRequest, random_asks
from common import builtin
from common.config.bench.observability import BenchObservabilityConfig
from common.config.coordinator import CoordinatorConfig
from common.core.errors import StartError
from common.net.http_client import HttpClient

PLAIN = "plain"
SETTLE_S = 3.0
"""Longest wait for the last traces."""
EVENTS = "/admin/events"
WARM = (8, 16)
"""Requests and output tokens before the measurement."""


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
    "access lines": Setting(access=True),
    "all three": Setting(traces=True, page=True, access=True),
}


def _coordinate(model: str, options: Mapping[str, Any], log: str, pipe: Connection) -> None:
    from common.platform.log import setup_logging
    from coordinator.app import run

    die_with_parent()
    config = CoordinatorConfig(model=model, port=0, control_port=0, expect_prefill=1, expect_decode=1, **options)
    with open(log, "w", encoding="utf-8") as stream:
        setup_logging("info", "json", "coordinator", stream)
        run(config, lambda url, address: pipe.send((url, address)))


def _receive(pipe: Connection) -> None:
    """Answer every export with success; send the URL through ``pipe``."""
    die_with_parent()

    async def export(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    async def serve() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", export)
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
            connection.sock.shutdown(2)
        thread.join(5)
        response.close()
        connection.close()


def measure(model: str, setting: Setting, asks: Sequence[PlannedRequest], warm: Sequence[PlannedRequest]) -> float:
    """Return the CPU microseconds of the coordinator per output token of ``asks``, which are sent together. ``warm``
    are sent before. Raises StartError if a request fails, or its trace does not arrive."""
    children, console = Children(), Console(stderr=True, highlight=False)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            options: dict[str, Any] = {"access_log": setting.access}
            if setting.traces:
                options["otlp_traces_endpoint"] = children.start_and_receive(_receive)
            target, pid = coordinating(children, model, _coordinate, options, str(Path(folder) / "log"))
            if setting.page:
                stack.enter_context(watched(target.url))
            send = partial(run_now, target, console=console, at_once=False)
            whole(send(warm, [0.0] * len(warm), title="warming up"))
            before = cpu_seconds(pid)
            records = whole(send(asks, [0.0] * len(asks), title=str(setting))).records
            if setting.traces:
                _all_sent(target.url, len(asks) + len(warm))
            return 1e6 * (cpu_seconds(pid) - before) / sum(record.output_tokens for record in records)
    finally:
        children.end()


def _all_sent(url: str, traces: int) -> None:
    """Wait until all traces have been sent, so that their cost is counted. Raises StartError if they are not."""
    deadline, sent = time.monotonic() + SETTLE_S, 0.0
    while sent < traces:
        if time.monotonic() > deadline:
            raise StartError("there is no figure", f"{sent:g} of {traces} traces were sent", "give fewer streams")
        time.sleep(0.1)
        page = HttpClient(url).read("/metrics")[1].decode()
        sent = sum(float(line.split()[-1]) for line in page.splitlines() if 'traces_total{outcome="sent"' in line)


def run(config: BenchObservabilityConfig) -> int:
    """Print the CPU time per token with each setting, and what it is more than without any. Returns the exit code."""
    model = config.model or str(builtin.path())
    ids = ordinary_ids(FileTokenizer(Path(model)))
    warm = random_asks(ids, WARM[0], config.random_input_len, WARM[1], seed=0)
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for number in range(config.rounds):
        lengths = config.random_input_len, config.random_output_len
        asks = random_asks(ids, config.max_concurrency, *lengths, seed=number + 1)
        turned = [*SETTINGS][number % len(SETTINGS) :] + [*SETTINGS][: number % len(SETTINGS)]
        for name in turned:
            found[name].append(measure(model, SETTINGS[name], asks, warm))
    plain = found[PLAIN]
    print(f"{config.max_concurrency} streams of {config.random_output_len} tokens; CPU of the coordinator per token")
    for name, each in found.items():
        shares = [100 * (value / base - 1) for value, base in zip(each, plain, strict=True)]
        more = (
            "" if name == PLAIN else f"  {statistics.median(shares):+.1f} % ({min(shares):+.1f} to {max(shares):+.1f})"
        )
        print(f"  {name:14} {statistics.median(each):7.2f} us{more}")
    print(results.provenance_line())
    if config.save:
        load = {"streams": config.max_concurrency, "input": config.random_input_len, "output": config.random_output_len}
        results.save(Path(config.save), {"load": load, "us_per_token": found})
    return 0
