"""The IPC between the launcher and its coordinator: one JSON object per message, over a socket pair.

The coordinator has the door and its keys, the launcher the processes: a request to change the pools is asked at the one
and carried out by the other. So is that a worker's process is no good any more, and that prompts pile up, which only
the coordinator sees. Every coordinator process gets a connection of its own; a request goes on when it is cut.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Protocol

import msgspec

from common.core.errors import RequestError, StartError
from common.core.ids import WorkerName
from deploy.launcher.status import Reason

Pools = tuple[int, int]
"""Prefill workers and decode workers."""


class ScaleRequest(msgspec.Struct, frozen=True, tag="Wish"):
    """So many workers of each role are wanted; None: as many as there are."""

    id: int
    prefill: int | None
    decode: int | None


class HangReport(msgspec.Struct, frozen=True, tag="Hang"):
    """The worker ``name``, process ``pid``, hangs and holds nothing any more. No answer: who is back says Hello."""

    name: str
    pid: int
    why: str


class QueuePressureReport(msgspec.Struct, frozen=True, tag="Piling"):
    """Prompts begin to pile up, or no longer do. No answer."""

    deep: bool


class Launcher(Protocol):
    """Carries out what is asked over IPC."""

    async def scale(self, prefill: int | None, decode: int | None) -> Pools:
        """Makes the pools that large and returns their sizes; StartError says why not."""

    def replace(self, name: str, pid: int, why: str) -> None:
        """Ends a worker that hangs, if that process still is its, and starts another."""

    def place_coordinator(self, deep: bool) -> None:
        """Gives the coordinator the cores that are its while prompts pile up (``deep``), or while they do not."""

    def serving(self) -> dict[WorkerName, int]:
        """The workers that have become ready, and their process ids."""


class ScaleReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a scale request: the workers that there are now, or why not."""

    id: int
    prefill: int = 0
    decode: int = 0
    refused: Reason | None = None


class SupervisorIPC:
    """The coordinator's end, used from its event loop."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._opened: asyncio.Task[asyncio.StreamWriter] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[ScaleReply]] = {}
        self._ids = itertools.count()

    async def scale(self, prefill: int | None, decode: int | None) -> Pools:
        """The pools once they are as wished; RequestError with the launcher's reason if they cannot be."""
        request = ScaleRequest(next(self._ids), prefill, decode)
        answered = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        try:
            await self._say(request)
            answer = await answered
        finally:
            self._waiting.pop(request.id, None)
        if answer.refused is not None:
            error = answer.refused.error()
            text = f"{error.what}: {error.why}; {error.todo}."
            raise RequestError(text, status=409, code="cannot_scale")
        return answer.prefill, answer.decode

    def replace(self, name: str, pid: int, why: str) -> None:
        """Has the launcher replace a worker that hangs; returns at once."""
        self._keep(asyncio.create_task(self._say(HangReport(name, pid, why))))

    def report_queue_pressure(self, deep: bool) -> None:
        """Tells the launcher that prompts begin to pile up, or no longer do; returns at once."""
        self._keep(asyncio.create_task(self._say(QueuePressureReport(deep))))

    async def _say(self, message: ScaleRequest | HangReport | QueuePressureReport) -> None:
        if self._opened is None:
            self._opened = asyncio.create_task(self._open())
        writer = await asyncio.shield(self._opened)
        writer.write(msgspec.json.encode(message) + b"\n")

    async def _open(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(sock=self._socket)
        self._keep(asyncio.create_task(self._listen(reader, writer)))
        return writer

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            answer = msgspec.json.decode(line, type=ScaleReply)
            waiting = self._waiting.get(answer.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        writer.close()
        gone = Reason("the launcher is gone", "its line was closed", "start the server again")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(ScaleReply(0, refused=gone))


async def serve(connection: socket.socket, launcher: Launcher) -> None:
    """The launcher's end: carries out requests until the connection is closed; those under way then go on."""
    reader, writer = await asyncio.open_connection(sock=connection)
    under_way: set[asyncio.Task[None]] = set()

    async def carry_out(request: ScaleRequest) -> None:
        try:
            answer = ScaleReply(request.id, *await launcher.scale(request.prefill, request.decode))
        except StartError as error:
            answer = ScaleReply(request.id, refused=Reason(error.what, error.why, error.todo))
        if not writer.is_closing():
            writer.write(msgspec.json.encode(answer) + b"\n")

    try:
        async for raw in reader:
            said = msgspec.json.decode(raw, type=ScaleRequest | HangReport | QueuePressureReport)
            if isinstance(said, HangReport):
                launcher.replace(said.name, said.pid, said.why)
            elif isinstance(said, QueuePressureReport):
                launcher.place_coordinator(said.deep)
            else:
                task = asyncio.create_task(carry_out(said))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
    except ConnectionError:
        pass  # the coordinator died; its successor gets a connection of its own
    launcher.place_coordinator(False)  # its successor has no backlog
    try:
        if under_way:
            await asyncio.wait(under_way)
    finally:
        for task in under_way:
            task.cancel()
        writer.close()
