"""A TCP proxy between two ZeroMQ sockets that injects faults into the traffic and counts them.

A :class:`FaultProxy` stands in front of one listening socket. Its switches act on bytes (hold, black hole, latency,
bandwidth, slicing, severing, reset, half-close), its :class:`Rule` objects on whole ZeroMQ messages (drop, duplicate,
reorder, corrupt, truncate). ``done`` counts the injected faults by name, so that a test can verify that its fault
happened. Faults can be limited to the connections of one peer by its ZeroMQ identity.
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
"""First byte of a MessagePack array of more than 15 elements; a 16-bit length follows."""
_RESET = struct.pack("ii", 1, 0)
CHUNK = 1 << 16

Parts = list[bytes]
Direction = Literal["up", "down"]
"""``up`` is from the connecting side to the listening side."""
Action = Literal["drop", "duplicate", "reorder", "corrupt", "truncate"]


def is_frame(parts: Parts) -> bool:
    """Return whether a message is a KV frame: header and payload."""
    return len(parts) == 2 and parts[0].startswith(MAGIC)


def is_a(*tags: str) -> Callable[[Parts], bool]:
    """Return a predicate that matches messages with one of these tags. The tag is the first element of the MessagePack
    array after the digest."""
    starts = tuple(bytes([0xA0 | len(tag)]) + tag.encode() for tag in tags)

    def match(parts: Parts) -> bool:
        if len(parts) != 1:
            return False
        head = 3 if parts[0][DIGEST_BYTES : DIGEST_BYTES + 1] == _ARRAY16 else 1
        return parts[0][DIGEST_BYTES + head :].startswith(starts)

    return match


@dataclass
class Rule:
    """Applies ``action`` to messages that ``match``, with probability ``rate`` each and at most ``limit`` times."""

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
    """Splits one direction of a ZMTP 3 connection into messages; everything else passes unchanged."""

    def __init__(self) -> None:
        self.identity = ""
        self._buffer = bytearray()
        self._greeting = GREETING_BYTES
        self._parts: Parts = []

    def feed(self, data: bytes) -> Iterator[bytes | Parts]:
        """Yield, in order, raw bytes (greeting and commands) or the parts of a message."""
        self._buffer += data
        if self._greeting and self._buffer:  # forwarded as it arrives: each side waits for the other's first bytes
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
        """Return (bytes before the body, bytes of the body, flags) of the next frame; None if it is incomplete."""
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
    """Encode a message as ZMTP bytes."""
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
class _ProxiedConnection:
    """A connection from a peer, and the proxy's own connection to the target."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    target_reader: asyncio.StreamReader
    target_writer: asyncio.StreamWriter
    identity: str = ""
    severed: Direction | None = None
    """The direction in which everything is lost, if any."""

    def writers(self) -> tuple[asyncio.StreamWriter, asyncio.StreamWriter]:
        return self.writer, self.target_writer

    def reset(self) -> None:
        for writer in self.writers():
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


@dataclass(eq=False)
class FaultProxy:
    """Listens on a free loopback port and forwards to the target, once :meth:`aim` has set it.

    While :meth:`hold` is in effect, bytes wait; nothing is lost, and connections stay. With ``black_hole``, all bytes
    are read and discarded, including those of new connections. Switches and rules apply only to peers whose identity
    begins with ``only``. ``watch`` is called with each message that arrives.
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

    async def start(self) -> FaultProxy:
        self._go = asyncio.Event()
        self._go.set()
        self._aimed = asyncio.Event()
        self._changed = asyncio.Event()
        self._target = ("", 0)
        self._connections: set[_ProxiedConnection] = set()
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
        """Set the target of new connections: ``host:port`` or ``tcp://host:port``, IPv4."""
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
        """Hold all bytes from the first matching message on. The returned event is set when that message arrives."""
        self._hold_at = match
        self._held_at = asyncio.Event()
        return self._held_at

    def release(self) -> None:
        self._hold_at = None
        self._go.set()

    def reset(self, peer: str = "") -> int:
        """Reset every connection, or those of one peer; return their number."""
        struck = [each for each in self._connections if each.identity.startswith(peer or self.only)]
        for connection in struck:
            connection.reset()
        self.done["reset"] += len(struck)
        return len(struck)

    def sever(self, direction: Direction, *, beats: bool) -> int:
        """Lose everything in ``direction`` on the existing heartbeat connections (``beats``) or on the others.

        New connections are not affected. Returns the number of severed connections."""
        struck = [each for each in self._connections if each.identity.endswith(BEAT_SUFFIX) is beats]
        for connection in struck:
            connection.severed = direction
        return len(struck)

    def half_close(self) -> int:
        """Close one direction of every connection: the target reads end of file, and its answers still pass."""
        struck = [each for each in self._connections if each.identity.startswith(self.only)]
        for connection in struck:
            if connection.target_writer.can_write_eof() and not connection.target_writer.is_closing():
                connection.target_writer.write_eof()
                self.done["half_close"] += 1
        return len(struck)

    def heal(self) -> None:
        """End all faults. If bytes were discarded, their connections are reset, so that the peers connect anew."""
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
        connection = _ProxiedConnection(reader, writer, target_reader, target_writer)
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
        self,
        connection: _ProxiedConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: Direction,
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
        self, connection: _ProxiedConnection, parts: Parts, direction: Direction, late: bytes | None
    ) -> tuple[bytes, bytes | None]:
        """Apply the rules to a message. Returns the bytes to send in its place, and those to send after the next
        message."""
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
        """Return the parts with a random one (of a frame: header or payload) replaced by the result of ``spoil``."""
        at = self.rng.randrange(len(parts))
        return [*parts[:at], spoil(parts[at]), *parts[at + 1 :]]

    def _truncated(self, part: bytes) -> bytes:
        return part[: self.rng.randrange(len(part))]

    def _corrupted(self, part: bytes) -> bytes:
        at = self.rng.randrange(len(part))
        return part[:at] + bytes([part[at] ^ (1 << self.rng.randrange(8))]) + part[at + 1 :]

    async def _write(self, connection: _ProxiedConnection, writer: asyncio.StreamWriter, data: bytes) -> None:
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
