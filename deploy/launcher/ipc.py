"""The IPC between the launcher and its coordinator: one JSON object per line over a socket pair.

The coordinator serves the HTTP API and the launcher owns the processes. The coordinator sends three messages: a request
to resize the pools, a report that a worker hangs, and a report that prompts pile up or no longer do. The launcher
answers requests, and reports each worker process that has ended. Each coordinator process gets a connection of its own.
A scale request continues when its connection is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from common.core.errors import RequestError, StartError
from common.core.ids import WorkerName
from deploy.launcher.status import Reason

Pools = tuple[int, int]
"""Numbers of prefill and decode workers."""


class ScaleRequest(msgspec.Struct, frozen=True, tag="Wish"):
    """Requests the given number of workers of each role. None leaves a pool as it is."""

    id: int
    prefill: int | None
    decode: int | None


class HangReport(msgspec.Struct, frozen=True, tag="Hang"):
    """Reports that the worker ``name``, process ``pid``, hangs and no longer holds requests. There is no reply: the
    replacement announces itself to the coordinator with Hello."""

    name: str
    pid: int
    why: str


class QueuePressureReport(msgspec.Struct, frozen=True, tag="Piling"):
    """Reports that prompts begin to pile up (``deep``) or no longer do. There is no reply."""

    deep: bool


class AbsenceReport(msgspec.Struct, frozen=True, tag="Absence"):
    """Reports that the process of the worker ``name`` has ended (``why``) and is started again in ``restart_in_s``
    seconds. ``why`` is "" if the worker is not to run any more."""

    name: WorkerName
    why: str
    restart_in_s: float


class Launcher(Protocol):
    """The launcher as seen by :func:`serve`, which calls it for each message."""

    followers: set[Callable[[AbsenceReport], None]]
    """To be called with each AbsenceReport."""

    async def scale(self, prefill: int | None, decode: int | None) -> Pools:
        """Resize the pools and return their sizes. Raises StartError if that is not possible."""

    def replace(self, name: str, pid: int, why: str) -> None:
        """Kill the worker ``name`` if its process is still ``pid``, and start another."""

    def place_coordinator(self, deep: bool) -> None:
        """Pin the coordinator to its cores for when prompts pile up (``deep``), or for when they do not."""

    def serving(self) -> dict[WorkerName, int]:
        """Return the names and process ids of the ready workers."""


class ScaleReply(msgspec.Struct, frozen=True, omit_defaults=True, tag="Scaled"):
    """The reply to a ScaleRequest: the new pool sizes, or why the request was refused."""

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
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: dict[int, asyncio.Future[ScaleReply]] = {}
        self._ids = itertools.count()
        self._follow: Callable[[AbsenceReport], None] | None = None

    def follow(self, follow: Callable[[WorkerName, str, float], None]) -> None:
        """Call ``follow`` with the name, reason and restart delay in seconds of each worker process that ends."""
        self._follow = lambda report: follow(report.name, report.why, report.restart_in_s)
        self._keep(asyncio.create_task(self._opened_writer()))

    async def scale(self, prefill: int | None, decode: int | None) -> Pools:
        """Resize the pools and return their sizes. Raises RequestError 409 with the launcher's reason if that is not
        possible."""
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
        """Ask the launcher to replace a worker that hangs. Returns without waiting."""
        self._keep(asyncio.create_task(self._say(HangReport(name, pid, why))))

    def report_queue_pressure(self, deep: bool) -> None:
        """Report to the launcher that prompts begin to pile up, or no longer do. Returns without waiting."""
        self._keep(asyncio.create_task(self._say(QueuePressureReport(deep))))

    async def _say(self, message: ScaleRequest | HangReport | QueuePressureReport) -> None:
        (await self._opened_writer()).write(msgspec.json.encode(message) + b"\n")

    async def _opened_writer(self) -> asyncio.StreamWriter:
        """Return the writer of the connection, which is opened when it is needed first."""
        if self._opened is None:
            self._opened = asyncio.create_task(self._open())
        return await asyncio.shield(self._opened)

    async def _open(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(sock=self._socket)
        self._keep(asyncio.create_task(self._listen(reader, writer)))
        return writer

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            answer = msgspec.json.decode(line, type=ScaleReply | AbsenceReport)
            if isinstance(answer, AbsenceReport):
                if self._follow is not None:
                    self._follow(answer)
                continue
            waiting = self._waiting.get(answer.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        writer.close()
        gone = Reason("the launcher is gone", "its connection was closed", "start the server again")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(ScaleReply(0, refused=gone))


async def serve(connection: socket.socket, launcher: Launcher) -> None:
    """The launcher's end: handle messages until the connection is closed, then wait for the scale requests still in
    progress."""
    reader, writer = await asyncio.open_connection(sock=connection)
    under_way: set[asyncio.Task[None]] = set()

    def tell(report: AbsenceReport) -> None:
        if not writer.is_closing():
            writer.write(msgspec.json.encode(report) + b"\n")

    launcher.followers.add(tell)

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
        pass  # the coordinator died; its replacement gets a connection of its own
    launcher.followers.discard(tell)
    launcher.place_coordinator(False)  # a new coordinator starts without a queue
    try:
        if under_way:
            await asyncio.wait(under_way)
    finally:
        for task in under_way:
            task.cancel()
        writer.close()
