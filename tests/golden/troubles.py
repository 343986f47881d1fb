"""Faults in a server under test, by the names that :data:`tests.golden.requests.SERVERS` uses.

Like ``adapter``, this module may import modules under test.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from aiohttp import web

# -- code that fails --------------------------------------------------------------------------------------------------


def _fails(where: str, error: type[Exception] = ZeroDivisionError) -> Callable[[Any], Any]:
    return lambda cluster: mock.patch(where, side_effect=error)


def _second_token_fails(cluster: Any) -> Any:
    from coordinator.api.choice import Choice

    original = Choice.feed

    def feed(self: Any, ids: Sequence[int], *rest: Any) -> Any:
        if self.ids:
            raise ZeroDivisionError
        return original(self, ids, *rest)

    return mock.patch.object(Choice, "feed", feed)


# -- bounds that are reached ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_memory_for_bodies(cluster: Any) -> Iterator[None]:
    budgets = cluster.services.bodies.budgets
    budgets.update(dict.fromkeys(budgets, 0))
    yield


@contextlib.contextmanager
def _full_lanes(cluster: Any) -> Iterator[None]:
    from coordinator.text.lanes import Bounds

    lanes = cluster.services.model._lanes
    for lane in (lanes._short, lanes._bodies, lanes._long):
        lane._bounds = Bounds(texts=0, chars=0)
    yield


@contextlib.contextmanager
def _ended_feed(cluster: Any) -> Iterator[None]:
    cluster.services.feed.close()
    yield


def _no_room_for_pages(cluster: Any) -> Any:
    return mock.patch("coordinator.live.feed.MAX_LISTENERS", 0)


@contextlib.contextmanager
def _slow_queue(cluster: Any) -> Iterator[None]:
    """Queue one request that would take longer than any request may wait."""
    admission = cluster.dispatcher.admission
    admission.back(10**6)
    admission._rate = 1.0
    yield
    admission.leave(10**6, 0.0, placed=False)


# -- workers that go --------------------------------------------------------------------------------------------------


async def _busy_worker_dies(cluster: Any) -> None:
    while True:
        for worker in cluster.workers:
            if worker.alive and worker.busy:
                worker.stop()
        await asyncio.sleep(0.005)


async def _connections_of_busy_worker_break(cluster: Any) -> None:
    dispatcher = cluster.dispatcher
    while True:
        for record in list(dispatcher.records.values()):
            for worker in list(dispatcher.registry):
                if worker.id in record.progress.workers and worker.answered >= record.asked:
                    dispatcher.gateway._lose(worker)
        await asyncio.sleep(0.002)


def _is_decoding(records: dict[Any, Any]) -> bool:
    return any(each.output_length and each.progress.state.value == "decoding" for each in records.values())


async def _a_smaller_decode_worker_comes_instead(cluster: Any) -> None:
    from tests.unit.coordinator.fake_cluster import until

    records = cluster.dispatcher.records
    with mock.patch("coordinator.requests.wait_limits.WORKERLESS_WAIT_S", 0.3):
        await until(lambda: _is_decoding(records), "a request is decoded", 600.0)
        first = next(worker for worker in cluster.workers if worker.role == "decode")
        await cluster.add("decode", changes={"kv_blocks": 10})
        first.stop()
        await until(lambda: not records, "it ends", 60.0)


FAULTS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "a handler fails": _fails("coordinator.api.service.ServedModel.counted"),
    "a handler refuses": _fails("coordinator.api.service.ServedModel.counted", web.HTTPServiceUnavailable),
    "no request gets an id": _fails("coordinator.http.middleware._request_id"),
    "the second token cannot be written": _second_token_fails,
    "no end can be written": _fails("coordinator.http.reply.Reply.done"),
    "no memory for bodies": _no_memory_for_bodies,
    "full lanes": _full_lanes,
    "a slow queue": _slow_queue,
    "the feed has ended": _ended_feed,
    "no room for pages": _no_room_for_pages,
}
EVENTS: dict[str, Callable[[Any], Awaitable[None]]] = {
    "the busy worker dies": _busy_worker_dies,
    "connections break": _connections_of_busy_worker_break,
    "a smaller decode worker": _a_smaller_decode_worker_comes_instead,
}


@contextlib.asynccontextmanager
async def trouble(name: str, cluster: Any) -> AsyncIterator[None]:
    """Inject the trouble ``name`` ("": none) into ``cluster`` for the duration of the block."""
    with FAULTS[name](cluster) if name in FAULTS else contextlib.nullcontext():
        task = asyncio.ensure_future(EVENTS[name](cluster)) if name in EVENTS else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
