"""Clients that disconnect, each in a phase of its request that a worker, a proxy or the coordinator has reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from common.core.errors import WireError
from kvtransfer.frames import FrameHeader
from tests.chaos.cluster import ChaosCluster, ChaosWorker
from tests.chaos.proxy import Parts, is_frame
from tests.chaos.request import ChaosRequest

QUEUED, COMPUTED, SHIPPED, STREAMED = "while queued", "while computed", "while shipped", "while streamed"
LONGEST_S = 60.0
"""A longer wait has another cause than queueing, and fails."""


class Leaving:
    """Tracks the phases of the requests in ``cluster``, for clients that disconnect in a given phase."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self._house = cluster
        self._seeds: dict[str, int] = {}
        self._taken: set[int] = set()
        self._reached: dict[tuple[str, int], asyncio.Event] = {}
        cluster.listeners.append(self._on_event)
        for worker in cluster.by_role("decode"):
            worker.data.watch = self._passes

    def moments(self) -> list[Callable[[ChaosRequest], Awaitable[str]]]:
        """Return the waits that a client may choose from; each returns the phase in which the request then is."""
        return [self._queued, partial(self._in, COMPUTED), partial(self._in, SHIPPED), self._streamed]

    def _on_event(self, worker: ChaosWorker, event: dict[str, Any]) -> None:
        if event["event"] == "taken":
            self._seeds[event["request"]] = event["seed"]
            self._taken.add(event["seed"])
        elif event["event"] == "step" and worker.role == "prefill":
            for request, *_ in event["segments"]:
                self._note(COMPUTED, request)

    def _passes(self, parts: Parts) -> None:
        if is_frame(parts):
            try:
                self._note(SHIPPED, FrameHeader.unpack(parts[0]).transfer.request.hex())
            except WireError:  # broken on purpose before it reached this point
                return

    def _note(self, phase: str, request: str) -> None:
        if (seed := self._seeds.get(request)) is not None and (event := self._reached.get((phase, seed))) is not None:
            event.set()

    async def _queued(self, ask: ChaosRequest) -> str:
        """Wait until the request is queued: it was sent, the coordinator then reports a waiting request, and no worker
        has accepted it."""
        await ask.sent.wait()

        async def waits() -> bool:
            return (await self._house.requests())["waiting"] > 0 or ask.seed in self._taken

        await self._house.poll(waits, LONGEST_S, "the request is queued")
        if ask.seed in self._taken:
            return await self._streamed(ask)
        return QUEUED

    async def _in(self, phase: str, ask: ChaosRequest) -> str:
        """Wait until a prefill worker begins to compute the prompt, or a frame of its KV passes the proxy. The phase is
        ``STREAMED`` if a token has arrived already."""
        event = self._reached[phase, ask.seed] = asyncio.Event()
        try:
            await event.wait()
        finally:
            del self._reached[phase, ask.seed]
        return STREAMED if ask.ids else phase

    async def _streamed(self, ask: ChaosRequest) -> str:
        count = self._house.rng.randrange(1, 8)
        while len(ask.ids) < count:
            ask.came.clear()
            await ask.came.wait()
        return STREAMED
