"""The line between the launcher and its coordinator: one JSON object per message, over a socket pair.

The coordinator has the door and its keys, the launcher the processes: a wish to change the pools is asked at the one
and carried out by the other. Every coordinator process gets a line of its own; a wish goes on when the line is cut.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable

import msgspec

from common.errors import RequestError, StartError
from deploy.status import Reason

Pools = tuple[int, int]
"""Prefill workers and decode workers."""


class Wish(msgspec.Struct, frozen=True):
    """So many workers of each role are wanted; None: as many as there are."""

    id: int
    prefill: int | None
    decode: int | None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a wish: the workers that there are now, or why not."""

    id: int
    prefill: int = 0
    decode: int = 0
    refused: Reason | None = None


class Asker:
    """The coordinator's end, used from its event loop."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count()

    async def __call__(self, prefill: int | None, decode: int | None) -> Pools:
        """The pools once they are as wished; RequestError with the launcher's reason if they cannot be."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._listener = asyncio.create_task(self._listen(reader))
        wish = Wish(next(self._ids), prefill, decode)
        answered = self._waiting[wish.id] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(msgspec.json.encode(wish) + b"\n")
            answer = await answered
        finally:
            self._waiting.pop(wish.id, None)
        if answer.refused is not None:
            error = answer.refused.error()
            text = f"{error.what}: {error.why}; {error.todo}."
            raise RequestError(text, status=409, code="cannot_scale")
        return answer.prefill, answer.decode

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            answer = msgspec.json.decode(line, type=Answer)
            waiting = self._waiting.get(answer.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        gone = Reason("the launcher is gone", "its line was closed", "start the server again")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(Answer(0, refused=gone))


async def serve(line: socket.socket, scale: Callable[[int | None, int | None], Awaitable[Pools]]) -> None:
    """The launcher's end: carries out wishes until the line is closed; those under way then go on."""
    reader, writer = await asyncio.open_connection(sock=line)
    under_way: set[asyncio.Task[None]] = set()

    async def carry_out(wish: Wish) -> None:
        try:
            answer = Answer(wish.id, *await scale(wish.prefill, wish.decode))
        except StartError as error:
            answer = Answer(wish.id, refused=Reason(error.what, error.why, error.todo))
        if not writer.is_closing():
            writer.write(msgspec.json.encode(answer) + b"\n")

    try:
        async for raw in reader:
            task = asyncio.create_task(carry_out(msgspec.json.decode(raw, type=Wish)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    except ConnectionError:
        pass  # the coordinator died; its successor gets a line of its own
    try:
        if under_way:
            await asyncio.wait(under_way)
    finally:
        for task in under_way:
            task.cancel()
        writer.close()
