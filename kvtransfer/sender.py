"""The sending side of all hand-offs of one prefill worker: combines sessions, sockets and links.

The worker opens a transfer when a prompt arrives, reports progress after each layer, and finishes the transfer with the
first tokens. :meth:`Sender.pump` never blocks. It returns the transfers that ended, as :class:`Shipped` or
:class:`SendFailed`. The worker must hold the source blocks until then.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from common.core.errors import Damaged, InvariantBroken, WireError
from common.core.ids import BlockId, Incarnation, TransferId
from common.kv.storage.host import KvMemory
from common.net.messages import Accept, Ack, Cancel, Commit, Grant, Heard, Logprobs, Open, Peer, Released, ToPrefill
from common.net.peer_ban_list import PeerBanList
from common.net.sockets import Channels, receive, send
from kvtransfer.frames import FrameHeader, Rectangle
from kvtransfer.links import nixl, pull, shm, zeromq
from kvtransfer.links.base import SendLink
from kvtransfer.links.pull import PullSendLink
from kvtransfer.peer_proof import proof, proven, proves
from kvtransfer.session import SenderSession, TransferLimits, TransferState

log = logging.getLogger("tandem.kv")

IDLE_SOCKET_S = 60.0
COPY_BELOW_BYTES = 65536
QUEUE_BYTES = 256 << 20
"""Most payload bytes handed to the sockets of all peers that may not have left yet, retransmissions included. One
socket may have as much as all together leave free: a peer that hangs takes half of it at most, the next one a
quarter."""
UNSUMMED_BYTES = 16 << 20
"""Most bytes of one hand-off whose checksums are left until its first tokens are known; reading them then takes a few
milliseconds."""
ASKING_BYTES = 16 << 20
"""Bytes beyond QUEUE_BYTES per peer for retransmissions of the oldest frame, which show whether the peer still
receives."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """What Commit carries besides the counts: one entry per choice, and the ``figures`` of computing the prompt."""

    ids: bytes
    finish: tuple[int, ...]
    stop_ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...]
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shipped:
    """Decode has accepted the transfer. ``exposed_seconds`` is the part of its duration that computation did not
    hide."""

    transfer: TransferId
    link: str
    bytes: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The transfer ended without being accepted. ``cancelled_by_peer``: by decode, which reports that itself."""

    transfer: TransferId
    reason: str
    cancelled_by_peer: bool


@dataclass(slots=True)
class _PeerConnection:
    """The connection to one decode incarnation.

    ``handed`` counts the payload bytes given to the socket, ``passed`` those known to have arrived: a connection keeps
    the order, so an acknowledged frame proves that everything before it has arrived too. ``asked`` counts the bytes of
    retransmitted oldest frames since the last progress. ``used_at`` and ``heard_at`` are times in seconds.
    """

    socket: zmq.Socket[Any]
    used_at: float
    heard_at: float
    peer: Peer
    handed: int = 0
    passed: int = 0
    asked: int = 0

    @property
    def queued(self) -> int:
        return self.handed - self.passed

    def pass_on(self, end: int) -> None:
        """Record that the first ``end`` bytes have arrived."""
        if end > self.passed:
            self.asked = max(0, self.asked - (end - self.passed))
            self.passed = end


@dataclass(slots=True)
class _Outgoing:
    """One hand-off. ``ends``: per unacknowledged frame, ``connection.handed`` just after it was first sent. ``seen``:
    ``connection.passed`` when the timers last ran. ``commit_due``: send Commit (again) behind the frames that are
    due."""

    session: SenderSession
    connection: _PeerConnection
    table: Sequence[BlockId]
    token: bytes
    first: FirstTokens | None = None
    finished_at: float = 0.0
    commit_due: bool = False
    ends: dict[int, int] = field(default_factory=dict)
    seen: int = 0

    def queued_behind_others(self) -> bool:
        """Whether our oldest frame is queued behind frames of other hand-offs, of which some were acknowledged since
        the last check."""
        moved, self.seen = self.connection.passed > self.seen, self.connection.passed
        return moved and next(iter(self.ends.values()), 0) > self.connection.passed

    def passed(self, frame: int) -> None:
        """Record that frames up to ``frame`` (inclusive) have arrived."""
        while self.ends and (number := next(iter(self.ends))) <= frame:
            self.connection.pass_on(self.ends.pop(number))


class Sender:
    """Sends KV to any number of decode workers. ``transport`` is auto, shm, zmq or nixl; the receiver chooses a link
    that both sides allow. Raises StartError if ``transport`` is not available here."""

    def __init__(
        self,
        channels: Channels,
        memory: KvMemory,
        incarnation: Incarnation,
        host_id: str,
        *,
        transport: str = "auto",
        limits: TransferLimits | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._channels, self._memory = channels, memory
        self._queue_bytes = queue_bytes
        self._incarnation, self._host_id = incarnation, host_id
        self._secret = channels.secret()
        """Part of the identity of our sockets. A ROUTER moves an identity to the latest peer that claims it, so that it
        must be unguessable."""
        self._limits = limits or TransferLimits()
        self._transport = transport
        self._endpoint = shm.PoolEndpoint(memory, incarnation) if transport in ("auto", shm.NAME) else None
        self._nixl = nixl.NixlPoolEndpoint(memory, incarnation) if transport == nixl.NAME else None
        self._links: dict[str, SendLink] = {
            zeromq.NAME: zeromq.ZmqSendLink(memory),
            shm.NAME: PullSendLink(
                shm.NAME, memory, shm.ONE_PASS_GRAIN if memory.takes(memory) else pull.GRAIN, sums_later=True
            ),
        }
        if self._nixl is not None:
            self._links[nixl.NAME] = PullSendLink(nixl.NAME, memory)
        self._connections: dict[Incarnation, _PeerConnection] = {}
        self._outgoing: dict[TransferId, _Outgoing] = {}
        self._ended: list[Shipped | SendFailed] = []
        self._until = math.inf
        self.behind = False
        """Whether the last :meth:`pump` ran out of time with more to send."""
        self.bad_messages = 0
        self.ban_list = PeerBanList()

    def __len__(self) -> int:
        return len(self._outgoing)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._outgoing

    def granted(self, transfer: TransferId) -> bool:
        """Whether decode has reserved blocks for this transfer; False for an unknown one."""
        outgoing = self._outgoing.get(transfer)
        return outgoing is not None and outgoing.session.state is not TransferState.RESERVED

    # -- from the worker ----------------------------------------------------------------------------------------------

    def limit(self, limits: TransferLimits) -> None:
        """Apply ``limits`` to hand-offs that begin from now on."""
        self._limits = limits

    def open(self, transfer: TransferId, peer: Peer, tokens: int, table: Sequence[BlockId], now: float) -> None:
        """Announce a hand-off of ``tokens`` tokens to ``peer``. ``table`` may still grow; its blocks must be held until
        the hand-off ends. Raises WireError if ``peer`` is banned."""
        if self.ban_list.out(peer.incarnation):
            raise WireError(f"{peer.name} is banned: its messages made no sense")
        session = SenderSession(transfer, self._memory.layout, tokens, now, self._limits)
        self._outgoing[transfer] = _Outgoing(session, self._connection(peer, now), table, peer.token)
        self._announce(transfer, now)

    def computed(self, transfer: TransferId, table: Sequence[BlockId], tokens: int, layers: int, now: float) -> None:
        """Record that layers ``[0, layers)`` of tokens ``[0, tokens)`` are in the pool, and send the frames that are
        full."""
        if outgoing := self._outgoing.get(transfer):
            outgoing.table = table
            outgoing.session.computed(tokens, layers)
            self._push(outgoing, now)

    def finish(self, transfer: TransferId, first: FirstTokens, now: float) -> None:
        """Record the sampled first tokens; Commit is sent as soon as every frame has been."""
        if outgoing := self._outgoing.get(transfer):
            outgoing.first, outgoing.finished_at = first, outgoing.finished_at or now
            self._push(outgoing, now)

    def withdraw(self, transfer: TransferId, now: float) -> None:
        """Forget what was computed of a transfer without a grant: its blocks were freed, and it will be computed
        again."""
        if self.granted(transfer):
            raise InvariantBroken(f"{transfer} is withdrawn after its grant")
        self.computed(transfer, [], 0, 0, now)

    def cancel(self, transfer: TransferId, reason: str) -> None:
        """Give a transfer up; :meth:`pump` will not return it. Unknown transfers are ignored."""
        if outgoing := self._outgoing.pop(transfer, None):
            outgoing.session.end(TransferState.CANCELLED, reason)
            send(outgoing.connection.socket, Cancel(transfer.request, transfer.attempt, reason))

    def pump(self, now: float, budget_s: float = math.inf) -> list[Shipped | SendFailed]:
        """Read the messages of decode workers, run all timers, then send what may be sent for about ``budget_s``
        seconds at most. Returns the transfers that ended."""
        for connection in list(self._connections.values()):
            self._drain(connection, now)
        for outgoing in list(self._outgoing.values()):
            self._tick(outgoing, now)
        self.behind, self._until = False, self._channels.clock() + budget_s
        for outgoing in [each for each in self._outgoing.values() if each.commit_due or self._may_send(each)]:
            self._push_in_turn(outgoing, now)
        self._until = math.inf
        self._close_idle(now)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        for transfer in list(self._outgoing):
            self.cancel(transfer, "the prefill worker stops")
        for connection in self._connections.values():
            self._channels.unregister(connection.socket)
            connection.socket.close(linger=200)  # so that the Cancel messages still leave
        self._connections.clear()
        for endpoint in (self._endpoint, self._nixl):
            if endpoint is not None:
                endpoint.close()

    # -- sockets ------------------------------------------------------------------------------------------------------

    def _connection(self, peer: Peer, now: float) -> _PeerConnection:
        connection = self._connections.get(peer.incarnation)
        if connection is None:
            # the identity names both ends: a connection to an earlier process at this address is a different peer
            name = f"{self._incarnation}|{peer.incarnation}|{self._secret}".encode()
            socket = self._channels.dealer(peer.address, name, to="decode")
            self._channels.register(socket)
            connection = self._connections[peer.incarnation] = _PeerConnection(socket, now, now, peer)
        connection.used_at = now
        return connection

    def _hang_up(self, connection: _PeerConnection, now: float) -> None:
        """Close the connection to a peer that hangs, with all that libzmq has queued for it. Its other hand-offs, which
        have not waited as long, get a new connection and retransmit what was in flight."""
        if connection.queued:  # else the worker may simply be gone
            log.warning("decode worker %s is silent: dropping what is queued for it", connection.peer.name)
        self._close(connection, linger_ms=0)
        for outgoing in [each for each in self._outgoing.values() if each.connection is connection]:
            outgoing.connection = self._connection(connection.peer, now)
            outgoing.ends.clear()

    def _close_idle(self, now: float) -> None:
        """Close connections without hand-offs, sooner if bytes may be queued for a peer that is gone."""
        for connection in list(self._connections.values()):
            patience_s = self._limits.lease_s if connection.queued else IDLE_SOCKET_S
            unused = now - connection.used_at > patience_s
            if unused and not any(outgoing.connection is connection for outgoing in self._outgoing.values()):
                self._close(connection)

    def _drain(self, connection: _PeerConnection, now: float) -> None:
        while True:
            try:
                message = receive(connection.socket, ToPrefill)
            except Damaged:
                self.bad_messages += 1
                continue
            except WireError as error:
                if self._bad(connection, str(error)):
                    return
                continue
            if message is None:
                return
            connection.used_at = connection.heard_at = now
            outgoing = self._outgoing.get(TransferId(message.request, message.attempt))
            if outgoing is not None and outgoing.connection is connection:
                try:
                    self._handle(outgoing, message, now)
                except WireError as error:
                    self._bad(connection, str(error))
                if connection.socket.closed:
                    return

    def _bad(self, connection: _PeerConnection, why: str) -> bool:
        """Strike a peer for an invalid message. True if that bans it, which ends all hand-offs to it."""
        self.bad_messages += 1
        if not self.ban_list.strike(connection.peer.incarnation):
            return False
        log.warning("decode worker %s is banned; the last of its bad messages: %s", connection.peer.name, why)
        for outgoing in [each for each in self._outgoing.values() if each.connection is connection]:
            self._lose(outgoing, "the decode worker sends messages that make no sense", cancelled_by_peer=False)
        self._close(connection)
        return True

    def _close(self, connection: _PeerConnection, linger_ms: int = 200) -> None:
        self._channels.unregister(connection.socket)
        connection.socket.close(linger=linger_ms)
        del self._connections[connection.peer.incarnation]

    def _handle(self, outgoing: _Outgoing, message: Grant | Heard | Ack | Accept | Cancel, now: float) -> None:
        session = outgoing.session
        match message:
            case Grant() if not proves(message.proof, outgoing.token, session.transfer, "grant"):
                self._bad(outgoing.connection, "a Grant without a valid proof")
                return
            case Grant():
                if message.link not in self._links or self._transport not in ("auto", message.link):
                    self._lose(
                        outgoing,
                        f"decode wants link {message.link!r}, allowed is {self._transport}",
                        cancelled_by_peer=False,
                    )
                    return
                if message.have < session.tokens:
                    session.heard(message.step_ms / 1000, now)
                    grain = self._links[message.link].grain
                    session.granted(message.have, message.link, message.credit_bytes, now, grain)
            case Heard():
                session.heard(message.step_ms / 1000, now)
            case Ack():
                session.acked(message.frame, message.bytes + message.credit_bytes, now)
                outgoing.passed(message.frame)
            case Accept():
                if session.accepted(message.bytes, now):
                    outgoing.passed(session.frames)
                    self._shipped(outgoing)
            case Cancel():
                self._lose(outgoing, message.reason, cancelled_by_peer=True)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _announce(self, transfer: TransferId, now: float) -> None:
        outgoing = self._outgoing[transfer]
        if not outgoing.session.renewal_due(now):
            return
        layout = self._memory.layout
        message = Open(
            transfer.request,
            transfer.attempt,
            self._incarnation,
            outgoing.session.tokens,
            layout.fingerprint,
            layout.dtype,
            self._host_id,
            self._endpoint.address if self._endpoint else "",
            self._memory.blocks,
            layout.block_size,
            layout.head_shards,
            proof(outgoing.token, transfer, "open"),
            self._nixl.announcement if self._nixl else b"",
        )
        send(outgoing.connection.socket, message)

    def _push_in_turn(self, outgoing: _Outgoing, now: float) -> None:
        """Send, then move to the end of the queue if anything was sent: all get their turn even when time is short."""
        transfer, before = outgoing.session.transfer, outgoing.connection.handed
        self._push(outgoing, now)
        if outgoing.connection.handed > before:
            self._outgoing[transfer] = self._outgoing.pop(transfer)

    def _push(self, outgoing: _Outgoing, now: float) -> None:
        session = outgoing.session
        while self._may_send(outgoing):
            if self._channels.clock() >= self._until:
                self.behind = True
                return
            asks, before = session.repeats_oldest, outgoing.connection.handed
            if (what := session.next_cells()) is None:
                raise InvariantBroken(f"{session.transfer} was ready to send and has nothing to send")
            self._send_cells(outgoing, what)
            if asks:
                outgoing.connection.asked += outgoing.connection.handed - before
        if outgoing.first is not None and session.may_commit():
            self._sum(outgoing)
            session.committed(now)
            outgoing.commit_due = True
        if outgoing.commit_due:
            outgoing.commit_due = False
            self._send_commit(outgoing)

    def _may_send(self, outgoing: _Outgoing) -> bool:
        return outgoing.session.ready and self._has_room(outgoing)

    def _has_room(self, outgoing: _Outgoing) -> bool:
        """Whether more may be queued for this peer. A hand-off with nothing in flight may always send a frame, and so
        may retransmissions of its oldest frame, up to ASKING_BYTES: if frames were lost, only these can drain the
        queue."""
        connection, session = outgoing.connection, outgoing.session
        if session.repeats_oldest and connection.asked < ASKING_BYTES:
            return True
        if not session.unacked_bytes:
            return True
        return connection.queued < self._queue_bytes - sum(each.queued for each in self._connections.values())

    def _send_cells(self, outgoing: _Outgoing, what: Rectangle | FrameHeader) -> None:
        cells = what.cells if isinstance(what, FrameHeader) else what
        session = outgoing.session
        payload, size, checksum = self._links[session.link].payload(session.transfer, outgoing.table, cells)
        header = what if isinstance(what, FrameHeader) else session.sent(what, size, checksum)
        # libzmq copies small parts faster than it tracks them; large ones must not be copied again. If its queue is
        # full, the frame stays unacknowledged and the timer retransmits it
        connection = outgoing.connection
        with contextlib.suppress(zmq.Again):
            connection.socket.send_multipart([header.pack(), payload], zmq.NOBLOCK, copy=size < COPY_BELOW_BYTES)
            connection.handed += memoryview(payload).nbytes
            outgoing.ends.setdefault(header.number, connection.handed)
        self._sum(outgoing, UNSUMMED_BYTES)

    def _sum(self, outgoing: _Outgoing, but_bytes: int = 0) -> None:
        """Compute checksums that the frames did not carry, until at most ``but_bytes`` of the last frames are without.
        Done for Commit while decode copies the frames and after the first tokens were sent to the coordinator."""
        session = outgoing.session
        while session.unsummed and session.unsummed_bytes > but_bytes:
            cells = session.unsummed[0].cells
            session.summed(self._memory.checksum(outgoing.table, cells.tokens, cells.layers))

    def _send_commit(self, outgoing: _Outgoing) -> None:
        session, first = outgoing.session, outgoing.first
        assert first is not None
        commit = Commit(
            session.transfer.request,
            session.transfer.attempt,
            session.tokens,
            session.have,
            session.frames,
            session.bytes,
            session.checksum,
            self._memory.layout.fingerprint,
            first.ids,
            first.finish,
            first.stop_ids,
            first.logprobs,
            first.figures,
        )
        send(outgoing.connection.socket, proven(commit, outgoing.token))

    # -- endings and timers -------------------------------------------------------------------------------------------

    def _tick(self, outgoing: _Outgoing, now: float) -> None:
        session = outgoing.session
        if outgoing.queued_behind_others():
            session.waited(now)
        if session.tick(now):
            outgoing.commit_due = True
        if session.state is TransferState.EXPIRED:
            self._lose(outgoing, session.why_ended, cancelled_by_peer=False)
            if outgoing.connection.heard_at <= session.progress_at:
                self._hang_up(outgoing.connection, now)
            return
        self._announce(session.transfer, now)

    def _shipped(self, outgoing: _Outgoing) -> None:
        session = outgoing.session
        del self._outgoing[session.transfer]
        seconds = session.accepted_at - session.granted_at
        exposed = max(0.0, session.accepted_at - max(outgoing.finished_at, session.granted_at))
        self._ended.append(Shipped(session.transfer, session.link, session.bytes, seconds, exposed))
        session.move(TransferState.RELEASED)
        send(outgoing.connection.socket, Released(session.transfer.request, session.transfer.attempt))

    def _lose(self, outgoing: _Outgoing, reason: str, *, cancelled_by_peer: bool) -> None:
        session = outgoing.session
        del self._outgoing[session.transfer]
        session.end(TransferState.CANCELLED if cancelled_by_peer else TransferState.FAILED, reason)
        if not cancelled_by_peer:
            send(outgoing.connection.socket, Cancel(session.transfer.request, session.transfer.attempt, reason))
        self._ended.append(SendFailed(session.transfer, reason, cancelled_by_peer))
