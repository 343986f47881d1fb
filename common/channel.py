"""ZeroMQ sockets with the limits that libzmq leaves open, and one message per send.

libzmq's defaults are wrong for us: no bound on a frame, closing waits for ever, a second peer with an identity in use
is ignored in silence, messages to unknown peers vanish. Identities are therefore minted per incarnation, a router's
send to a peer that is gone says so, and the part count of every multipart message is checked.

A control socket of a worker is a DEALER with identity ``name|incarnation``; its heartbeats have a socket of their own,
``name|incarnation|hb``, so that no message can delay them. The coordinator binds one ROUTER for all.
"""

from __future__ import annotations

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
