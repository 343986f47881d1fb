"""A TCP proxy between two ZeroMQ sockets that breaks what passes through it, and counts what it broke.

A :class:`Proxy` stands in front of one listening socket. Its switches act on bytes (hold, black hole, latency,
bandwidth, slicing, severing, reset, half-close), its :class:`Rule` objects on whole ZeroMQ messages (drop, duplicate,
reorder, corrupt, truncate). ``done`` counts what was done, by the name of the fault: a test that wants a fault looks
that it happened. Everything can be limited to the connections of one dialling peer by its ZeroMQ identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from common.net.sockets import BEAT_SUFFIX
from common.net.wire import DIGEST_BYTES
from kvtransfer.frames import MAGIC

GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_ARRAY16 = b"\xdc"
"""Begins a MessagePack array of more than 15 elements; their number follows."""
_RESET = struct.pack("ii", 1, 0)
CHUNK = 1 << 16

Parts = list[bytes]
Direction = Literal["up", "down"]
"""``up`` is from the side that dialled to the side that listens."""
Action = Literal["drop", "duplicate", "reorder", "corrupt", "truncate"]


def is_frame(parts: Parts) -> bool:
    """A frame of KV: header and payload."""
    return len(parts) == 2 and parts[0].startswith(MAGIC)


def is_a(*tags: str) -> Callable[[Parts], bool]:
    """A message of one of these types (its tag is the first element of a MessagePack array behind the digest)."""
    starts = tuple(bytes([0xA0 | len(tag)]) + tag.encode() for tag in tags)

    def match(parts: Parts) -> bool:
        if len(parts) != 1:
            return False
        head = 3 if parts[0][DIGEST_BYTES : DIGEST_BYTES + 1] == _ARRAY16 else 1
        return parts[0][DIGEST_BYTES + head :].startswith(starts)

    return match


@dataclass
class Rule:
    """What happens to messages that ``match``: to each with probability ``rate``, at most ``limit`` times."""

    action: Action
    match: Callable[[Parts], bool]
    direction: Direction = "up"
    rate: float = 1.0
    limit: int | None = None
    hits: int = 0

    def strikes(self, parts: Parts, direction: Direction, rng: random.Random) -> bool:
        if direction != self.direction or (self.limit is not None and self.hits >= self.limit):
            return False
        if not self.match(parts) or rng.random() >= self.rate:
            return False
        self.hits += 1
        return True


class _Parser:
    """Cuts one direction of a ZMTP 3 connection into messages; whatever is no message passes as it is."""

    def __init__(self) -> None:
        self.identity = ""
        self._buffer = bytearray()
        self._greeting = GREETING_BYTES
        self._parts: Parts = []

    def feed(self, data: bytes) -> Iterator[bytes | Parts]:
        """Raw bytes (greeting and commands) or the parts of a message, in order."""
        self._buffer += data
        if self._greeting and self._buffer:  # in pieces as they come: each side waits for the other's first ones
            piece = self._take(min(self._greeting, len(self._buffer)))
            self._greeting -= len(piece)
            yield piece
        while not self._greeting and (head := self._head()) is not None:
            start, size, flags = head
            raw = self._take(start + size)
            if flags & _COMMAND:
                self._read_identity(raw[start:])
                yield raw
                continue
            self._parts.append(raw[start:])
            if not flags & _MORE:
                parts, self._parts = self._parts, []
                yield parts

    def _head(self) -> tuple[int, int, int] | None:
        """(bytes before the body, bytes of the body, flags) of the next frame if it is here as a whole."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        start = 9 if buffer[0] & _LONG else 2
        if len(buffer) < start:
            return None
        size = int.from_bytes(buffer[1:start], "big")
        return (start, size, buffer[0]) if len(buffer) >= start + size else None

    def _take(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _read_identity(self, command: bytes) -> None:
        at = command.find(b"Identity")
        if command.startswith(b"\x05READY") and at >= 0:
            size = int.from_bytes(command[at + 8 : at + 12], "big")
            self.identity = command[at + 12 : at + 12 + size].decode(errors="replace")


def framed(parts: Parts) -> bytes:
    """A message as ZMTP bytes."""
    out = bytearray()
    for index, part in enumerate(parts):
        more = _MORE if index + 1 < len(parts) else 0
        if len(part) > 255:
            out += bytes([more | _LONG]) + len(part).to_bytes(8, "big")
        else:
            out += bytes([more, len(part)])
        out += part
    return bytes(out)


@dataclass(eq=False)
class _Connection:
    """One dialled connection and its twin to the target."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    target_reader: asyncio.StreamReader
    target_writer: asyncio.StreamWriter
    identity: str = ""
    severed: Direction | None = None
    """In which nothing of it arrives any more."""

    def writers(self) -> tuple[asyncio.StreamWriter, asyncio.StreamWriter]:
        return self.writer, self.target_writer

    def reset(self) -> None:
        for writer in self.writers():
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


@dataclass(eq=False)
class Proxy:
    """Listens on a free port of loopback; forwards to ``target`` (host:port) once it is known.

    ``hold``: bytes wait here (nothing is lost, connections stay). ``black_hole``: bytes are taken and vanish, those
    of new connections. ``only``: switches and rules concern only peers whose identity begins so. ``watch`` is called
    with each message that comes.
    """

    rng: random.Random = field(default_factory=random.Random)
    rules: list[Rule] = field(default_factory=list)
    black_hole: bool = False
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    slice_bytes: int = 0
    only: str = ""
    watch: Callable[[Parts], None] | None = None
    done: Counter[str] = field(default_factory=Counter)
    port: int = 0

    async def start(self) -> Proxy:
        self._go = asyncio.Event()
        self._go.set()
        self._aimed = asyncio.Event()
        self._changed = asyncio.Event()
        self._target = ("", 0)
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._swallowed: set[asyncio.StreamWriter] = set()
        self._hold_at: Callable[[Parts], bool] | None = None
        self._held_at = asyncio.Event()
        self._server = await asyncio.start_server(self._dialled, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def aim(self, target: str) -> None:
        """Where connections go from now on: ``host:port`` or ``tcp://host:port``, IPv4."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host.strip("[]").removeprefix("::ffff:"), int(port))
        self._aimed.set()

    async def close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.reset()
        await self._server.wait_closed()

    # -- switches -----------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        self._go.clear()

    def hold_at(self, match: Callable[[Parts], bool]) -> asyncio.Event:
        """Holds from the first message on that matches; the event tells when it has come."""
        self._hold_at = match
        self._held_at = asyncio.Event()
        return self._held_at

    def release(self) -> None:
        self._hold_at = None
        self._go.set()

    def reset(self, peer: str = "") -> int:
        """Resets every connection, or those of one dialling peer; how many there were."""
        struck = [each for each in self._connections if each.identity.startswith(peer or self.only)]
        for connection in struck:
            connection.reset()
        self.done["reset"] += len(struck)
        return len(struck)

    def sever(self, direction: Direction, *, beats: bool) -> int:
        """From now on the connections over which hearts ``beats``, or over which all else is said, carry nothing in
        ``direction``; whoever dials anew gets another. How many there were."""
        struck = [each for each in self._connections if each.identity.endswith(BEAT_SUFFIX) is beats]
        for connection in struck:
            connection.severed = direction
        return len(struck)

    def half_close(self) -> int:
        """Ends one direction of every connection: the listener reads end of file, its answers still pass."""
        struck = [each for each in self._connections if each.identity.startswith(self.only)]
        for connection in struck:
            if connection.target_writer.can_write_eof() and not connection.target_writer.is_closing():
                connection.target_writer.write_eof()
                self.done["half_close"] += 1
        return len(struck)

    def heal(self) -> None:
        """No faults any more. What vanished is lost, so connections are cut and dialled anew."""
        swallowed = self.black_hole or any(each.severed for each in self._connections)
        self.rules.clear()
        self.black_hole, self.only = False, ""
        self.latency_s = self.bytes_per_s = 0.0
        self.slice_bytes = 0
        self.release()
        if swallowed:
            for connection in list(self._connections):
                connection.reset()
            for writer in self._swallowed:
                writer.transport.abort()

    # -- forwarding ---------------------------------------------------------------------------------------------------

    async def _dialled(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except OSError as error:
            self.done[f"failed: {error}"] += 1
        except asyncio.CancelledError:
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._aimed.wait()
        if self.black_hole and not self.only:
            self._swallowed.add(writer)
            try:
                while data := await reader.read(CHUNK):
                    self.done["black_hole"] += len(data)
            finally:
                self._swallowed.discard(writer)
            return
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        connection = _Connection(reader, writer, target_reader, target_writer)
        self._connections.add(connection)
        self.done["connections"] += 1
        pumps = [
            asyncio.ensure_future(self._pump(connection, reader, target_writer, "up")),
            asyncio.ensure_future(self._pump(connection, target_reader, writer, "down")),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._connections.discard(connection)
            target_writer.transport.abort()

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        parser, late = _Parser(), None
        while data := await reader.read(CHUNK):
            out = bytearray()
            for what in parser.feed(data):
                if direction == "up":
                    connection.identity = parser.identity
                if isinstance(what, bytes):
                    out += what
                    continue
                if self.watch is not None:
                    self.watch(what)
                if self._hold_at is not None and self._hold_at(what):
                    self._hold_at = None
                    self._go.clear()
                    self._held_at.set()
                sent, late = self._judge(connection, what, direction, late)
                out += sent
            if connection.severed == direction:
                self.done["severed"] += 1
            else:
                await self._write(connection, writer, bytes(out))

    def _judge(
        self, connection: _Connection, parts: Parts, direction: Direction, late: bytes | None
    ) -> tuple[bytes, bytes | None]:
        """The bytes to send in place of a message, and what waits until after the next one."""
        whole = framed(parts)
        for rule in self.rules if connection.identity.startswith(self.only) else ():
            if not rule.strikes(parts, direction, self.rng):
                continue
            self.done[rule.action] += 1
            match rule.action:
                case "drop":
                    return late or b"", None
                case "duplicate":
                    return whole + whole + (late or b""), None
                case "reorder":
                    return late or b"", whole
                case "corrupt":
                    return framed(self._spoilt(parts, self._corrupted)) + (late or b""), None
                case "truncate":
                    return framed(self._spoilt(parts, self._truncated)) + (late or b""), None
        return whole + (late or b""), None

    def _spoilt(self, parts: Parts, spoil: Callable[[bytes], bytes]) -> Parts:
        """With one of the parts, of a frame its header or its payload, as ``spoil`` makes it."""
        at = self.rng.randrange(len(parts))
        return [*parts[:at], spoil(parts[at]), *parts[at + 1 :]]

    def _truncated(self, part: bytes) -> bytes:
        return part[: self.rng.randrange(len(part))]

    def _corrupted(self, part: bytes) -> bytes:
        at = self.rng.randrange(len(part))
        return part[:at] + bytes([part[at] ^ (1 << self.rng.randrange(8))]) + part[at + 1 :]

    async def _write(self, connection: _Connection, writer: asyncio.StreamWriter, data: bytes) -> None:
        mine = connection.identity.startswith(self.only)
        if mine and not self._go.is_set():
            self.done["hold"] += 1
            await self._go.wait()
        if mine and self.black_hole:
            self.done["black_hole"] += len(data)
            return
        if mine and self.latency_s:
            self.done["latency"] += 1
            await asyncio.sleep(self.latency_s)
        step = self.slice_bytes if mine and self.slice_bytes else len(data)
        for at in range(0, len(data), step or 1):
            piece = data[at : at + step]
            writer.write(piece)
            await writer.drain()
            if step < len(data):
                self.done["slices"] += 1
                await asyncio.sleep(0)
            if mine and self.bytes_per_s:
                self.done["bandwidth"] += len(piece)
                await asyncio.sleep(len(piece) / self.bytes_per_s)
