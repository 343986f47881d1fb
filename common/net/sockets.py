"""ZeroMQ sockets with explicit limits, and one message per send.

libzmq's defaults do not fit: the size of frames is unlimited, closing a socket may wait for ever, a peer that
reconnects while its old connection is still known is silently ignored, and messages to unknown peers are silently
dropped. Here an identity contains the worker's incarnation and belongs to the latest connection that claims it, a
router's send to a missing peer returns False, and a message with too many parts is truncated (:class:`BoundedSocket`).

A worker's control socket is a DEALER with identity ``name|incarnation|secret``. Its heartbeats have a socket of their
own, ``name|incarnation|secret|hb``, so that no message can delay them. The coordinator binds one ROUTER for all of
them. The secret, which only the worker and its coordinator know, keeps other workers from claiming the identity.

With cluster keys every socket of the process uses CURVE (RFC 26), and a router admits only the keys of the roles that
:data:`ADMITS` lists for it (ZAP, RFC 27). This holds on loopback too, since a process cannot know from where its peers
connect.

:class:`Channels` is a process's only access to the outside: sockets, clock and heartbeat thread. A simulation replaces
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import secrets
import socket
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
from common.net.messages import Message, ToHeartbeatThread
from common.net.socket_monitor import Handshakes
from common.net.wire import MAX_HANDOFF_BYTES, MAX_MESSAGE_BYTES, MAX_REPORT_BYTES, decode, encode
from common.platform import threads

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

HIGH_WATER_MESSAGES = 100_000
"""Maximum number of control messages queued for sending per connection: they are small, and none may be dropped in a
busy second. Also the maximum number of unread messages from its coordinator that a worker holds; the worker trusts the
coordinator, so a low limit would protect nothing."""
REPORTS_HIGH_WATER_MESSAGES = 256
"""Maximum number of unread messages that the coordinator holds per connection, of at most 1 MiB each. Further ones wait
at the sender."""
KV_HIGH_WATER_MESSAGES = 128
MAX_FRAME_BYTES = 8 << 20
"""Maximum number of unread KV frames that a decode worker holds per connection, and maximum size of one. They bound the
memory even if the peer ignores its credit of 128 MiB in flight (:mod:`kvtransfer.flow_control`). A regular frame has
less than 2 MiB (:mod:`kvtransfer.plan`). Further frames wait in the connection."""
ANSWERS_HIGH_WATER_MESSAGES = 1024
"""Maximum number of unread messages that a prefill worker holds per decode worker."""
MESSAGE_PARTS, FRAME_PARTS = 1, 2
"""Number of parts of a control message, and of a KV frame (header and payload)."""
DROPPED_PARTS = 1024
"""Number of parts that one call drops from a message with too many parts; this many small parts take about half a
millisecond."""
KV_NICENESS, CURVE_NICENESS = 15, 5
"""Niceness of the I/O threads that carry KV, in plain text and encrypted: control messages and their handlers go first
when cores are scarce. On a core that another thread uses fully, niceness 15 gives a thirtieth of the core, enough to
copy a few hundred megabytes per second. Encryption needs more: niceness 5 gives a quarter. All I/O threads ask for the
shortest scheduling slice, so that they preempt computing threads."""
HANDSHAKE_MS = 2000
"""A handshake that makes no progress for this many milliseconds is aborted and retried; libzmq's default is 30 s."""
BEAT_SUFFIX = "|hb"
ADMITS: dict[Party, tuple[Party, ...]] = {
    "coordinator": ("prefill", "decode", "colocated"),
    "decode": ("prefill",),
    "prefill": (),
    "colocated": (),
}
"""The roles whose keys the router of each role admits."""
_WATCHED = itertools.count()
_POLLIN = int(zmq.POLLIN)
_Secure = Callable[[zmq.Socket[Any]], None]


def identity(name: WorkerName, incarnation: Incarnation, secret: str = "", *, beats: bool = False) -> bytes:
    """Return the ZeroMQ identity of a worker's control socket, or with ``beats`` of its heartbeat socket."""
    return f"{name}|{incarnation}|{secret}{BEAT_SUFFIX if beats else ''}".encode()


def is_local(address: str) -> bool:
    """Return whether only processes of this host can reach ``address`` (a ZeroMQ endpoint or a host name)."""
    host = address.removeprefix("tcp://").rsplit(":", 1)[0] if "://" in address else address
    return address.startswith(("ipc://", "inproc://")) or is_loopback(host)


def is_ours(host: str) -> bool:
    """Return whether ``host`` is an address of this machine (of its network namespace), or a name of one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def nearby(address: str) -> str:
    """Return the endpoint at which workers of the same launcher reach the coordinator bound to ``address``: an abstract
    Unix socket, which costs both sides less per message than TCP. Outside Linux, which alone has abstract sockets, it
    is ``address`` itself. The name contains the port. Abstract names and ports both belong to the network namespace, so
    the names of two coordinators never collide."""
    return f"ipc://@tandem-{address.removeprefix('tcp://')}" if sys.platform == "linux" else address


class BoundedSocket(zmq.Socket[bytes]):
    """A socket that receives at most ``most_parts`` parts of a message, plus one that shows the excess.

    Later calls drop the rest, DROPPED_PARTS per call. Until that is done nothing else can be read from the socket, but
    the caller can do other work between calls. This class exists because libzmq limits the size of a part and the
    number of messages, but not the number of parts: two million of them fit into six megabytes.
    """

    most_parts: int
    dropping = False
    """Whether the rest of an oversized message is still being dropped."""

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[Any]:
        """Receive a message like the method of ``zmq.Socket``, but at most ``most_parts`` + 1 parts of it. A call that
        dropped parts of an oversized message returns an empty list."""
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
    """Create a ROUTER bound to ``address`` (``tcp://host:*`` picks a port); raises StartError if it cannot be bound.

    It receives messages of at most ``parts`` parts of ``max_frame_bytes`` each and holds at most ``unread`` unread
    messages per connection. Sending to an unknown peer raises EHOSTUNREACH.
    """
    socket: BoundedSocket = context.socket(zmq.ROUTER, socket_class=BoundedSocket)
    socket.most_parts = 1 + parts  # the sender's identity comes first
    _prepare(socket, max_frame_bytes, unread, secure)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # a peer may reconnect before we, busy with a long step, have noticed that its old connection ended
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _bind(socket, address)
    return socket


def _bind(socket: zmq.Socket[Any], address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        todo = "allow this process to listen there"
        if error.errno == zmq.EADDRINUSE:
            todo = "stop the process that uses that port, or choose another with --control-port"
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
    """Create a DEALER with identity ``name`` connected to ``address``. It reconnects by itself. ``watch`` is called
    with the socket before it connects. Raises WireError if ``address`` is invalid or no file descriptor is free."""
    try:
        socket: BoundedSocket = context.socket(zmq.DEALER, socket_class=BoundedSocket)
    except zmq.ZMQError as error:
        raise WireError(f"cannot create a socket for {address!r}: {error}") from error
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
    """Send one message without blocking; return False if the peer is gone or its queue is full."""
    parts = [encode(message)] if to is None else [to, encode(message)]
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def receive(socket: zmq.Socket[Any], kind: Any) -> Any:
    """Receive the next message of type ``kind`` on a dealer without blocking. Returns None if there is none, or if this
    call dropped parts of an oversized one; raises WireError if the message is malformed."""
    try:
        parts = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    if not parts:
        return None
    if len(parts) != MESSAGE_PARTS:
        raise WireError("a control message has more than one part")
    return decode(parts[0], kind)


class Channels:
    """The sockets and the clock of one process. Used from one thread.

    Sockets that carry KV have a libzmq context of their own, and so their own I/O thread: control messages never wait
    while it copies megabytes.
    """

    keys: ClusterKeys | None = None

    def __init__(self, keys: ClusterKeys | None = None, *, encrypt_kv: bool = True, at_once: bool = False) -> None:
        """``at_once`` asks for real-time priority for the I/O thread of control messages (see
        :func:`common.platform.threads.answer`)."""
        self.context = _started(at_once=at_once)
        self._kv_context: zmq.Context[Any] | None = None
        self.poller = zmq.Poller()
        self.keys = keys
        self._encrypt_kv = encrypt_kv
        self._authenticators: dict[zmq.Context[Any], ThreadAuthenticator] = {}

    @staticmethod
    def clock() -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()

    @staticmethod
    def unix_ms() -> int:
        """Return the time of day in milliseconds since the epoch, by which nothing is timed."""
        return time.time_ns() // 1_000_000

    @staticmethod
    def secret() -> str:
        """Return 128 random bits as hexadecimal text."""
        return secrets.token_hex(16)

    def router(self, address: str, *, kv: bool = False, near: bool = False) -> tuple[BoundedSocket, str]:
        """Create a ROUTER bound to ``address``; return it and its actual address. With ``kv`` its limits are those for
        KV frames, else those for messages of workers to the coordinator. With ``near`` it is also bound to the
        :func:`nearby` endpoint."""
        reports = MAX_REPORT_BYTES, MESSAGE_PARTS, REPORTS_HIGH_WATER_MESSAGES
        size, parts, unread = (MAX_FRAME_BYTES, FRAME_PARTS, KV_HIGH_WATER_MESSAGES) if kv else reports
        context = self._of_kv() if kv else self.context
        socket = bind_router(context, address, max_frame_bytes=size, parts=parts, unread=unread, secure=self._as_server)
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        asked = f"{address.rpartition(':')[0]}:{bound.rpartition(':')[2]}"  # libzmq rewrites the host
        if near and nearby(asked) != asked:
            # applies to Unix sockets bound from here on: refuses connections of other users before any handshake
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
        """Create a DEALER connected to ``address``, where only a holder of the key of ``to`` can answer. ``watch`` is
        called with it before it connects."""
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
        """Create a DEALER connected to the coordinator at ``address``; return it and the state of its handshakes.

        libzmq reports a refusal that it will not retry only once, perhaps before this thread runs again. So the monitor
        is attached before the socket connects.
        """
        watched: list[Handshakes] = []

        def watch(dealer: zmq.Socket[Any]) -> None:
            # not pyzmq's default address, which contains the socket's descriptor: the monitor of a closed socket that
            # had the same descriptor may still be bound to it
            monitor = dealer.get_monitor_socket(Handshakes.EVENTS, f"inproc://handshakes-{next(_WATCHED)}")
            watched.append(Handshakes(dealer, monitor, keyed=self.keys is not None))

        return self.dealer(address, name, watch=watch), watched[0]

    def heartbeat_thread(
        self,
        address: str,
        name: bytes,
        interval_s: float,
        beat: Callable[[int], Message],
        also: Callable[[], Message | None] | None = None,
    ) -> HeartbeatThread:
        """Start a thread that sends ``beat(ping_number)`` to ``address`` every ``interval_s`` seconds until stopped,
        and behind it what ``also`` returns, if anything."""
        return HeartbeatThread(lambda: self.watched_dealer(address, name), interval_s, beat, also)

    def take(self, router: zmq.Socket[Any]) -> tuple[Party | None, list[bytes]]:
        """Receive the next message on a router without blocking. Return the role that the sender's key proves (None
        without keys) and the frames, the sender's identity first. The frames are empty if this call dropped parts of an
        oversized message. Raises ``zmq.Again`` if there is no message."""
        if self.keys is None:
            return None, router.recv_multipart(zmq.NOBLOCK)
        frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
        party = self.keys.party_of(str(frames[-1].get("User-Id"))) if frames else None
        return party, [frame.bytes for frame in frames]

    def _of_kv(self) -> zmq.Context[Any]:
        """Return the context of sockets that carry KV; create it on first use."""
        if self._kv_context is None:
            self._kv_context = _started(CURVE_NICENESS if self.keys is not None and self._encrypt_kv else KV_NICENESS)
        return self._kv_context

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _as_server(self, socket: zmq.Socket[Any]) -> None:
        if self.keys is None or (self.keys.party == "decode" and not self._encrypt_kv):
            return
        if socket.context not in self._authenticators:
            self._authenticators[socket.context] = _start_authenticator(socket.context, self.keys)
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
        """Let :meth:`poll` also wait for input on this socket or file descriptor."""
        self.poller.register(what, zmq.POLLIN)

    def unregister(self, what: zmq.Socket[Any] | int) -> None:
        """Undo :meth:`register`. Raises KeyError if ``what`` is not registered."""
        self.poller.unregister(what)

    def poll(self, seconds: float) -> list[Any]:
        """Wait at most ``seconds`` for input; return the sockets and file descriptors that have some."""
        return [ready for ready, _ in self.poller.poll(int(seconds * 1000))]

    # -- for a process that waits in an event loop --------------------------------------------------------------------

    def watch(self, socket: zmq.Socket[Any], loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Call ``wake`` when a message arrives. ZeroMQ's descriptor signals only changes: after any use of the socket
        the caller must check :meth:`readable` itself."""
        loop.add_reader(_descriptor(socket), wake)

    def unwatch(self, socket: zmq.Socket[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Undo :meth:`watch`."""
        loop.remove_reader(_descriptor(socket))

    @staticmethod
    def readable(socket: zmq.Socket[Any]) -> bool:
        """Return whether a message has arrived. Cheaper than a receive that raises ``zmq.Again``."""
        events = socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & _POLLIN)

    @staticmethod
    def endings(socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
        """Return a monitor socket that gets a message for every connection of ``socket`` that closes, for every failed
        handshake (the connection then closes too), and for every connection that could not be accepted. The first part
        of a message is a :data:`common.net.socket_monitor.EVENT`."""
        return socket.get_monitor_socket(Handshakes.ENDINGS | zmq.EVENT_ACCEPT_FAILED)

    def close(self) -> None:
        """Close all sockets. Waits at most half a second per context for unsent messages."""
        while self._authenticators:
            self._authenticators.popitem()[1].stop()
        if self._kv_context is not None:
            self._kv_context.destroy(linger=500)
        self.context.destroy(linger=500)


class HeartbeatThread:
    """A thread with a socket of its own that sends heartbeats, so that neither a long step nor queued messages delay
    them.

    After a refusal that libzmq does not retry, the thread opens a new connection itself, because a restarted
    coordinator learns of a worker only from its heartbeats.
    """

    def __init__(
        self,
        dial: Callable[[], tuple[zmq.Socket[Any], Handshakes]],
        interval_s: float,
        beat: Callable[[int], Message],
        also: Callable[[], Message | None] | None = None,
    ) -> None:
        """``beat`` makes a heartbeat from the number of the Ping that it answers, 0 for a regular one; ``also`` makes a
        message to follow it, or None."""
        self._dial, self._interval_s, self._beat, self._also = dial, interval_s, beat, also
        self._stop, self._last = threading.Event(), threading.Event()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._late = 0.0, inf
        """Total lateness in seconds, and the time at which the next wake-up is due (inf if none is). One tuple, so that
        another thread reads consistent values."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        threads.answer()
        while not self._stop.is_set():
            try:
                self._beat_until_refused()
            except zmq.ContextTerminated:
                return
            except (zmq.ZMQError, WireError):  # for example, no file descriptor is free: try again
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
                if self._also is not None and (more := self._also()) is not None:
                    send(socket, more)
                asked = 0
                self._late = self._late[0], time.monotonic() + self._interval_s
                poller.poll(int(self._interval_s * 1000))
                self._late = self.stood_still_s(), inf
                while (ping := receive(socket, ToHeartbeatThread)) is not None:
                    asked = ping.number
                reconnected = handshakes.look()
                if self._last.is_set() and (reconnected or not handshakes.connected):
                    self._stop.set()

    def stood_still_s(self) -> float:
        """Return by how many seconds in all this thread woke up too late. It does so only if the whole process was
        stopped or the machine was asleep."""
        late_s, due = self._late
        return late_s + max(0.0, time.monotonic() - due)

    def end_with_connection(self) -> None:
        """End when the connection does, instead of sending over the next one, which leads to another process."""
        self._last.set()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stop.set()
        os.eventfd_write(self._woken, 1)
        self._thread.join()
        os.close(self._woken)


class _Allowed:
    """The allow-list of one router, as a credentials provider of ``zmq.auth``."""

    def __init__(self, keys: ClusterKeys) -> None:
        self._keys = {keys.public[party] for party in ADMITS[keys.party]}

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def _start_authenticator(context: zmq.Context[Any], keys: ClusterKeys) -> ThreadAuthenticator:
    """Start the ZAP handler of ``context``, which admits or refuses peers by their keys. It runs in a thread of its
    own, because a worker's loop cannot answer during a step."""
    from zmq.auth.thread import ThreadAuthenticator  # here: it imports asyncio, so only processes with keys pay for it

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    try:
        authenticator.configure_curve_callback(keys.party, _Allowed(keys))
    except BaseException:
        authenticator.stop()  # otherwise closing the context would wait for the socket of that thread
        raise
    return authenticator


def _started(niceness: int = 0, *, at_once: bool = False) -> zmq.Context[Any]:
    """Create a context whose I/O threads have this niceness and the shortest scheduling slice. libzmq starts them with
    the first socket, and they inherit the scheduling of the thread that creates it; so a temporary thread does that."""
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
