"""The control socket: receives messages from workers and sends messages to them.

Owns one ROUTER socket and the mapping between socket identities and worker incarnations. Reads everything that has
arrived in one turn of the event loop, so that a message per engine step does not cost a task switch each. Malformed
messages are counted and dropped; an unregistered sender gets a Rejoin. A refused worker gets the reason only if it has
proved that it holds a key of the cluster; without cluster keys the reason is only logged. Knows no request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol, assert_never

import zmq

from common.core.errors import Damaged, StartError, WireError
from common.core.ids import REQUEST_ID_BYTES, Incarnation, RequestId, WorkerName, new_incarnation
from common.net.hosts import bracketed
from common.net.keys import Party
from common.net.messages import (
    Abort,
    AnyHello,
    AnyMessage,
    Cached,
    FromWorker,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseAck,
    Measured,
    Message,
    NameTaken,
    Ping,
    Rejected,
    Rejoin,
    RequestFailed,
    Role,
    Timing,
    Tokens,
    Welcome,
)
from common.net.peer_ban_list import STRIKES, PeerBanList
from common.net.socket_monitor import EVENT
from common.net.sockets import Channels, is_local, send
from common.net.wire import MAX_REPORT_BYTES, decode
from coordinator.cluster.complaints import Complaints
from coordinator.cluster.identities import control_identity, heartbeat_identity, printable, shown, who
from coordinator.cluster.lost_workers import LostWorkers, Missing
from coordinator.cluster.registry import JoinRefused, Registry, WorkerHandle, WorkerState, name_taken, other_protocol

log = logging.getLogger("tandem.gateway")

MESSAGES_PER_TURN = 512
"""After this many messages the event loop gets a turn, so that a flood of worker messages does not starve clients."""
MOST_ASKED = 1000
"""Number of messages from an unregistered worker of another version that are dropped without a strike: it goes on
sending, for instance the tokens of each step, until it has read the Rejoin."""
UNSAID = "see the coordinator's log (without cluster keys the reason is not sent)"
PROBES_S = (0.01, 0.1)
"""Delays of the probes after a connection was closed: libzmq reports the event to the monitor before it removes the
peer from the socket's routing table."""
Replace = Callable[[str, int, str], None]
"""Requests the replacement of a worker, if the process id is still that of its process: (name, process id, reason)."""
_NOBODY = Abort(RequestId(bytes(REQUEST_ID_BYTES)), 0)
"""Names no request: sent to probe a connection, because workers ignore an Abort of an unknown request."""


class Loss(Enum):
    """How a worker was lost. MISSING is followed by ``on_worker_died`` or ``on_worker_reconnected``."""

    MISSING = "its connection broke; it may have died"
    RECONNECTED = "its connection broke, and it is back"
    GIVEN_UP = "it was silent, hung, or sent bad messages"


class GatewayEvents(Protocol):
    """Receives the events of the gateway: changes of workers and their messages."""

    def on_worker_joined(self, worker: WorkerHandle) -> None: ...

    def on_worker_lost(self, worker: WorkerHandle, how: Loss) -> None:
        """Called when a worker is lost without a Goodbye. After ``Loss.MISSING``, ``on_worker_died`` or
        ``on_worker_reconnected`` follows."""

    def on_worker_died(self, worker: Incarnation) -> None: ...

    def on_worker_reconnected(self, worker: Incarnation) -> None: ...

    def on_worker_left(self, worker: WorkerHandle) -> None: ...

    def tokens(self, worker: WorkerHandle, message: Tokens) -> None: ...

    def timing(self, worker: WorkerHandle, message: Timing) -> None: ...

    def failed(self, worker: WorkerHandle, message: RequestFailed) -> None: ...

    def measured(self, worker: WorkerHandle, message: Measured) -> None: ...

    def beat(self, worker: WorkerHandle) -> None: ...


class Gateway:
    """Binds ``tcp://host:port``, and with ``near`` also a Unix socket for the launcher's workers; updates ``registry``
    and calls ``events`` until closed. Raises StartError if it cannot bind, or must not without keys."""

    def __init__(
        self,
        registry: Registry,
        host: str,
        port: int,
        *,
        insecure_cluster: bool = False,
        near: bool = False,
        channels: Channels | None = None,
    ) -> None:
        host = bracketed(host)
        address = f"tcp://{host}:{port or '*'}"
        self.channels = channels or Channels()
        if not (is_local(address) or self.channels.keys or insecure_cluster):
            self.channels.close()
            raise StartError(
                f"will not listen for workers on {host}",
                "there are no keys, and that address can be reached from other machines",
                "make keys with tandem keygen and give --cluster-key-file, or accept the risk with --insecure-cluster",
            )
        self.registry = registry
        self.incarnation = new_incarnation()
        self.strikes = PeerBanList()
        self._asked = PeerBanList(MOST_ASKED)
        self._complaints = Complaints()
        self._lost = LostWorkers()
        self.times_emptied = 0
        """How often the socket was read until it was empty. Messages that arrived before that are no longer queued
        here."""
        self.sent: dict[Incarnation, int] = {}
        """Number of control messages sent to each worker since its Hello; ``Heartbeat.acted_on`` counts the same
        messages."""
        self._asks = 0
        self._replace: Replace | None = None
        self._events: GatewayEvents | None = None
        self.clock = self.channels.clock
        try:
            self._socket, bound = self.channels.router(address, near=near)
            self._monitor = self.channels.endings(self._socket)
        except StartError:
            self.channels.close()
            raise
        self.address = f"tcp://{host}:{bound.rpartition(':')[2]}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False

    @property
    def bad_messages(self) -> int:
        """Number of messages that were dropped because they are invalid."""
        return self._complaints.bad_messages

    def start(self, events: GatewayEvents, loop: asyncio.AbstractEventLoop) -> None:
        """Start reading in ``loop``."""
        self._events, self._loop = events, loop
        self.channels.watch(self._socket, loop, self._wake)
        self.channels.watch(self._monitor, loop, self._watch)
        self._wake()  # ZeroMQ's file descriptors signal nothing before the sockets have been read once
        self._watch()

    def supervise(self, replace: Replace, serving: Mapping[WorkerName, int]) -> None:
        """Call ``replace`` for hung workers from now on. ``serving`` maps the workers of this host that ran before this
        coordinator to their process ids; one that does not join is treated as hung."""
        self._replace = replace
        for name, pid in serving.items():
            self.registry.awaits(name, socket.gethostname(), pid, self.clock())

    def close(self) -> None:
        if self._loop is not None:
            self.channels.unwatch(self._socket, self._loop)
            self.channels.unwatch(self._monitor, self._loop)
        self._loop = None
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self.channels.close()

    def may_return(self, role: Role) -> bool:
        """Return whether a worker that does the work of ``role`` has lost its connection and may reconnect at once."""
        return self._lost.may_return(role)

    # -- out ------------------------------------------------------------------------------------------------------

    def send(self, worker: WorkerHandle, message: Message) -> bool:
        """Send a message; return False if the worker cannot be reached. It is then gone, and ``events`` is called in
        the next turn of the event loop."""
        if worker.state is WorkerState.GONE:
            return False
        reached = send(self._socket, message, worker.route)
        if reached:
            self.sent[worker.id] = self.sent.get(worker.id, 0) + 1
        else:
            self._lose(worker)
        self._rearm()
        return reached

    def ask(self) -> int:
        """Send a Ping to the heartbeat thread of every worker and return its number, which ``WorkerHandle.answered``
        reaches with the answer. A worker whose heartbeats go on without an answer is pinged again, because a Ping is
        lost while its heartbeat connection is reconnecting."""
        self._asks += 1
        for worker in self.registry:
            self._ask(worker)
        self._rearm()
        return self._asks

    def _ask(self, worker: WorkerHandle) -> None:
        send(self._socket, Ping(self._asks), heartbeat_identity(worker.route))

    def _reply(self, frame: bytes, message: Message) -> None:
        send(self._socket, message, frame)

    def _lose(self, worker: WorkerHandle) -> None:
        log.warning("worker %s is gone: its connection is closed", worker.hello.name)
        self._remove(worker)
        if self._loop is not None:  # not now, because the caller may be in the middle of a decision
            self._lost.lose(worker)
            self._loop.call_soon(self._closed, worker)
            self._loop.call_later(PROBES_S[0], self._probe)  # other workers may have died at the same time

    def _closed(self, worker: WorkerHandle) -> None:
        """Read what has arrived before the worker counts as missing: its last tokens or its Goodbye may be unread."""
        self._read()
        self._rearm()
        if self._lost.not_losing(worker.id) is not None:
            self.registry.misses(worker, self.clock())
            self._miss(worker)

    def _miss(self, worker: WorkerHandle) -> None:
        if self._events is not None:
            self._lost.miss(worker)
            self._events.on_worker_lost(worker, Loss.MISSING)

    def _look_for_missing(self) -> None:
        """Report the missing workers that are dead."""
        for incarnation in self._lost.look():
            if self._events is not None:
                self._events.on_worker_died(incarnation)

    def _lives(self, missing: Missing) -> None:
        """Note that a missing worker has sent something and is alive."""
        if missing.speaks() and self._events is not None:
            self._events.on_worker_reconnected(missing.worker.id)

    def _remove(self, worker: WorkerHandle) -> None:
        self.registry.gone(worker)
        self._lost.not_losing(worker.id)
        self.sent.pop(worker.id, None)

    # -- in -------------------------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> bool:
        """Remove workers that have been silent too long and request the replacement of hung ones. Must be called every
        ``registry.times.sweep_s``.

        Returns False, without judging any worker, while an oversized message is being dropped and messages of other
        workers are stuck behind it. ``registry.loop_lag`` counts that time as lag of this process.
        """
        emptied = self.times_emptied
        self._read()
        self._rearm()
        self._complaints.log_due(now_s)
        if self._socket.dropping:
            return False
        for worker, how in self.registry.sweep(now_s, caught_up=self.times_emptied > emptied):
            log.warning("worker %s is gone: %s", worker.hello.name, how)
            self._reply(worker.route, Rejoin())  # it may be alive, with nothing to send
            self.sent.pop(worker.id, None)
            if self._events is not None:
                self._events.on_worker_lost(worker, Loss.GIVEN_UP)
        for hang in self.registry.unresponsive.overdue(now_s):
            if self._replace is not None:
                self._replace(hang.name, hang.pid, hang.why(now_s))
        self._look_for_missing()
        return True

    def _wake(self) -> None:
        self._scheduled = False
        if self._loop is None:
            return
        try:
            self._read()
        finally:  # an error in one message must not stop the reading of later ones
            self._rearm()

    def _rearm(self) -> None:
        """Schedule another read if messages are waiting. Must follow every use of the socket, because the file
        descriptor of a ZeroMQ socket is edge-triggered."""
        if self._loop is None or self._scheduled:
            return
        if self.channels.readable(self._socket):
            self._scheduled = True
            self._loop.call_soon(self._wake)

    def _read(self) -> None:
        """Dispatch what has arrived: up to MESSAGES_PER_TURN messages, or until parts of a message with too many parts
        were dropped."""
        now_s = self.clock()
        for _ in range(MESSAGES_PER_TURN):
            try:
                party, frames = self.channels.take(self._socket)
            except zmq.Again:
                self.times_emptied += 1
                return
            if not frames:
                return
            peer = party, control_identity(frames[0])
            if self.strikes.out(peer):
                self._complaints.bad_message()
                continue
            try:
                self._dispatch(party, frames, now_s)
            except WireError as error:
                self._complaints.bad_message(f"from {shown(frames[0])}: {error}")
                self._complaints.log_due(now_s)
                if not isinstance(error, Damaged) and self.strikes.strike(peer):
                    self._cut_off(*peer)

    def _cut_off(self, party: Party | None, frame: bytes) -> None:
        """Stop reading messages of an incarnation that sent too many bad ones, remove its worker and send it a
        Rejected. Its process may start again as another incarnation."""
        log.warning("%s is cut off: it sent %d invalid messages", shown(frame), STRIKES)
        worker = next((each for each in self.registry if each.route == frame), None)
        if worker is not None and party in (None, worker.role):  # else the sender misused the worker's identity
            self._reply(frame, Rejected(f"it sent {STRIKES} invalid messages"))
            self._remove(worker)
            if self._events is not None:
                self._events.on_worker_lost(worker, Loss.GIVEN_UP)

    def _refuse(self, frame: bytes, refused: JoinRefused, *, told: bool = False) -> None:
        """Refuse a worker and note the reason for the log. With ``told`` the reason is sent also without cluster keys,
        since it reveals nothing about what is served here."""
        self._complaints.refusal(f"worker {shown(frame)} is refused: {printable(refused.reason)}")
        self._complaints.log_due(self.clock())
        reason = refused.reason if told or self.channels.keys is not None else UNSAID
        self._reply(frame, NameTaken(reason) if refused.for_now else Rejected(reason))

    def _dispatch(self, party: Party | None, frames: list[bytes], now_s: float) -> None:
        if len(frames) != 2:
            raise WireError("a message must have one part")
        frame, data = frames
        try:
            message: FromWorker = decode(data, FromWorker, MAX_REPORT_BYTES)
        except WireError:
            if self._turns_away(frame, data) or self._asks_back(frame, data):
                return
            raise
        name, incarnation = who(frame)
        if isinstance(message, Hello):
            self._hello(party, frame, message, now_s)
            return
        worker = self.registry.get(incarnation) or self._lost.losing_worker(incarnation)
        if worker is None:
            if isinstance(message, Heartbeat):
                self.registry.stranger_beats(name, message, now_s)
            self._stranger(frame, incarnation, message)
            return
        if party not in (None, worker.role):
            raise WireError(f"sent as a {worker.role} worker with the key of {party}")
        if control_identity(frame) != worker.route:
            raise WireError(f"not sent from the identity of {worker.hello.name}, whose incarnation it claims")
        self.registry.spoke(worker, now_s)
        self._deliver(worker, message, now_s)

    def _deliver(
        self,
        worker: WorkerHandle,
        message: Tokens | Heartbeat | Timing | RequestFailed | Cached | Measured | LeaseAck | Goodbye,
        now_s: float,
    ) -> None:
        events = self._events
        assert events is not None
        match message:
            case Tokens():
                events.tokens(worker, message)
            case Heartbeat():
                self.registry.beat(worker, message, now_s)
                if message.asked <= self._asks:  # else it answers a Ping of an earlier coordinator
                    worker.answered = max(worker.answered, message.asked)
                if worker.answered < self._asks:
                    self._ask(worker)
                if self.registry.hangs(worker):
                    name, turn_ms = worker.hello.name, message.turn_ms
                    log.warning("worker %s is gone: one turn of its loop has taken %d ms so far", name, turn_ms)
                    self.registry.give_up(worker, now_s)
                    self._remove(worker)
                    events.on_worker_lost(worker, Loss.GIVEN_UP)
                else:
                    events.beat(worker)
            case Timing():
                events.timing(worker, message)
            case RequestFailed():
                events.failed(worker, message)
            case Measured():
                events.measured(worker, message)
            case Cached():
                try:
                    self.registry.cached(worker, message)
                except ValueError as error:
                    raise WireError(str(error)) from error
            case LeaseAck():
                self.registry.renewed(worker)
            case Goodbye():
                log.info("worker %s leaves: %s", worker.hello.name, message.reason)
                self._remove(worker)
                events.on_worker_left(worker)
            case _:
                assert_never(message)

    def _turns_away(self, frame: bytes, data: bytes) -> bool:
        """Return whether ``data``, which is no message of this version, is a Hello of another version. Its sender is
        refused with that reason."""
        try:
            hello = decode(data, AnyHello, MAX_REPORT_BYTES)
        except WireError:
            return False
        if reason := other_protocol(hello.protocol):
            self._refuse(frame, JoinRefused(reason), told=True)
        return reason is not None

    def _asks_back(self, frame: bytes, data: bytes) -> bool:
        """Return whether ``data``, which is no message of this version, may come from a worker of another version that
        takes this coordinator for its previous one. It gets a Rejoin, and its Hello then shows its version. From a
        worker that has joined here, and as a Hello, such data is just a bad message."""
        _, incarnation = who(frame)
        if self._lost.losing_worker(incarnation) is not None or self.registry.get(incarnation) is not None:
            return False
        try:
            message = decode(data, AnyMessage, MAX_REPORT_BYTES)
        except WireError:
            return False
        if message.kind == AnyHello.__struct_config__.tag or self._asked.out(incarnation):
            return False
        self._asked.strike(incarnation)
        self._complaints.bad_message(f"from {shown(frame)}: it has another version and is asked to join anew")
        self._reply(control_identity(frame), Rejoin())
        return True

    def _hello(self, party: Party | None, frame: bytes, hello: Hello, now_s: float) -> None:
        if frame != control_identity(frame) or who(frame) != (hello.name, hello.incarnation):
            raise WireError("a Hello whose name and incarnation are not those of its identity")
        known = self._lost.get(hello.incarnation) or self.registry.get(hello.incarnation)
        if known is not None and known.route != frame:
            raise WireError(f"a Hello as {known.hello.name}, which is connected under another identity")
        if party not in (None, hello.role):
            self._reply(frame, Rejected(f"its key is that of {party}, not of {hello.role}"))
            raise WireError(f"a Hello of a {hello.role} worker with the key of {party}")
        if (losing := self._lost.not_losing(hello.incarnation)) is not None and self._events is not None:
            self._events.on_worker_lost(losing, Loss.RECONNECTED)
        if (missing := self._lost.not_missing(hello.incarnation)) is not None:
            self._lives(missing)
        before = self.registry.get(hello.incarnation)
        self._check_holder(hello)
        if (away := self._lost.away(hello.name)) is not None:
            self._refuse(frame, JoinRefused(name_taken(away), for_now=True))
            return
        worker = self.registry.join(hello, now_s, frame)
        if isinstance(worker, JoinRefused):
            self._refuse(frame, worker)
            return
        assert self._events is not None
        if before is not None:
            self._events.on_worker_lost(before, Loss.RECONNECTED)
        self.sent[worker.id], worker.answered = 0, self._asks  # a Hello answers every earlier Ping: it is alive
        times = self.registry.times
        told = (int(1000 * each_s) for each_s in (times.heartbeat_s, times.lease_s, times.timeout_s))
        if self.send(worker, Welcome(self.incarnation, *told)):
            self.registry.welcome(worker)
            log.info(
                "worker %s joins: %s, %d KV blocks of %d tokens",
                hello.name, hello.role, hello.kv_blocks, hello.block_size,
            )  # fmt: skip
            self._events.on_worker_joined(worker)

    def _check_holder(self, hello: Hello) -> None:
        """Probe the connection of the worker that holds the name of ``hello``: its process may just have died without
        the monitor having reported the closed connection yet."""
        holder = self.registry.named(hello.name)
        if holder is not None and holder.id != hello.incarnation:
            self.send(holder, _NOBODY)

    def _stranger(self, frame: bytes, incarnation: Incarnation, message: FromWorker) -> None:
        """Handle a message of an incarnation that is not registered: note that a missing worker is alive, and send a
        Rejoin unless it says Goodbye."""
        control = control_identity(frame)
        missing = self._lost.missing_worker(incarnation)
        if missing is not None and missing.worker.route != control:
            missing = None  # the message comes from another process
        if missing is not None and (missing.alive or missing.looks or isinstance(message, Goodbye)):
            self._lives(missing)  # before the first sweep it may be a last message from before its death
            if isinstance(message, Heartbeat) and self.registry.endless(message):
                name, turn_ms = missing.worker.hello.name, message.turn_ms
                log.warning("worker %s does not come back: one turn of its loop has taken %d ms so far", name, turn_ms)
                self._lost.not_missing(incarnation)
        if isinstance(message, Goodbye):
            if missing is not None:
                self._lost.not_missing(incarnation)
            return
        self._reply(control, Rejoin())

    # -- lost connections -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Read the monitor's events: closed connections and failed handshakes. They do not identify the peer, so a
        closed connection starts probes of all workers."""
        closed = False
        while True:
            try:
                event, _ = EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                break
            closed |= event == zmq.EVENT_DISCONNECTED
            if event != zmq.EVENT_DISCONNECTED:
                self._complaints.failed_handshake()
        if closed and self._loop is not None:
            for delay_s in PROBES_S:
                self._loop.call_later(delay_s, self._probe)

    def _probe(self) -> None:
        """Send a meaningless message to every worker, which detects the ones that cannot be reached."""
        for worker in list(self.registry):
            if self._loop is not None:
                self.send(worker, _NOBODY)
