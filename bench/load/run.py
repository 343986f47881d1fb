"""One run of an open-loop load: each request is sent at its time, independent of earlier ones, and recorded.

Send times are absolute, so a late wake-up delays one request and not all that follow. ``max_concurrency`` makes the
loop half open: requests beyond it wait in the client, and their waiting time is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvloop
from rich.console import Console

from bench.load.client import Record, Target
from bench.load.progress import Bar
from bench.load.workloads import PlannedRequest
from common.core.errors import StartError
from common.platform import threads

FEW_CORES = 4
"""Up to so many cores, a server on the same machine leaves none idle, and real-time priority helps the client. With
more, it would hurt: Linux moves a normal thread to an idle core, but not a real-time thread."""
UNSERVED = "correct the flags, or wait if the server is still starting"
"""Advice in the error for a server that fails the first request."""


@dataclass(frozen=True, slots=True)
class Run:
    """The records of one run, in the order of the asks, and its duration from the start to the last token."""

    records: list[Record]
    seconds: float
    began_at: float
    """Start of the run, on the clock of the records."""


async def run_load(
    target: Target,
    asks: Sequence[PlannedRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    warm: Sequence[PlannedRequest] = (),
    console: Console | None = None,
    title: str = "requests",
) -> Run:
    """Send ``asks[i]`` at ``times[i]`` seconds after the start, and record the answers.

    The ``warm`` requests are sent before the start, one after another, and not recorded. Raises StartError if the first
    of them fails, since all others would fail too."""
    bodies = [target.body(ask) for ask in asks]
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    async with target.session() as session:
        for index, ask in enumerate(warm):
            record = Record(0.0, 0)
            await target.send(session, target.body(ask), record)
            if record.error and not index:
                raise StartError(f"{target.url} does not serve this workload", record.error, UNSERVED)
        with _quiet(), Bar(console, title, len(asks)) as bar:
            began = time.perf_counter()
            records = [Record(began + at, ask.prompt_tokens) for at, ask in zip(times, asks, strict=True)]

            async def one(body: bytes, record: Record) -> None:
                async with places:
                    await target.send(session, body, record)
                bar.advance()

            async with asyncio.TaskGroup() as group:
                for body, record in zip(bodies, records, strict=True):
                    if (left := record.due_at - time.perf_counter()) > 0:
                        await asyncio.sleep(left)
                    group.create_task(one(body, record))
            return Run(records, time.perf_counter() - began, began)


def run_now(
    target: Target,
    asks: Sequence[PlannedRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    warm: Sequence[PlannedRequest] = (),
    console: Console | None = None,
    title: str = "requests",
    at_once: bool = True,
) -> Run:
    """Run :func:`run_load` in an event loop of its own, on a thread with raised priority.

    With ``at_once``, on few cores and where the user is permitted, the priority is real-time, so that it preempts the
    server's compute threads. A client usually has a machine of its own; its waiting time for a core must not be counted
    as the server's."""
    load = run_load(target, asks, times, max_concurrency=max_concurrency, warm=warm, console=console, title=title)
    few = sys.platform == "linux" and len(os.sched_getaffinity(0)) <= FEW_CORES
    with threads.answering(threads.URGENT, at_once=at_once and few):
        return uvloop.run(load)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection, whose pauses would be measured as server time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
