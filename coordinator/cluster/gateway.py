"""The control socket: receives messages from workers and sends messages to them.

Owns one ROUTER socket and reads everything that has arrived in one turn of the event loop, so that a message per engine
step does not cost a task switch each. Malformed messages are counted and dropped. Hands messages of workers that have
joined to its :class:`GatewayEvents`, others to the reception, and notices closed connections. Knows no request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import assert_never

import zmq

from common.core.errors import Damaged, StartError, WireError
from common.core.ids import Incarnation, WorkerName, new_incarnation
from common.net.hosts import bracketed
from common.net.keys import Party
from common.net.messages import (
    Cached,
    FromWorker,
    Goodbye,
    Gpus,
    Heartbeat,
    Hello,
    LeaseAck,
    Leaving,
    Measured,
    Message,
    Moved,
    PromptLogprobs,
    Rejected,
    Rejoin,
    RequestFailed,
    Role,
    Timing,
    Tokens,
)
from common.net.peer_ban_list import STRIKES, PeerBanList
from common.net.socket_monitor import EVENT
from common.net.sockets import Channels, is_local
from common.net.wire import MAX_REPORT_BYTES, decode
from coordinator.cluster.complaints import Complaints
from coordinator.cluster.events import GatewayEvents, Loss
from coordinator.cluster.identities import control_identity, parse_identity, shown
from coordinator.cluster.lost_workers import LostWorkers
from coordinator.cluster.outbox import Outbox
from coordinator.cluster.reception import Reception
from coordinator.cluster.registry import Registry, WorkerHandle

log = logging.getLogger("tandem.gateway")

MESSAGES_PER_TURN = 512
"""After this many messages the event loop gets a turn, so that a flood of worker messages does not starve clients."""
PROBES_S = (0.01, 0.1)
"""Delays of the probes after a connection was closed: libzmq reports the event to the monitor before it removes the
peer from the socket's routing table."""
Replace = Callable[[str, int, str], None]
"""Requests the replacement of a worker, if the process id is still that of its process: (name, process id, reason)."""


class Gateway:
    """Binds ``tcp://host:port``, and with ``near`` also a Unix socket for the launcher's workers; updates ``registry``
    and calls ``events`` until closed. Raises StartError if it cannot bind, or if other machines could connect although
    there are no keys and ``insecure_cluster`` is not set."""

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
        self.ban_list = PeerBanList()
        self._moved: set[Incarnation] = set()
        """The workers that have joined another coordinator since this one is leaving."""
        self._complaints = Complaints()
        self._lost = LostWorkers()
        self.times_emptied = 0
        """How often the socket was read until it was empty. Messages that arrived before that are no longer queued
        here."""
        self._replace: Replace | None = None
        self._events: GatewayEvents | None = None
        self.clock = self.channels.clock
        try:
            self._socket, bound = self.channels.router(address, near=near)
            self._monitor = self.channels.endings(self._socket)
        except StartError:
            self.channels.close()
            raise
        self._outbox = Outbox(self._socket, registry, self._lose, self._rearm)
        keyed = self.channels.keys is not None
        self._reception = Reception(
            registry, self._outbox, self._lost, self._complaints, self.incarnation, self.clock, keyed=keyed
        )
        self.sent = self._outbox.sent
        """Number of control messages sent to each worker since its Hello."""
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
            self.registry.expect_rejoin(name, socket.gethostname(), pid, self.clock())

    def close(self) -> None:
        """Close the sockets. ``events`` are not called afterwards."""
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

    def leave(self) -> None:
        """Let workers dial the next coordinator at this address. Their sessions here stay for requests of this one."""
        self._reception.leaving = True
        for worker in list(self.registry):
            self.send(worker, Leaving())

    @property
    def handed_over(self) -> bool:
        """Whether every worker has joined another coordinator since :meth:`leave`."""
        return all(worker.id in self._moved for worker in self.registry)

    # -- out ------------------------------------------------------------------------------------------------------

    def send(self, worker: WorkerHandle, message: Message) -> bool:
        """Send a message; return False if the worker cannot be reached. It is then gone, and ``events`` is called in
        the next turn of the event loop."""
        return self._outbox.send(worker, message)

    def ask(self) -> int:
        """Send a Ping to the heartbeat thread of every worker and return its number. ``WorkerHandle.answered`` is at
        least that number once the worker has answered. A worker whose heartbeats go on without an answer is pinged
        again, because a Ping is lost while the heartbeat connection is down."""
        return self._outbox.ping_all()

    def _lose(self, worker: WorkerHandle) -> None:
        log.warning("worker %s is gone: its connection is closed", worker.hello.name)
        self._remove(worker)
        if self._loop is not None:  # not now, because the caller may be in the middle of a decision
            self._lost.lose(worker)
            self._loop.call_soon(self._closed, worker)
            self._loop.call_later(PROBES_S[0], self._probe)  # other workers may have died at the same time

    def _closed(self, worker: WorkerHandle) -> None:
        """Read the messages that have arrived, which may include its last tokens or its Goodbye; then the worker counts
        as missing."""
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

    def _remove(self, worker: WorkerHandle) -> None:
        self.registry.gone(worker)
        self._lost.not_losing(worker.id)
        self._outbox.forget(worker.id)

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
            self._outbox.reply(worker.route, Rejoin())  # it may be alive, with nothing to send
            self._outbox.forget(worker.id)
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
            if self.ban_list.out(peer):
                self._complaints.bad_message()
                continue
            try:
                self._dispatch(party, frames, now_s)
            except WireError as error:
                self._complaints.bad_message(f"from {shown(frames[0])}: {error}")
                self._complaints.log_due(now_s)
                if not isinstance(error, Damaged) and self.ban_list.strike(peer):
                    self._cut_off(*peer)

    def _cut_off(self, party: Party | None, frame: bytes) -> None:
        """Stop reading messages of an incarnation that sent too many bad ones, remove its worker and send it a
        Rejected. Its process may start again as another incarnation."""
        log.warning("%s is cut off: it sent %d invalid messages", shown(frame), STRIKES)
        worker = next((each for each in self.registry if each.route == frame), None)
        if worker is not None and party in (None, worker.role):  # else the sender misused the worker's identity
            self._outbox.reply(frame, Rejected(f"it sent {STRIKES} invalid messages"))
            self._remove(worker)
            if self._events is not None:
                self._events.on_worker_lost(worker, Loss.GIVEN_UP)

    def _dispatch(self, party: Party | None, frames: list[bytes], now_s: float) -> None:
        if len(frames) != 2:
            raise WireError("a message must have one part")
        frame, data = frames
        try:
            message: FromWorker = decode(data, FromWorker, MAX_REPORT_BYTES)
        except WireError:
            if self._reception.other_version(frame, data):
                return
            raise
        name, incarnation = parse_identity(frame)
        events = self._events
        assert events is not None
        if isinstance(message, Hello):
            self._reception.hello(party, frame, message, now_s, events)
            return
        if self._reception.leaving and self._reception.is_elsewhere(frame, incarnation):
            return  # a worker that looks for the next coordinator, and has found this one
        worker = self.registry.get(incarnation) or self._lost.losing_worker(incarnation)
        if worker is None:
            if isinstance(message, Heartbeat):
                self.registry.stranger_beats(name, message, now_s)
            self._reception.stranger(frame, incarnation, message, events)
            return
        if party not in (None, worker.role):
            raise WireError(f"sent as a {worker.role} worker with the key of {party}")
        if control_identity(frame) != worker.route:
            raise WireError(f"not sent from the identity of {worker.hello.name}, whose incarnation it claims")
        self.registry.on_message(worker, now_s)
        self._deliver(worker, message, now_s, events)

    def _deliver(
        self,
        worker: WorkerHandle,
        message: Tokens
        | PromptLogprobs
        | Heartbeat
        | Gpus
        | Timing
        | RequestFailed
        | Cached
        | Measured
        | LeaseAck
        | Moved
        | Goodbye,
        now_s: float,
        events: GatewayEvents,
    ) -> None:
        match message:
            case Tokens():
                events.tokens(worker, message)
            case PromptLogprobs():
                events.prompt_logprobs(worker, message)
            case Heartbeat():
                self.registry.beat(worker, message, now_s)
                worker.clock.took(message.unix_ms, self.channels.unix_ms())
                self._outbox.answered(worker, message.asked)
                if self.registry.hangs(worker):
                    name, turn_ms = worker.hello.name, message.turn_ms
                    log.warning("worker %s is gone: one turn of its loop has taken %d ms so far", name, turn_ms)
                    self.registry.give_up(worker, now_s)
                    self._remove(worker)
                    events.on_worker_lost(worker, Loss.GIVEN_UP)
                else:
                    events.beat(worker)
            case Gpus():
                self.registry.read_gpus(worker, message)
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
            case Moved():
                self._moved.add(worker.id)
            case Goodbye():
                log.info("worker %s leaves: %s", worker.hello.name, message.reason)
                self._remove(worker)
                self.registry.absent.left(worker.hello.name, message.reason, now_s)
                events.on_worker_left(worker)
            case _:
                assert_never(message)

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
                self._outbox.probe(worker)
