"""ZeroMQ sockets with the limits that libzmq leaves open, and one message per send.

libzmq's defaults are wrong for us: no bound on a frame, closing waits for ever, a peer that dials anew while its old
connection is still known is ignored in silence, messages to unknown peers vanish. Identities are therefore minted per
incarnation and go to whoever dialled last, a router's send to a peer that is gone says so, and of a message of more
parts than any has only the first are taken (:class:`BoundedSocket`).

A control socket of a worker is a DEALER with identity ``name|incarnation|secret``; its heartbeats have a socket of
their own, ``name|incarnation|secret|hb``, so that no message can delay them. The coordinator binds one ROUTER for all.
A router hands an identity over to its latest holder: the secret, which only the worker and its coordinator know, keeps
other workers from taking it.

With cluster keys every socket of the process speaks CURVE (RFC 26) and a router admits only the keys of those who have
business there (ZAP, RFC 27): on loopback too, since a process cannot know from where the others dial it.

:class:`Channels` is all that a process has of the world outside: its sockets, its clock, the thread of its heart.
A simulation gives another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from errno import EADDRNOTAVAIL, ENODEV
from math import inf
from typing import TYPE_CHECKING, Any

import zmq

from common.core.errors import NOT_OURS, StartError, WireError
from common.core.ids import Incarnation, WorkerName
from common.net.hosts import is_loopback
from common.net.keys import ClusterKeys, Party
from common.net.messages import Message, ToHeart
from common.net.socket_monitor import Handshakes
from common.net.wire import MAX_HANDOFF_BYTES, MAX_MESSAGE_BYTES, MAX_REPORT_BYTES, decode, encode
from common.platform import threads

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

HIGH_WATER_MESSAGES = 100_000
"""Of control messages that have not left, per connection: they are small, and a busy second must not drop them. A
worker also holds so many unread of its coordinator, whom it trusts with its work anyway."""
REPORTS_HIGH_WATER_MESSAGES = 256
"""What the coordinator may hold unread of one connection, of 1 MiB each at most. The rest waits at its sender."""
KV_HIGH_WATER_MESSAGES = 128
MAX_FRAME_BYTES = 8 << 20
"""What a decode worker may hold unread of one connection, whatever its peer thinks of credit
(:mod:`kvtransfer.flow_control`, by which it is 128 MiB at most). A frame has less than 2 MiB (:mod:`kvtransfer.plan`).
The rest waits in the connection."""
ANSWERS_HIGH_WATER_MESSAGES = 1024
"""What a prefill worker may hold unread of one decode worker's answers."""
MESSAGE_PARTS, FRAME_PARTS = 1, 2
"""Parts of a message, and of a frame of KV: a header and a payload."""
DROPPED_PARTS = 1024
"""Of a message of too many parts, in one go: about half a millisecond if they are small."""
KV_NICENESS, CURVE_NICENESS = 15, 5
"""How far the threads that carry KV stand back behind others where there are fewer cores than work: control messages,
and whoever handles them, go first. Beside somebody who computes they still get a thirtieth of a core, which copies a
few hundred megabytes per second; where they encrypt it is a quarter, since they would need most of one. All
threads that pass messages on ask for the shortest slice, so that they do not wait for who computes."""
HANDSHAKE_MS = 2000
"""A handshake that stands still for so long is broken off and tried again; libzmq would wait for half a minute."""
BEAT_SUFFIX = "|hb"
ADMITS: dict[Party, tuple[Party, ...]] = {
    "coordinator": ("prefill", "decode", "colocated"),
    "decode": ("prefill",),
    "prefill": (),
    "colocated": (),
}
"""Whose keys the router of each role lets in."""
_WATCHED = itertools.count()
_POLLIN = int(zmq.POLLIN)
_Secure = Callable[[zmq.Socket[Any]], None]


def identity(name: WorkerName, incarnation: Incarnation, secret: str = "", *, beats: bool = False) -> bytes:
    return f"{name}|{incarnation}|{secret}{BEAT_SUFFIX if beats else ''}".encode()


def is_local(address: str) -> bool:
    """Whether only processes of this host can reach ``address`` (a ZeroMQ endpoint or a host name)."""
    host = address.removeprefix("tcp://").rsplit(":", 1)[0] if "://" in address else address
    return address.startswith(("ipc://", "inproc://")) or is_loopback(host)


def nearby(address: str) -> str:
    """Where the workers that a launcher starts reach the coordinator that is bound to ``address``: a Unix socket,
    through which a message costs both sides less. The same ``address`` where such a socket needs a file (all but
    Linux). Two coordinators that do not want one port do not want one name either, which is of the same namespace."""
    return f"ipc://@tandem-{address.removeprefix('tcp://')}" if sys.platform == "linux" else address


class BoundedSocket(zmq.Socket[bytes]):
    """A socket that takes ``most_parts`` parts of a message, and one more if it has more, by which that shows. What is
    left of it is dropped by the next calls, DROPPED_PARTS in each. Nothing else can be read meanwhile, but there is
    time for other things: neither the size nor the number of messages that libzmq holds says how many parts they have,
    and two million of them are six megabytes."""

    most_parts: int
    dropping = False
    """Whether a message of too many parts is still being dropped."""

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[Any]:
        """As zmq's, but at most ``most_parts`` parts and one, and none of them when some were dropped instead."""
        if self.dropping:
            self._drop(flags)
            return []
        part = self.recv(flags, copy=False, track=track)
        parts = [part]
        while part.more:
            if len(parts) > self.most_parts:
                self.dropping = True
                break
            part = self.recv(flags, copy=False, track=track)
            parts.append(part)
        return [part.bytes for part in parts] if copy else parts

    def _drop(self, flags: int) -> None:
        for _ in range(DROPPED_PARTS):
            if not self.recv(flags, copy=False).more:
                self.dropping = False
                return


def _prepare(socket: zmq.Socket[Any], max_frame_bytes: int, unread: int, secure: _Secure) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, unread)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    try:
        secure(socket)
    except BaseException:
        socket.close()
        raise


def _in_plain_text(_: zmq.Socket[Any]) -> None: ...


def bind_router(
    context: zmq.Context[Any],
    address: str,
    *,
    max_frame_bytes: int = MAX_MESSAGE_BYTES,
    parts: int = MESSAGE_PARTS,
    unread: int = HIGH_WATER_MESSAGES,
    secure: _Secure = _in_plain_text,
) -> BoundedSocket:
    """A ROUTER bound to ``address`` (``tcp://host:*`` picks a port); sending to a peer that is gone raises. It takes
    ``parts`` parts of ``max_frame_bytes`` at most, and holds ``unread`` messages of each connection."""
    socket: BoundedSocket = context.socket(zmq.ROUTER, socket_class=BoundedSocket)
    socket.most_parts = 1 + parts  # the sender's identity comes first
    _prepare(socket, max_frame_bytes, unread, secure)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # a peer may dial anew before we, in a long step, have read that its old connection ended: it must not be ignored
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _bind(socket, address)
    return socket


def _bind(socket: zmq.Socket[Any], address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        todo = "let this process listen there"
        if error.errno == zmq.EADDRINUSE:
            todo = "stop what uses that port, or choose another with --control-port"
        elif error.errno in (EADDRNOTAVAIL, ENODEV):
            todo = NOT_OURS
        raise StartError(f"cannot listen on {address}", zmq.strerror(error.errno or 0), todo) from error


def connect_dealer(
    context: zmq.Context[Any],
    address: str,
    name: bytes,
    *,
    max_frame_bytes: int = MAX_MESSAGE_BYTES,
    unread: int = HIGH_WATER_MESSAGES,
    secure: _Secure = _in_plain_text,
    watch: Callable[[zmq.Socket[Any]], object] = lambda socket: None,
) -> BoundedSocket:
    """A DEALER with identity ``name`` connected to ``address``; it reconnects by itself. WireError for no address, or
    without a free descriptor. ``watch`` gets the socket before it dials."""
    try:
        socket: BoundedSocket = context.socket(zmq.DEALER, socket_class=BoundedSocket)
    except zmq.ZMQError as error:
        raise WireError(f"no socket for {address!r}: {error}") from error
    socket.most_parts = MESSAGE_PARTS
    _prepare(socket, max_frame_bytes, unread, secure)
    socket.setsockopt(zmq.IDENTITY, name)
    try:
        watch(socket)
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
    """The next message of type ``kind`` on a dealer, or None if there is none now, or some of one of too many parts was
    dropped; WireError if it is malformed."""
    try:
        parts = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    if not parts:
        return None
    if len(parts) != MESSAGE_PARTS:
        raise WireError("a control message of more than one part")
    return decode(parts[0], kind)


class Channels:
    """The sockets of one process, and the clock that it lives by. Used from one thread. What carries KV has a libzmq
    context of its own, that is an I/O thread of its own: no control message waits until it has copied its megabytes."""

    keys: ClusterKeys | None = None

    def __init__(self, keys: ClusterKeys | None = None, *, encrypt_kv: bool = True, at_once: bool = False) -> None:
        """``at_once``: as of :func:`common.platform.threads.answer`, for control messages."""
        self.context = _started(at_once=at_once)
        self._kv_context: zmq.Context[Any] | None = None
        self.poller = zmq.Poller()
        self.keys = keys
        self._encrypt_kv = encrypt_kv
        self._doors: dict[zmq.Context[Any], ThreadAuthenticator] = {}

    @staticmethod
    def clock() -> float:
        """Seconds, monotonic."""
        return time.monotonic()

    @staticmethod
    def secret() -> str:
        """128 random bits, as text."""
        return secrets.token_hex(16)

    def router(self, address: str, *, kv: bool = False, near: bool = False) -> tuple[BoundedSocket, str]:
        """A ROUTER bound to ``address``, and the address that it got. ``kv``: it takes frames of KV. ``near``: it is
        also bound where :func:`nearby` says."""
        reports = MAX_REPORT_BYTES, MESSAGE_PARTS, REPORTS_HIGH_WATER_MESSAGES
        size, parts, unread = (MAX_FRAME_BYTES, FRAME_PARTS, KV_HIGH_WATER_MESSAGES) if kv else reports
        context = self._of_kv() if kv else self.context
        socket = bind_router(context, address, max_frame_bytes=size, parts=parts, unread=unread, secure=self._as_server)
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        asked = f"{address.rpartition(':')[0]}:{bound.rpartition(':')[2]}"  # libzmq has names of its own for hosts
        if near and nearby(asked) != asked:
            # of the Unix socket only, and of those bound from here on: who is another user is not even greeted
            socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            _bind(socket, nearby(asked))
        return socket, bound

    def dealer(
        self,
        address: str,
        name: bytes,
        *,
        to: Party = "coordinator",
        watch: Callable[[zmq.Socket[Any]], object] = lambda socket: None,
    ) -> zmq.Socket[Any]:
        """A DEALER connected to ``address``, where only the holder of the key of ``to`` can answer. ``watch`` gets it
        before it dials."""
        kv = to == "decode"
        return connect_dealer(
            self._of_kv() if kv else self.context,
            address,
            name,
            max_frame_bytes=MAX_HANDOFF_BYTES if kv else MAX_MESSAGE_BYTES,
            unread=ANSWERS_HIGH_WATER_MESSAGES if kv else HIGH_WATER_MESSAGES,
            secure=functools.partial(self._as_client, to),
            watch=watch,
        )

    def watched_dealer(self, address: str, name: bytes) -> tuple[zmq.Socket[Any], Handshakes]:
        """A DEALER connected to the coordinator at ``address``, and whether it is let in there, and why not. A refusal
        for good is told once, and may come sooner than this thread runs again: somebody listens before it dials."""
        watched: list[Handshakes] = []

        def watch(dealer: zmq.Socket[Any]) -> None:
            # not pyzmq's name for it: that has the socket's descriptor, whose last owner's monitor may still be there
            monitor = dealer.get_monitor_socket(Handshakes.EVENTS, f"inproc://handshakes-{next(_WATCHED)}")
            watched.append(Handshakes(dealer, monitor, keyed=self.keys is not None))

        return self.dealer(address, name, watch=watch), watched[0]

    def heart(self, address: str, name: bytes, interval_s: float, beat: Callable[[int], Message]) -> HeartbeatThread:
        """Sends ``beat()`` to ``address`` every ``interval_s`` seconds until stopped."""
        return HeartbeatThread(lambda: self.watched_dealer(address, name), interval_s, beat)

    def take(self, router: zmq.Socket[Any]) -> tuple[Party | None, list[bytes]]:
        """The next message on a router, its parts after the sender's identity, and the role that the sender's key
        proves (None without keys). No parts if some of a message of too many were dropped; ``zmq.Again`` if there is
        nothing now."""
        if self.keys is None:
            return None, router.recv_multipart(zmq.NOBLOCK)
        frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
        party = self.keys.party_of(str(frames[-1].get("User-Id"))) if frames else None
        return party, [frame.bytes for frame in frames]

    def _of_kv(self) -> zmq.Context[Any]:
        """The context of what carries KV."""
        if self._kv_context is None:
            self._kv_context = _started(CURVE_NICENESS if self.keys is not None and self._encrypt_kv else KV_NICENESS)
        return self._kv_context

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _as_server(self, socket: zmq.Socket[Any]) -> None:
        if self.keys is None or (self.keys.party == "decode" and not self._encrypt_kv):
            return
        if socket.context not in self._doors:
            self._doors[socket.context] = _open_door(socket.context, self.keys)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, self.keys.party)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _as_client(self, to: Party, socket: zmq.Socket[Any]) -> None:
        if self.keys is None or (to == "decode" and not self._encrypt_kv):
            return
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.keys.public[to])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public[self.keys.party])
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)

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
        """Whether something has arrived: to ask that costs less than to find nothing, which is an exception."""
        events = socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & _POLLIN)

    @staticmethod
    def endings(socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
        """A socket on which a message arrives for every connection of ``socket`` that is closed, before that for one
        whose handshake failed, and for one that was not even accepted; all begin with an EVENT of
        :mod:`common.net.socket_monitor`."""
        return socket.get_monitor_socket(Handshakes.ENDINGS | zmq.EVENT_ACCEPT_FAILED)

    def close(self) -> None:
        """Closes what is still open, after at most half a second for what must leave."""
        while self._doors:
            self._doors.popitem()[1].stop()
        if self._kv_context is not None:
            self._kv_context.destroy(linger=500)
        self.context.destroy(linger=500)


class HeartbeatThread:
    """A thread with a socket of its own: neither a long step nor a queue of messages can delay a beat. It dials anew
    when libzmq does not: a coordinator that comes back hears of a worker by its heart alone."""

    def __init__(
        self,
        dial: Callable[[], tuple[zmq.Socket[Any], Handshakes]],
        interval_s: float,
        beat: Callable[[int], Message],
    ) -> None:
        """``beat`` makes one, from the number of the Ping that it answers, 0 if it is due."""
        self._dial, self._interval_s, self._beat = dial, interval_s, beat
        self._stop = threading.Event()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._late = 0.0, inf
        """Seconds by which it was late so far, and when it is due next; one value, as two threads use it."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        threads.answer()
        while not self._stop.is_set():
            try:
                self._beat_until_refused()
            except zmq.ContextTerminated:
                return
            except (zmq.ZMQError, WireError):  # no descriptor is free, say; the next beat tries again
                self._stop.wait(self._interval_s)

    def _beat_until_refused(self) -> None:
        socket, handshakes = self._dial()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        asked = 0
        with socket, contextlib.closing(handshakes):
            while not (handshakes.final or self._stop.is_set()):
                send(socket, self._beat(asked))
                asked = 0
                self._late = self._late[0], time.monotonic() + self._interval_s
                poller.poll(int(self._interval_s * 1000))
                self._late = self.stood_still_s(), inf
                while (ask := receive(socket, ToHeart)) is not None:
                    asked = ask.number
                handshakes.look()

    def stood_still_s(self) -> float:
        """For how long it was late, in all: the whole process was stopped, or its machine asleep."""
        late_s, due = self._late
        return late_s + max(0.0, time.monotonic() - due)

    def stop(self) -> None:
        self._stop.set()
        os.eventfd_write(self._woken, 1)
        self._thread.join()
        os.close(self._woken)


class _Allowed:
    """The allow-list of one router."""

    def __init__(self, keys: ClusterKeys) -> None:
        self._keys = {keys.public[party] for party in ADMITS[keys.party]}

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def _open_door(context: zmq.Context[Any], keys: ClusterKeys) -> ThreadAuthenticator:
    """Answers libzmq's question who may come in, in a thread of its own, since a worker's loop is away for a step."""
    from zmq.auth.thread import ThreadAuthenticator  # brings asyncio along: only who has keys pays for it

    door = ThreadAuthenticator(context)
    door.start()
    try:
        door.configure_curve_callback(keys.party, _Allowed(keys))
    except BaseException:
        door.stop()  # its thread has a socket, which closing the context would wait for
        raise
    return door


def _started(niceness: int = 0, *, at_once: bool = False) -> zmq.Context[Any]:
    """A context whose threads have that rank, and wait for nobody who computes. libzmq starts them with the first
    socket, and they are ranked like the thread that starts them: one that does nothing else."""
    context: zmq.Context[Any] = zmq.Context()

    def start() -> None:
        threads.answer(niceness, at_once=at_once)
        context.socket(zmq.PAIR).close()

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    return context


def _descriptor(socket: zmq.Socket[Any]) -> int:
    descriptor = socket.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor
