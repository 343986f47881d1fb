"""The launcher's side of a process that an actor runs on another node: looks to
:class:`deploy.launcher.child.ChildProcess` like a process of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import msgspec

from common.core.errors import StartError
from deploy.launcher.status import Reason, Report
from deploy.ray.actor import Event, Launch

KILL_S = 5.0
"""Time within which a process that was sent SIGKILL must be gone; then its node counts as lost."""
RETRY_S = 1.0
"""Delay after which an actor that cannot be reached is asked again."""
_MEBIBYTE = 1 << 20


class ActorGone(Exception):
    """The actor has ended, and with it its process."""


class ActorUnreachable(Exception):
    """The actor could not be reached; it may still run."""


class Actor(Protocol):
    """The actor of a process, as :class:`deploy.ray.actor.ProcessHost`. Methods raise ActorGone or ActorUnreachable."""

    async def start(self, launch: Launch) -> int:
        """Start the process and return its process id."""

    async def poll(self, seen: int) -> list[Event]:
        """Return the events after number ``seen``."""

    async def write(self, data: bytes) -> None:
        """Write to the IPC socket of the process."""

    async def signal(self, number: int) -> None:
        """Send a signal to the process."""

    def end(self) -> None:
        """End the actor and its process. Returns without waiting."""


class RemoteProcess:
    """A process that an actor runs. ``place`` returns the actor and how to start the process; it may wait for room in
    the cluster, and raises StartError or ActorGone. ``ipc``: the child's end of the launcher's IPC, which stays the
    caller's."""

    def __init__(
        self, label: str, place: Callable[[], Awaitable[tuple[Actor, Launch]]], ipc: socket.socket | None = None
    ) -> None:
        self._label, self._place = label, place
        self._ipc = ipc.dup() if ipc is not None else None
        self.stdout: asyncio.StreamReader | None = asyncio.StreamReader(limit=_MEBIBYTE)
        self.reports = asyncio.StreamReader(limit=_MEBIBYTE)
        self.pid = 0
        self.returncode: int | None = None
        self._actor: Actor | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._living = self._keep(self._live())

    def send_signal(self, signal: int) -> None:
        """Send a signal to the process. One that has not been started yet is not started."""
        if self.returncode is not None:
            return
        if not self.pid:
            self._finish(-signal)
        elif signal == _SIGKILL:
            self._keep(self._kill())
        else:
            self._keep(self._signal(signal))

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(_SIGKILL)

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit code."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _live(self) -> None:
        try:
            self._report(Report("waiting", text="for a node of the Ray cluster"))
            self._actor, launch = await self._place()
            self.pid = await self._actor.start(launch)
            if self._ipc is not None:
                reader, self._writer = await asyncio.open_connection(sock=self._ipc)
                self._keep(self._pass_on(reader, self._actor))
            await self._follow(self._actor)
        except StartError as error:
            self._fail(error, 1)
        except (ActorGone, ActorUnreachable) as error:
            why = str(error) or "its node has failed, or Ray has ended it"
            self._fail(StartError(f"the actor of {self._label} is gone", why, "see the state of the Ray cluster"), -9)

    async def _follow(self, actor: Actor) -> None:
        """Pass on what the process does until it has ended. Raises ActorGone."""
        seen = 0
        while True:
            try:
                events = await actor.poll(seen)
            except ActorUnreachable:
                await asyncio.sleep(RETRY_S)
                continue
            for event in events:
                if event.number <= seen:
                    continue
                seen = event.number
                if event.kind == "exit":
                    self._finish(int(event.data))
                    return
                self._take(event)

    def _take(self, event: Event) -> None:
        if event.kind == "log" and self.stdout is not None:
            self.stdout.feed_data(event.data)
        elif event.kind == "status":
            self.reports.feed_data(event.data)
        elif event.kind == "ipc" and self._writer is not None and not self._writer.is_closing():
            self._writer.write(event.data)

    async def _pass_on(self, reader: asyncio.StreamReader, actor: Actor) -> None:
        with contextlib.suppress(ActorGone, ActorUnreachable, ConnectionError):
            while data := await reader.read(_MEBIBYTE >> 4):
                await actor.write(data)

    async def _signal(self, number: int) -> None:
        assert self._actor is not None
        with contextlib.suppress(ActorGone, ActorUnreachable):  # ActorGone also ends _follow
            await self._actor.signal(number)

    async def _kill(self) -> None:
        """Kill the process; give it up if its node does not say that it has ended."""
        try:
            async with asyncio.timeout(KILL_S):
                await self._signal(_SIGKILL)
                await self._ended.wait()
        except TimeoutError:
            self._finish(-_SIGKILL)

    def _report(self, report: Report) -> None:
        self.reports.feed_data(msgspec.json.encode(report) + b"\n")

    def _fail(self, error: StartError, code: int) -> None:
        self._report(Report(error=Reason.of(error)))
        self._finish(code)

    def _finish(self, code: int) -> None:
        """Report the end of the process, once, and end its actor."""
        if self.returncode is not None:
            return
        self.returncode = code
        for pipe in (self.stdout, self.reports):
            if pipe is not None:
                pipe.feed_eof()
        if self._writer is not None:
            self._writer.close()
        elif self._ipc is not None:
            self._ipc.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._actor is not None:
            self._actor.end()
        self._ended.set()


_SIGKILL = int(signal.SIGKILL)
