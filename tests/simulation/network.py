"""A network of simulated ZeroMQ sockets, whose connections delay messages but keep their order unless a fault strikes.

It keeps libzmq's guarantees over TCP: messages of a connection arrive whole and in order, or the connection is gone; a
ROUTER knows its peers by identity and raises for an unknown one; a DEALER reconnects by itself and keeps what it has
not sent. Loss, duplication, reordering and corruption within a connection, which only broken machines cause, occur at
configurable rates.
"""

from __future__ import annotations

import errno
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import zmq

from common.net.messages import Message, ToHeartbeatThread, Tokens
from common.net.socket_monitor import EVENT, Handshakes
from common.net.sockets import BEAT_SUFFIX, Channels, receive
from common.net.wire import DIGEST_BYTES, encode
from tests.simulation.clock import SimulatedProcess, VirtualClock

RECONNECT_S = 0.05
_NOTHING = zmq.Again()
"""The one exception for all empty sockets: making one costs more than the rest of an empty receive."""
Parts = list[bytes]


def forget() -> None:
    """Release the last history: the traceback of the shared exception refers to its frames."""
    _NOTHING.__traceback__ = None


@dataclass
class Rates:
    """Probability of each fault per message of a line."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    truncate: float = 0.0


@dataclass
class LineProperties:
    """Properties of the network between two processes, in both directions."""

    delay_s: float = 0.0003
    jitter_s: float = 0.0003
    cut: bool = False
    rates: Rates = field(default_factory=Rates)


@dataclass
class Losing:
    """Loses the ``number``-th message with this ``tag``, and calls ``struck`` with the names of its two processes.

    The tag of KV frames is "frame", that of tokens that end a choice "last tokens"."""

    tag: str
    number: int
    struck: Callable[..., None]

    def takes(self, connection: SimulatedConnection, to: Socket, parts: Parts) -> bool:
        if self.number and self._is(parts):
            self.number -= 1
            if not self.number:
                self.struck(connection.dealer.process.name, connection.router.process.name)
                return True
        return False

    def _is(self, parts: Parts) -> bool:
        if len(parts) == 2:
            return self.tag == "frame"
        tag, *fields = msgspec.msgpack.decode(parts[0][DIGEST_BYTES:])
        if tag == "tokens" and any(fields[_FINISH]):
            tag = "last tokens"
        return bool(tag == self.tag)


@dataclass
class Mute:
    """Loses the messages with this ``tag`` from the worker ``name``, but not its heartbeats."""

    name: str
    tag: str

    def takes(self, connection: SimulatedConnection, to: Socket, parts: Parts) -> bool:
        if connection.dealer.process.name != self.name or len(parts) != 1:
            return False
        return bool(msgspec.msgpack.decode(parts[0][DIGEST_BYTES:])[0] == self.tag)


class Frameless:
    """Loses all KV frames, but no messages."""

    tag = "frame"

    def takes(self, connection: SimulatedConnection, to: Socket, parts: Parts) -> bool:
        return len(parts) == 2


@dataclass
class Severed:
    """Loses everything on one connection: to its dealer (``deaf``), to its router (``mute``), or both.

    Neither end is notified, and a new connection works."""

    connection: SimulatedConnection
    deaf: bool
    mute: bool
    tag = "in a severed connection"

    def takes(self, connection: SimulatedConnection, to: Socket, parts: Parts) -> bool:
        return connection is self.connection and (self.deaf if to is connection.dealer else self.mute)


_FINISH = Tokens.__struct_fields__.index("finish")


class SimulatedNetwork:
    """Addresses, lines and connections. ``happened`` counts the faults that struck, by name."""

    def __init__(self, clock: VirtualClock, rng: Random) -> None:
        self.clock, self.rng = clock, rng
        self.listeners: dict[str, SimulatedRouter] = {}
        self.happened: dict[str, int] = {}
        self.losing: Losing | Mute | Frameless | Severed | None = None
        self.dropped: Callable[[SimulatedConnection, Parts], None] = lambda connection, parts: None
        """Called with each message dropped by noise."""
        self._lines: dict[frozenset[str], LineProperties] = {}
        self._connections: list[SimulatedConnection] = []
        self._sockets: dict[str, list[Socket]] = {}
        self._ports = 1000

    def address(self, asked: str) -> str:
        host, _, port = asked.rpartition(":")
        if port == "*":
            self._ports += 1
            port = str(self._ports)
        return f"{host}:{port}"

    def lines(self) -> list[LineProperties]:
        return list(self._lines.values())

    def line(self, one: SimulatedProcess, other: SimulatedProcess) -> LineProperties:
        return self._lines.setdefault(frozenset((one.name, other.name)), LineProperties())

    def waits_for(self, process: SimulatedProcess) -> bool:
        """Return whether a message has arrived that the process has not read. Sockets of an earlier process of the same
        name may still be open."""
        for each in self._sockets.get(process.name, ()):  # called most often of all: no generator
            if each.inbox and each.process is process and not each.closed:
                return True
        return False

    def opened(self, socket: Socket) -> None:
        self._sockets.setdefault(socket.process.name, []).append(socket)

    def count(self, fault: str, times: int = 1) -> None:
        self.happened[fault] = self.happened.get(fault, 0) + times

    # -- faults -------------------------------------------------------------------------------------------------------

    def cut(self, one: SimulatedProcess, other: SimulatedProcess) -> None:
        """Black-hole the line: nothing arrives any more, and neither end is notified."""
        self.line(one, other).cut = True
        self.count("cut")

    def heal(self, one: SimulatedProcess, other: SimulatedProcess) -> None:
        """End a black hole. What was sent meanwhile arrives now, as with TCP."""
        line = self.line(one, other)
        line.cut = False
        for connection in self._between(one, other):
            connection.thaw()

    def reset(self, one: SimulatedProcess, other: SimulatedProcess) -> None:
        """Break the connections between two processes, with everything in flight."""
        for connection in self._between(one, other):
            self.count("reset")
            connection.close()

    def dead(self, process: SimulatedProcess) -> None:
        """Close a dead process's connections, as the kernel does; a black hole hides that from the other end."""
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        self._sockets.pop(process.name, None)
        for connection in list(self._connections):
            if process in (connection.dealer.process, connection.router.process):
                if connection.line.cut:
                    connection.mute()
                else:
                    connection.close()

    def control(self, worker: SimulatedProcess, coordinator: SimulatedProcess, *, beats: bool) -> SimulatedConnection:
        """Return a worker's heartbeat connection (``beats``) or its control connection."""
        connections = self._between(worker, coordinator)
        return next(each for each in connections if each.dealer.name.endswith(BEAT_SUFFIX.encode()) is beats)

    def severed(self, dialling: SimulatedProcess) -> bool:
        """Return whether the process still uses a severed connection that it opened."""
        losing = self.losing
        if not isinstance(losing, Severed):
            return False
        return losing.connection.open and losing.connection.dealer.process is dialling

    def _between(self, one: SimulatedProcess, other: SimulatedProcess) -> list[SimulatedConnection]:
        ends = {one, other}
        return [each for each in self._connections if {each.dealer.process, each.router.process} == ends]

    def connect(self, dealer: Dealer) -> None:
        """Connect the dealer, retrying until its address is listened on."""
        if dealer.closed or not dealer.process.alive or dealer.connection is not None:
            return
        router = self.listeners.get(dealer.address)
        if router is None or router.closed or self.line(dealer.process, router.process).cut:
            self.clock.after(RECONNECT_S, self.connect, dealer)
            return
        dealer.connection = SimulatedConnection(self, dealer, router)
        self._connections.append(dealer.connection)

    def forget(self, connection: SimulatedConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)


class SimulatedConnection:
    """One TCP connection from a dealer to a router."""

    def __init__(self, network: SimulatedNetwork, dealer: Dealer, router: SimulatedRouter) -> None:
        self.network, self.dealer, self.router = network, dealer, router
        self.line = network.line(dealer.process, router.process)
        self.open = True
        self._frozen: list[tuple[Any, Parts]] = []
        self._last = {id(dealer): 0.0, id(router): 0.0}
        network.clock.after(self.line.delay_s, self._established)

    def _established(self) -> None:
        if self.open and self.router.greet(self):
            self.dealer.monitor.notify(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            waiting, self.dealer.unsent = self.dealer.unsent, []
            for parts in waiting:
                self.carry(self.dealer, self.router, parts)
        elif self.open:
            self.close()

    def carry(self, sender: Socket, receiver: Socket, parts: Parts) -> None:
        """Send a message at the sender's own time, which may be ahead of the clock; it arrives a delay later."""
        if spent := sender.process.spent:
            self.network.clock.after(spent, sender.process.run, self._depart, receiver, parts)
        else:
            self._depart(receiver, parts)

    def _depart(self, receiver: Socket, parts: Parts) -> None:
        if not self.open:
            return
        network, rng, rates = self.network, self.network.rng, self.line.rates
        copies = 1
        if network.losing is not None and network.losing.takes(self, receiver, parts):
            network.count(f"lost {network.losing.tag}")
            return
        if rates.drop and rng.random() < rates.drop:
            network.count("dropped")
            network.dropped(self, parts)
            return
        if rates.duplicate and rng.random() < rates.duplicate:
            network.count("duplicated")
            copies = 2
        if rates.corrupt and rng.random() < rates.corrupt:
            network.count("corrupted")
            parts = _corrupted(parts, rng)
        if rates.truncate and rng.random() < rates.truncate:
            network.count("truncated")
            parts = _truncated(parts, rng)
        arrival = network.clock.now + self.line.delay_s + rng.random() * self.line.jitter_s
        if rates.reorder and rng.random() < rates.reorder:
            network.count("reordered")
            arrival += rng.random() * 0.02
        else:
            arrival = max(arrival, self._last[id(receiver)])
            self._last[id(receiver)] = arrival
        for _ in range(copies):
            network.clock.at(arrival, self._arrive, receiver, parts)

    def _arrive(self, receiver: Socket, parts: Parts) -> None:
        if not self.open:
            return
        if self.line.cut:
            self._frozen.append((receiver, parts))
        else:
            receiver.deliver(self, parts)

    def thaw(self) -> None:
        frozen, self._frozen = self._frozen, []
        for receiver, parts in frozen:
            self.network.clock.after(self.line.delay_s, self._arrive, receiver, parts)
        if not (self.dealer.process.alive and self.router.process.alive):
            self.close()

    def mute(self) -> None:
        """Discard what a black hole has kept, because one end has died beyond it."""
        self._frozen.clear()

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._frozen.clear()
        self.network.forget(self)
        self.router.leave(self)
        self.dealer.connection = None
        self.dealer.monitor.notify(zmq.EVENT_DISCONNECTED)
        self.network.clock.after(RECONNECT_S, self.network.connect, self.dealer)


def _corrupted(parts: Parts, rng: Random) -> Parts:
    """Return the parts with one bit of one part (of a frame: header or payload) flipped."""
    which = rng.randrange(len(parts))
    changed = [bytearray(part) for part in parts]
    if part := changed[which]:
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    return [bytes(part) for part in changed]


def _truncated(parts: Parts, rng: Random) -> Parts:
    """Return the parts with one part (of a frame: header or payload) truncated."""
    which = rng.randrange(len(parts))
    return [part[: rng.randrange(len(part) + 1)] if index == which else part for index, part in enumerate(parts)]


class Frame:
    """The part of ``zmq.Frame`` that is used."""

    __slots__ = ("bytes",)

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.bytes)

    def __len__(self) -> int:
        return len(self.bytes)


class Socket:
    """The common part of both socket types: a queue of received messages, and a callback that wakes the owner."""

    dropping = False

    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess) -> None:
        self.network, self.process = network, process
        self.closed = False
        self.inbox: deque[Parts] = deque()
        self.wake: Callable[[], None] = lambda: None
        network.opened(self)

    def deliver(self, connection: SimulatedConnection, parts: Parts) -> None:
        self.inbox.append(parts)
        self.process.run(self._woken)

    def _woken(self) -> None:
        if not self.closed:
            self.wake()

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        if not self.inbox:
            raise _NOTHING.with_traceback(None)
        parts = self.inbox.popleft()
        return list(parts) if copy else [Frame(part) for part in parts]

    def poll(self, timeout: int = 0) -> int:
        return len(self.inbox)

    def disable_monitor(self) -> None: ...

    def close(self, linger: int | None = None) -> None:
        self.closed = True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Monitor:
    """Events of a dealer's connections, as libzmq's monitor reports them. It is polled and does not wake its owner."""

    def __init__(self) -> None:
        self._events: deque[int] = deque()

    def notify(self, event: int) -> None:
        self._events.append(event)

    def recv_multipart(self, flags: int = 0) -> Parts:
        if not self._events:
            raise _NOTHING.with_traceback(None)
        return [struct.pack("=HI", self._events.popleft(), 0)]

    def close(self, linger: int | None = None) -> None: ...


class Dealer(Socket):
    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess, address: str, name: bytes) -> None:
        super().__init__(network, process)
        self.address, self.name = address, name
        self.connection: SimulatedConnection | None = None
        self.monitor = Monitor()
        self.unsent: list[Parts] = []
        network.connect(self)

    def send_multipart(self, parts: list[Any], flags: int = 0, copy: bool = True) -> None:
        whole = [bytes(part) for part in parts]
        if self.connection is not None and self.connection.router.knows(self.connection):
            self.connection.carry(self, self.connection.router, whole)
        else:
            self.unsent.append(whole)

    def close(self, linger: int | None = None) -> None:
        super().close()
        if self.connection is not None:  # messages in flight arrive first
            connection, line = self.connection, self.connection.line
            self.network.clock.after(self.process.spent + line.delay_s + line.jitter_s, connection.close)


class SimulatedRouter(Socket):
    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess, address: str) -> None:
        super().__init__(network, process)
        self.address = address
        self.monitor: Socket | None = None
        self._peers: dict[bytes, SimulatedConnection] = {}
        network.listeners[address] = self

    def knows(self, connection: SimulatedConnection) -> bool:
        return self._peers.get(connection.dealer.name) is connection

    def greet(self, connection: SimulatedConnection) -> bool:
        if self.closed:
            return False
        if (old := self._peers.pop(connection.dealer.name, None)) is not None:  # as ZMQ_ROUTER_HANDOVER does
            old.close()
        self._peers[connection.dealer.name] = connection
        return True

    def leave(self, connection: SimulatedConnection) -> None:
        if self.knows(connection):
            del self._peers[connection.dealer.name]
            if self.monitor is not None:
                self.monitor.deliver(connection, [EVENT.pack(zmq.EVENT_DISCONNECTED, 0)])

    def deliver(self, connection: SimulatedConnection, parts: Parts) -> None:
        super().deliver(connection, [connection.dealer.name, *parts])

    def send_multipart(self, parts: list[Any], flags: int = 0, copy: bool = True) -> None:
        connection = self._peers.get(bytes(parts[0]))
        if connection is None:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        connection.carry(self, connection.dealer, [bytes(part) for part in parts[1:]])

    def disable_monitor(self) -> None:
        self.monitor = None

    def close(self, linger: int | None = None) -> None:
        super().close()
        self.network.listeners.pop(self.address, None)
        for connection in list(self._peers.values()):
            connection.close()


class SimulatedHeart:
    """Sends heartbeats while its process runs, also in the middle of a step."""

    def __init__(self, channels: SimulatedChannels, socket: Dealer, interval_s: float, beat: Callable[[int], Message]):
        self._channels, self._socket, self._interval_s, self._beat = channels, socket, interval_s, beat
        self._late_s, self._due = 0.0, channels.process.clock.now
        self._stopped = False
        socket.wake = self._answer
        self._tick()

    def _tick(self) -> None:
        if not self._stopped:
            process = self._channels.process
            self._late_s = self.stood_still_s()
            self._due = process.clock.now + self._interval_s
            self._send(0)
            process.clock.at(self._due, process.run, self._tick)

    def _answer(self) -> None:
        while not self._stopped and (ping := receive(self._socket, ToHeartbeatThread)) is not None:
            self._send(ping.number)

    def _send(self, asked: int) -> None:
        process = self._channels.process
        spent, process.spent = process.spent, 0.0  # the heartbeat thread is not ahead of the clock
        self._socket.send_multipart([encode(self._beat(asked))])
        process.spent = spent

    def stood_still_s(self) -> float:
        return self._late_s + max(0.0, self._channels.process.clock.now - self._due)

    def stop(self) -> None:
        self._stopped = True
        self._socket.close()


class SimulatedChannels(Channels):
    """The network interface of one simulated process."""

    def __init__(
        self, network: SimulatedNetwork, process: SimulatedProcess, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.network, self.process, self._wake = network, process, wake

    def clock(self) -> float:  # type: ignore[override]
        process = self.process
        return process.clock.now + process.spent

    def unix_ms(self) -> int:  # type: ignore[override]
        return int(self.clock() * 1000)

    @staticmethod
    def secret() -> str:
        return "secret"

    def router(self, address: str, *, kv: bool = False, near: bool = False) -> Any:
        bound = self.network.address(address)
        return SimulatedRouter(self.network, self.process, bound), bound

    def dealer(self, address: str, name: bytes, *, to: str = "coordinator", watch: Any = None) -> Any:
        return Dealer(self.network, self.process, address, name)

    def watched_dealer(self, address: str, name: bytes) -> Any:
        dealer: Any = self.dealer(address, name)
        return dealer, Handshakes(dealer, dealer.monitor, keyed=False)

    def heartbeat_thread(
        self, address: str, name: bytes, interval_s: float, beat: Callable[[int], Message], also: Any = None
    ) -> Any:
        return SimulatedHeart(self, self.dealer(address, name), interval_s, beat)

    def register(self, what: Any) -> None:
        if isinstance(what, Socket):  # otherwise the descriptor of a pool's connection, which is ready at once or never
            what.wake = self._wake

    def unregister(self, what: Any) -> None:
        if isinstance(what, Socket):
            what.wake = lambda: None

    def watch(self, socket: Any, loop: Any, wake: Callable[[], None]) -> None:
        socket.wake = wake

    def unwatch(self, socket: Any, loop: Any) -> None:
        socket.wake = lambda: None

    @staticmethod
    def readable(socket: Any) -> bool:
        return bool(socket.inbox)

    @staticmethod
    def endings(socket: Any) -> Any:
        socket.monitor = Socket(socket.network, socket.process)
        return socket.monitor

    def close(self) -> None: ...
