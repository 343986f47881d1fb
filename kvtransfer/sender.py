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
from dataclasses import dataclass

import zmq

from common.core.errors import Damaged, InvariantBroken, WireError
from common.core.ids import BlockId, Incarnation, TransferId
from common.kv.storage.cuda import Memory
from common.kv.storage.device_calls import DeviceFailed, Event
from common.net.messages import Accept, Ack, Cancel, Commit, Grant, Heard, Open, Peer, Released, ToPrefill
from common.net.peer_ban_list import PeerBanList
from common.net.sockets import Channels, receive, send
from kvtransfer.frames import FrameHeader, Rectangle
from kvtransfer.links import nccl
from kvtransfer.links.base import LinkLost, SendLink
from kvtransfer.links.choice import SendLinks
from kvtransfer.outgoing import Computed, FirstTokens, Outgoing, PeerConnection
from kvtransfer.peer_proof import proof, proven, proves
from kvtransfer.session import SenderSession, TransferLimits, TransferState

__all__ = ["FirstTokens", "SendFailed", "Sender", "Shipped"]

log = logging.getLogger("tandem.kv")

IDLE_SOCKET_S = 60.0
"""Seconds without a hand-off after which the connection to a decode worker is closed."""
COPY_BELOW_BYTES = 65536
"""Payloads smaller than this are copied into libzmq's buffers; larger ones are handed over by reference."""
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


class Sender:
    """Sends KV to any number of decode workers. ``transport`` is a ``--kv-transport``; the receiver chooses a link that
    both sides allow. Process groups meet at ``host``. Raises StartError if ``transport`` is not available here."""

    def __init__(
        self,
        channels: Channels,
        memory: Memory,
        incarnation: Incarnation,
        host_id: str,
        *,
        transport: str = "auto",
        limits: TransferLimits | None = None,
        queue_bytes: int = QUEUE_BYTES,
        host: str = "127.0.0.1",
    ) -> None:
        self._channels, self._memory = channels, memory
        self._queue_bytes = queue_bytes
        self._incarnation, self._host_id = incarnation, host_id
        self._secret = channels.secret()
        """Part of the identity of our sockets. A ROUTER moves an identity to the latest peer that claims it, so that it
        must be unguessable."""
        self._limits = limits or TransferLimits()
        self._links_here = SendLinks(memory, incarnation, transport, host)
        self._links: dict[str, SendLink] = self._links_here.by_name
        self._unsummed_bytes = UNSUMMED_BYTES if memory.kind == "host" else 0  # a GPU hashes beside its other work
        self._connections: dict[Incarnation, PeerConnection] = {}
        self._outgoing: dict[TransferId, Outgoing] = {}
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

    @property
    def waits_for_device(self) -> bool:
        """Whether a hand-off waits for work of the device. Its end does not wake the worker's poll, so the worker must
        check for it."""
        return any(outgoing.waits_for_device for outgoing in self._outgoing.values())

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
        self._outgoing[transfer] = Outgoing(session, self._connection(peer, now), table, peer.token)
        self._announce(transfer, now)

    def computed(
        self,
        transfer: TransferId,
        table: Sequence[BlockId],
        tokens: int,
        layers: int,
        now: float,
        after: Event | None = None,
    ) -> None:
        """Record that layers ``[0, layers)`` of tokens ``[0, tokens)`` are in the pool, and send the frames that are
        full. ``after``: they are there only once this event of the pool (``PoolMemory.mark``) has ended."""
        if outgoing := self._outgoing.get(transfer):
            outgoing.table = table
            if after is None and not outgoing.computing:
                outgoing.session.computed(tokens, layers)
            else:
                outgoing.computing.append(Computed(after, tokens, layers))
                self._follow(outgoing)
            self._push(outgoing, now)

    def has_ended(self, event: Event | None) -> bool:
        """Return whether an event of the pool has ended, or its work has failed."""
        try:
            return event is None or self._links_here.ended(event)
        except DeviceFailed:
            return True

    def _follow(self, outgoing: Outgoing) -> None:
        """Record the layers whose kernels have ended meanwhile. If one failed, the hand-off fails; the worker's next
        step reports the cause."""
        while outgoing.computing:
            oldest = outgoing.computing[0]
            try:
                if oldest.event is not None and not self._links_here.ended(oldest.event):
                    return
            except DeviceFailed as error:
                outgoing.computing.clear()
                self._lose(outgoing, f"the KV was not computed: {error}", cancelled_by_peer=False)
                return
            outgoing.computing.popleft()
            outgoing.session.computed(oldest.tokens, oldest.layers)

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
        if outgoing := self._outgoing.get(transfer):
            outgoing.computing.clear()
        self.computed(transfer, [], 0, 0, now)

    def cancel(self, transfer: TransferId, reason: str) -> None:
        """Give a transfer up; :meth:`pump` will not return it. Unknown transfers are ignored."""
        if outgoing := self._outgoing.pop(transfer, None):
            self._forget(outgoing)
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
        for outgoing in [each for each in list(self._outgoing.values()) if self._is_due(each)]:
            self._push_in_turn(outgoing, now)
        self._until = math.inf
        self._close_idle(now)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Cancel all hand-offs and close the sockets and the links."""
        for transfer in list(self._outgoing):
            self.cancel(transfer, "the prefill worker stops")
        for connection in self._connections.values():
            self._channels.unregister(connection.socket)
            connection.socket.close(linger=200)  # so that the Cancel messages still leave
        self._connections.clear()
        self._links_here.close()

    # -- sockets ------------------------------------------------------------------------------------------------------

    def _connection(self, peer: Peer, now: float) -> PeerConnection:
        connection = self._connections.get(peer.incarnation)
        if connection is None:
            # the identity names both ends: a connection to an earlier process at this address is a different peer
            name = f"{self._incarnation}|{peer.incarnation}|{self._secret}".encode()
            socket = self._channels.dealer(peer.address, name, to="decode")
            self._channels.register(socket)
            connection = self._connections[peer.incarnation] = PeerConnection(socket, now, now, peer)
        connection.used_at = now
        return connection

    def _hang_up(self, connection: PeerConnection, now: float) -> None:
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

    def _drain(self, connection: PeerConnection, now: float) -> None:
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

    def _bad(self, connection: PeerConnection, why: str) -> bool:
        """Strike a peer for an invalid message. True if that bans it, which ends all hand-offs to it."""
        self.bad_messages += 1
        if not self.ban_list.strike(connection.peer.incarnation):
            return False
        log.warning("decode worker %s is banned; the last of its bad messages: %s", connection.peer.name, why)
        for outgoing in [each for each in self._outgoing.values() if each.connection is connection]:
            self._lose(outgoing, "the decode worker sends messages that make no sense", cancelled_by_peer=False)
        self._close(connection)
        return True

    def _close(self, connection: PeerConnection, linger_ms: int = 200) -> None:
        self._channels.unregister(connection.socket)
        connection.socket.close(linger=linger_ms)
        del self._connections[connection.peer.incarnation]

    def _handle(self, outgoing: Outgoing, message: Grant | Heard | Ack | Accept | Cancel, now: float) -> None:
        session = outgoing.session
        match message:
            case Grant() if not proves(message.proof, outgoing.token, session.transfer, "grant"):
                self._bad(outgoing.connection, "a Grant without a valid proof")
                return
            case Grant():
                if message.link not in self._links or message.link not in self._links_here.allowed:
                    allowed = ", ".join(self._links_here.allowed)
                    why = f"decode wants link {message.link!r}, allowed is {allowed}"
                    self._lose(outgoing, why, cancelled_by_peer=False)
                    return
                if self._links_here.groups is not None and message.link != nccl.NAME:
                    self._links_here.groups.declined(session.transfer, now)
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
            self._links_here.pool,
            self._memory.blocks,
            layout.block_size,
            layout.head_shards,
            proof(outgoing.token, transfer, "open"),
            self._links_here.agent(transfer, outgoing.connection.peer.incarnation, now),
        )
        send(outgoing.connection.socket, message)

    def _push_in_turn(self, outgoing: Outgoing, now: float) -> None:
        """Send, then move to the end of the queue if anything was sent: all get their turn even when time is short."""
        transfer, before = outgoing.session.transfer, outgoing.connection.handed
        self._push(outgoing, now)
        if outgoing.connection.handed > before:
            self._outgoing[transfer] = self._outgoing.pop(transfer)

    def _push(self, outgoing: Outgoing, now: float) -> None:
        session = outgoing.session
        while self._may_send(outgoing):
            if self._channels.clock() >= self._until:
                self.behind = True
                return
            asks, before = session.repeats_oldest, outgoing.connection.handed
            if (what := outgoing.staged or session.next_cells()) is None:
                raise InvariantBroken(f"{session.transfer} was ready to send and has nothing to send")
            try:
                if not self._send_cells(outgoing, what):
                    return
            except LinkLost as error:
                self._lose(outgoing, str(error), cancelled_by_peer=False)
                return
            if asks:
                outgoing.connection.asked += outgoing.connection.handed - before
        self._push_commit(outgoing, now)

    def _push_commit(self, outgoing: Outgoing, now: float) -> None:
        """Send Commit if it is due: all is sent, the first tokens and all checksums are known."""
        session = outgoing.session
        if outgoing.first is not None and session.may_commit() and outgoing.staged is None:
            try:
                outgoing.summing = not self._sum(outgoing)
            except LinkLost as error:
                self._lose(outgoing, str(error), cancelled_by_peer=False)
                return
            if outgoing.summing:
                return
            session.committed(now)
            outgoing.commit_due = True
        if outgoing.commit_due:
            outgoing.commit_due = False
            self._send_commit(outgoing)

    def _is_due(self, outgoing: Outgoing) -> bool:
        """Return whether this hand-off has something to send or waits for the device."""
        if outgoing.computing:
            self._follow(outgoing)
        if outgoing.session.over:
            return False
        return outgoing.commit_due or outgoing.summing or outgoing.waits_for_device or self._may_send(outgoing)

    def _may_send(self, outgoing: Outgoing) -> bool:
        return (outgoing.staged is not None or outgoing.session.ready) and self._has_room(outgoing)

    def _has_room(self, outgoing: Outgoing) -> bool:
        """Return whether more may be queued for this peer. A hand-off with nothing in flight may always send a frame,
        and so may retransmissions of its oldest frame, up to ASKING_BYTES: if frames were lost, only these can drain
        the queue."""
        connection, session = outgoing.connection, outgoing.session
        if session.repeats_oldest and connection.asked < ASKING_BYTES:
            return True
        if not session.unacked_bytes:
            return True
        return connection.queued < self._queue_bytes - sum(each.queued for each in self._connections.values())

    def _send_cells(self, outgoing: Outgoing, what: Rectangle | FrameHeader) -> bool:
        """Send one frame; False if its cells are still being copied from a device. Raises LinkLost."""
        cells = what.cells if isinstance(what, FrameHeader) else what
        session = outgoing.session
        made = self._links[session.link].payload(session.transfer, outgoing.table, cells)
        outgoing.staged = what if made is None else None
        if made is None:
            return False
        payload, size, checksum = made
        header = what if isinstance(what, FrameHeader) else session.sent(what, size, checksum)
        # libzmq copies small parts faster than it tracks them; large ones must not be copied again. If its queue is
        # full, the frame stays unacknowledged and the timer retransmits it
        connection = outgoing.connection
        with contextlib.suppress(zmq.Again):
            connection.socket.send_multipart([header.pack(), payload], zmq.NOBLOCK, copy=size < COPY_BELOW_BYTES)
            connection.handed += memoryview(payload).nbytes
            outgoing.ends.setdefault(header.number, connection.handed)
        self._sum(outgoing, self._unsummed_bytes)
        return True

    def _sum(self, outgoing: Outgoing, but_bytes: int = 0) -> bool:
        """Compute checksums that the frames did not carry, but leave out the last frames, of at most ``but_bytes``;
        return False if a device is still computing one. Commit needs all of them; those are computed while decode
        copies the frames, after the first tokens were sent to the coordinator. Raises LinkLost."""
        session = outgoing.session
        link = self._links[session.link]
        while session.unsummed and session.unsummed_bytes > but_bytes:
            checksum = link.checksum(session.transfer, outgoing.table, session.unsummed[0].cells)
            if checksum is None:
                return False
            session.summed(checksum)
        return True

    def _send_commit(self, outgoing: Outgoing) -> None:
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

    def _tick(self, outgoing: Outgoing, now: float) -> None:
        session = outgoing.session
        if outgoing.queued_behind_others():
            session.waited(now)
        session.waits_for_device = outgoing.waits_for_device
        if session.tick(now):
            outgoing.commit_due = True
        if session.state is TransferState.EXPIRED:
            if self._links_here.groups is not None:
                self._links_here.groups.failed(session.transfer, now)
            self._lose(outgoing, session.why_ended, cancelled_by_peer=False)
            if outgoing.connection.heard_at <= session.progress_at:
                self._hang_up(outgoing.connection, now)
            return
        self._announce(session.transfer, now)

    def _shipped(self, outgoing: Outgoing) -> None:
        session = outgoing.session
        del self._outgoing[session.transfer]
        self._forget(outgoing)
        seconds = session.accepted_at - session.granted_at
        exposed = max(0.0, session.accepted_at - max(outgoing.finished_at, session.granted_at))
        self._ended.append(Shipped(session.transfer, session.link, session.bytes, seconds, exposed))
        session.move(TransferState.RELEASED)
        send(outgoing.connection.socket, Released(session.transfer.request, session.transfer.attempt))

    def _forget(self, outgoing: Outgoing) -> None:
        for link in self._links.values():
            link.forget(outgoing.session.transfer)

    def _lose(self, outgoing: Outgoing, reason: str, *, cancelled_by_peer: bool) -> None:
        session = outgoing.session
        del self._outgoing[session.transfer]
        self._forget(outgoing)
        session.end(TransferState.CANCELLED if cancelled_by_peer else TransferState.FAILED, reason)
        if not cancelled_by_peer:
            send(outgoing.connection.socket, Cancel(session.transfer.request, session.transfer.attempt, reason))
        self._ended.append(SendFailed(session.transfer, reason, cancelled_by_peer))
