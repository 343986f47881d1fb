"""ZeroMQ sockets with the limits that libzmq leaves open, and one message per send.

libzmq's defaults are wrong for us: no bound on a frame, closing waits for ever, a second peer with an identity in use
is ignored in silence, messages to unknown peers vanish. Identities are therefore minted per incarnation, a router's
send to a peer that is gone says so, and the part count of every multipart message is checked.

A control socket of a worker is a DEALER with identity ``name|incarnation``; its heartbeats have a socket of their own,
``name|incarnation|hb``, so that no message can delay them. The coordinator binds one ROUTER for all.

:class:`Channels` is all that a process has of the world outside: its sockets, its clock, the thread of its heart.
A simulation gives another one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from errno import EADDRNOTAVAIL, ENODEV
from typing import Any

import zmq

from common.errors import NOT_OURS, StartError, WireError
from common.hosts import is_loopback
from common.ids import Incarnation, WorkerName
from common.messages import Message
from common.wire import MAX_MESSAGE_BYTES, decode, encode

MAX_PARTS = 4
HIGH_WATER_MESSAGES = 100_000
"""Control messages are small and must not be dropped by a busy second; memory stays bounded by the message size."""
BEAT_SUFFIX = "|hb"


def identity(name: WorkerName, incarnation: Incarnation, *, beats: bool = False) -> bytes:
    return f"{name}|{incarnation}{BEAT_SUFFIX if beats else ''}".encode()


def is_local(address: str) -> bool:
    """Whether only processes of this host can reach ``address`` (a ZeroMQ endpoint or a host name)."""
    host = address.removeprefix("tcp://").rsplit(":", 1)[0] if "://" in address else address
    return address.startswith(("ipc://", "inproc://")) or is_loopback(host)


def _prepare(socket: zmq.Socket[Any], max_frame_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def bind_router(
    context: zmq.Context[Any], address: str, *, max_frame_bytes: int = MAX_MESSAGE_BYTES
) -> zmq.Socket[Any]:
    """A ROUTER bound to ``address`` (``tcp://host:*`` picks a port); sending to a peer that is gone raises."""
    socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
    _prepare(socket, max_frame_bytes)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        todo = "stop what uses that port, or choose another with --control-port"
        if error.errno in (EADDRNOTAVAIL, ENODEV):
            todo = NOT_OURS
        raise StartError(f"cannot listen on {address}", zmq.strerror(error.errno or 0), todo) from error
    return socket


def connect_dealer(
    context: zmq.Context[Any], address: str, name: bytes, *, max_frame_bytes: int = MAX_MESSAGE_BYTES
) -> zmq.Socket[Any]:
    """A DEALER with identity ``name`` connected to ``address``; it reconnects by itself. WireError for no address."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    _prepare(socket, max_frame_bytes)
    socket.setsockopt(zmq.IDENTITY, name)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise WireError(f"cannot connect to {address!r}: {error}") from error
    return socket


def send(socket: zmq.Socket[Any], message: Message, to: bytes | None = None) -> bool:
    """Sends one message without waiting; False when the peer is gone or its queue is full."""
    parts = [encode(message)] if to is None else [to, encode(message)]
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def receive(socket: zmq.Socket[Any], kind: Any) -> Any:
    """The next message of type ``kind`` on a dealer, or None if there is none now; WireError if it is malformed."""
    try:
        parts = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    if len(parts) != 1:
        raise WireError(f"a control message has one part, not {len(parts)}")
    return decode(parts[0], kind)


class Channels:
    """The sockets of one process, in one libzmq context, and the clock that it lives by. Used from one thread."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.poller = zmq.Poller()

    @staticmethod
    def clock() -> float:
        """Seconds, monotonic."""
        return time.monotonic()

    def router(self, address: str) -> tuple[zmq.Socket[Any], str]:
        """A ROUTER bound to ``address``, and the address that it got."""
        socket = bind_router(self.context, address)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def dealer(self, address: str, name: bytes) -> zmq.Socket[Any]:
        """A DEALER connected to ``address``."""
        return connect_dealer(self.context, address, name)

    def heart(self, address: str, name: bytes, interval_s: float, beat: Callable[[], Message]) -> Heart:
        """Sends ``beat()`` to ``address`` every ``interval_s`` seconds until stopped."""
        return Heart(self.context, address, name, interval_s, beat)

    # -- for a process that waits in poll -----------------------------------------------------------------------------

    def register(self, what: zmq.Socket[Any] | int) -> None:
        """What arrives at this socket or descriptor wakes :meth:`poll`."""
        self.poller.register(what, zmq.POLLIN)

    def unregister(self, what: zmq.Socket[Any] | int) -> None:
        self.poller.unregister(what)

    def poll(self, seconds: float) -> list[Any]:
        """Waits until something arrives, for at most ``seconds``; the sockets and descriptors at which it did."""
        return [ready for ready, _ in self.poller.poll(int(seconds * 1000))]

    # -- for a process that waits in an event loop --------------------------------------------------------------------

    def watch(self, socket: zmq.Socket[Any], loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Calls ``wake`` when something arrives. The descriptor signals edges: whoever has used the socket looks at
        :meth:`readable` itself."""
        loop.add_reader(_descriptor(socket), wake)

    def unwatch(self, socket: zmq.Socket[Any], loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(_descriptor(socket))

    @staticmethod
    def readable(socket: zmq.Socket[Any]) -> bool:
        events = socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    @staticmethod
    def disconnections(socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
        """A socket on which a message arrives for every connection of ``socket`` that is closed."""
        return socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def close(self) -> None:
        """Closes what is still open, after at most half a second for what must leave."""
        self.context.destroy(linger=500)


class Heart:
    """A thread with a socket of its own: neither a long step nor a queue of messages can delay a beat."""

    def __init__(
        self, context: zmq.Context[Any], address: str, name: bytes, interval_s: float, beat: Callable[[], Message]
    ) -> None:
        self._context, self._address, self._name, self._interval_s, self._beat = (
            context, address, name, interval_s, beat,
        )  # fmt: skip
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with connect_dealer(self._context, self._address, self._name) as socket:
            while True:
                send(socket, self._beat())
                if self._stop.wait(self._interval_s):
                    return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _descriptor(socket: zmq.Socket[Any]) -> int:
    descriptor = socket.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor
