"""The actor of one process: starts it on the actor's node and passes its pipes, signals and exit code on.

The process is a child of the actor and dies with it. Its launch message, which has its keys, arrives as the argument of
one call, goes into the process's standard input, and is kept nowhere.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal, NamedTuple, TypeVar

from common.net.messages import PROTOCOL
from deploy.launcher import process, status

MAX_LINES = 1000
"""Maximum number of log lines that wait for the launcher. Older ones are dropped; Ray's log file of the actor has
all."""
MAX_BYTES = 1 << 16
"""Bytes after which an answer has no further event. Ray puts answers of 100 KiB and more into its object store."""
_PART = 1 << 14
T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """How to start a process: its launch message, variables to add to the environment of the node, its working
    directory (None: the actor's), and whether it gets an IPC socket. Neither message nor variables are shown."""

    message: bytes = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    cwd: str | None = None
    ipc: bool = False


class NodeFacts(NamedTuple):
    """The node of an actor: its id in Ray, the address at which other nodes reach it, and the version of Tandem."""

    id: str
    address: str
    version: str


class Event(NamedTuple):
    """What a process did: the number of the event, and a line of its output or status pipe, bytes of its IPC socket, or
    its exit code in decimal digits."""

    number: int
    kind: Literal["log", "status", "ipc", "exit"]
    data: bytes


def version() -> str:
    """Return the version of Tandem and of its wire protocol."""
    try:
        tandem = metadata.version("tandem")
    except metadata.PackageNotFoundError:  # run from a source tree
        tandem = "source"
    return f"{tandem}, protocol {PROTOCOL}"


class ProcessHost:
    """Runs one process. All methods run in one event loop, and the end of its thread is that of the process
    (:mod:`common.platform.parent`)."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._events: deque[Event] = deque()
        self._number = self._dropped = 0
        self._more = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None
        self._ipc: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, launch: Launch) -> int:
        """Start the process and return its process id."""
        ours = theirs = None
        if launch.ipc:
            ours, theirs = socket.socketpair()
        try:
            environment = {**os.environ, **launch.environment}
            child, reports = await process.spawn(self._label, launch.message, environment, theirs, cwd=launch.cwd)
        finally:
            if theirs is not None:
                theirs.close()
        assert child.stdout is not None
        self._child = child
        pumps = [self._lines("log", child.stdout), self._lines("status", reports)]
        if ours is not None:
            reader, self._ipc = await asyncio.open_connection(sock=ours)
            pumps.append(self._bytes(reader))
        self._keep(self._watch(child, [asyncio.create_task(pump) for pump in pumps]))
        return child.pid

    async def poll(self, seen: int) -> list[Event]:
        """Return events after number ``seen``, the oldest first, as soon as there are any. Forgets those up to
        ``seen``."""
        while self._events and self._events[0].number <= seen:
            self._events.popleft()
        while not self._events:
            self._more.clear()
            await self._more.wait()
        size = itertools.accumulate(len(event.data) for event in self._events)
        return [event for event, so_far in zip(self._events, size, strict=True) if so_far - len(event.data) < MAX_BYTES]

    async def write(self, data: bytes) -> None:
        """Write to the IPC socket of the process."""
        if self._ipc is not None and not self._ipc.is_closing():
            self._ipc.write(data)

    async def signal(self, number: int) -> None:
        """Send a signal to the process if it runs."""
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(number)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _add(self, kind: Literal["log", "status", "ipc", "exit"], data: bytes) -> None:
        self._number += 1
        self._events.append(Event(self._number, kind, data))
        if kind == "log" and len(self._events) > MAX_LINES:
            oldest = next(event for event in self._events if event.kind == "log")
            self._events.remove(oldest)
        self._more.set()

    async def _lines(self, kind: Literal["log", "status"], pipe: asyncio.StreamReader) -> None:
        async for line in pipe:
            shown = line.decode(errors="replace").rstrip() if kind == "log" else self._end_of_start(line)
            if shown:
                print(shown, flush=True)  # into Ray's log file of this actor
            self._add(kind, line)

    def _end_of_start(self, line: bytes) -> str:
        """Return how a status report says that the start has ended; "" for others."""
        if (report := status.read(line)) is None:
            return ""
        if report.error is not None:
            return f"{self._label} cannot serve: {report.error.error()}"
        return f"{self._label} is ready" if report.ready is not None else ""

    async def _bytes(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_PART):
            self._add("ipc", data)

    async def _watch(self, child: asyncio.subprocess.Process, pumps: list[asyncio.Task[None]]) -> None:
        code = await child.wait()
        _, open_still = await asyncio.wait(pumps, timeout=1.0)  # a grandchild may hold the pipes open
        for pump in open_still:
            pump.cancel()
        if self._ipc is not None:
            self._ipc.close()
        self._add("exit", str(code).encode())


class ProcessActor:
    """The :class:`ProcessHost` of one process as a Ray actor, whose calls arrive in several threads. It has an event
    loop of its own: Ray's are uvloop's where that is installed, which starts no process in a group of its own."""

    def __init__(self, label: str) -> None:
        self._label, self._host = label, ProcessHost(label)
        if sys.version_info < (3, 14):  # later ones need no watcher of the policy
            asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._loop = asyncio.SelectorEventLoop()
        threading.Thread(target=self._loop.run_forever, name="process", daemon=True).start()

    def __repr__(self) -> str:
        return f"tandem {self._label}"  # Ray shows it before lines of the actor's log

    def node(self) -> NodeFacts:
        """Return the facts of this node."""
        import ray

        return NodeFacts(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), version())

    def start(self, launch: Launch) -> int:
        """As :meth:`ProcessHost.start`."""
        return self._run(self._host.start(launch))

    def poll(self, seen: int) -> list[Event]:
        """As :meth:`ProcessHost.poll`."""
        return self._run(self._host.poll(seen))

    def write(self, data: bytes) -> None:
        """As :meth:`ProcessHost.write`."""
        self._run(self._host.write(data))

    def signal(self, number: int) -> None:
        """As :meth:`ProcessHost.signal`."""
        self._run(self._host.signal(number))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
