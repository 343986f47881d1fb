"""The receiving side of all hand-offs of one decode worker: combines sessions, the socket and links.

The worker calls :meth:`Receiver.expect` with the blocks reserved for a hand-off. A hand-off is granted once both this
reservation and the sender's Open are there, in either order. Each frame is checked against the reservation before a
byte is copied; frames of unknown, expired or earlier transfers are dropped. :meth:`Receiver.pump` returns the hand-offs
that ended, as :class:`Landed` or :class:`TransferFailed`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import zmq

from common.core.errors import Damaged, WireError
from common.core.ids import BlockId, Incarnation, TransferId, new_incarnation
from common.kv.storage.cuda import Memory
from common.kv.storage.device_calls import Event
from common.net.messages import Accept, Ack, Cancel, Commit, Grant, Heard, Message, Open, Peer, Released, ToDecode
from common.net.peer_ban_list import PeerBanList
from common.net.sockets import Channels, send
from common.net.wire import MAX_HANDOFF_BYTES, decode
from kvtransfer.flow_control import TRANSFER_BYTES, CreditBook
from kvtransfer.frames import FrameHeader
from kvtransfer.links import nccl, nixl
from kvtransfer.links.base import ReceiveLink
from kvtransfer.links.choice import ReceiveLinks
from kvtransfer.links.cuda_ipc import CudaIpcReceiveLink
from kvtransfer.links.pull import PullReceiveLink
from kvtransfer.peer_proof import is_proven, proof, proves
from kvtransfer.session import FrameVerdict, ReceiverSession, TransferLimits, TransferState
from kvtransfer.source_pools import Connecting, Sources

log = logging.getLogger("tandem.kv")

MAX_EARLY = 4096
"""Maximum number of announcements (Open) kept without a reservation. Beyond it the oldest are forgotten; their senders
announce again. One takes about 5 KB, and up to 64 KiB more with NIXL's metadata of the sender's pool."""


ACKNOWLEDGED_BYTES = TRANSFER_BYTES // 2
"""Frames that land in one call of ``pump`` are acknowledged together, but at least once per this many bytes, so that
their sender does not run out of credit."""

MAX_PULLS = 64
"""Maximum number of frames of one transfer that wait while an earlier one is being read; further ones are dropped, and
the sender retransmits them."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Everything has arrived and matches the Commit; the blocks may become visible."""

    transfer: TransferId
    commit: Commit


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The hand-off failed; the worker must drop the reservation's blocks. ``cancelled_by_peer``: by the sender."""

    transfer: TransferId
    reason: str
    cancelled_by_peer: bool


@dataclass(slots=True)
class _Early:
    """An Open ``said`` by ``peer`` (a socket identity) without a reservation yet, last received ``at`` (seconds).
    ``sent_step_ms`` as in :class:`_Incoming`."""

    peer: bytes
    said: Open
    at: float
    sent_step_ms: int = 0


@dataclass(slots=True)
class _Incoming:
    """One hand-off with a reservation.

    ``table``: the reserved blocks. ``token``: the secret that proves the sender. ``peer``: the socket identity of the
    sender, b"" until its Open (``announced``) has arrived. ``link``: set once the sender's pool is connected; then the
    hand-off is granted. ``sent_step_ms``: the step duration last sent to the sender. ``pulls``: frames in order, the
    first of which is being read. ``commit``: a Commit that arrived behind them. ``acknowledged_bytes``: how many of the
    placed bytes were acknowledged. ``after``: an event behind the engine's earlier work on the reserved blocks."""

    session: ReceiverSession
    table: Sequence[BlockId]
    token: bytes = b""
    peer: bytes = b""
    announced: Open | None = None
    link: ReceiveLink | None = None
    sent_step_ms: int = 0
    pulls: deque[tuple[FrameHeader, memoryview]] = field(default_factory=deque)
    commit: Commit | None = None
    acknowledged_bytes: int = 0
    after: Event | None = None


class Receiver:
    """Receives KV from any number of prefill workers into ``memory``. ``transport`` is a ``--kv-transport``; auto means
    reading the sender's pool if it can be mapped, else ZeroMQ (:mod:`kvtransfer.links.choice`). Raises StartError if
    the transport is not available on this machine."""

    def __init__(
        self,
        channels: Channels,
        memory: Memory,
        host_id: str,
        address: str,
        *,
        transport: str = "auto",
        limits: TransferLimits | None = None,
        credit: CreditBook | None = None,
    ) -> None:
        self._memory, self._transport = memory, transport
        self._limits = limits or TransferLimits()
        self._nixl = nixl.NixlReader(new_incarnation()) if transport == nixl.NAME else None
        calls = memory.calls if memory.kind == "cuda" else None
        self._sources = Sources(channels, self._limits.lease_s, self._nixl, calls)
        self._links = ReceiveLinks(memory, transport, host_id, self._sources)
        self.credit = credit or CreditBook()
        self._channels = channels
        self._socket, self.address = channels.router(address, kv=True)
        channels.register(self._socket)
        self._incoming: dict[TransferId, _Incoming] = {}
        self._early: OrderedDict[TransferId, _Early] = OrderedDict()
        self._ended: list[Landed | TransferFailed] = []
        self._to_acknowledge: dict[TransferId, _Incoming] = {}
        """Transfers with frames that have landed, or were retransmitted, in this call of :meth:`pump`."""
        self.step_s = 0.0
        """Duration in seconds of the worker's longest steps. The receiver answers nothing during a step."""
        self.bad_messages = 0
        self.ban_list = PeerBanList()
        self.stale_frames = 0

    def __len__(self) -> int:
        return sum(not self._settled(incoming) for incoming in self._incoming.values())

    @property
    def waited_for(self) -> int:
        """Number of hand-offs whose senders wait for answers, including those without a reservation yet."""
        return len(self) + len(self._early)

    # -- from the worker ----------------------------------------------------------------------------------------------

    def limit(self, limits: TransferLimits) -> None:
        """Apply ``limits`` to hand-offs that begin from now on."""
        self._limits = limits
        self._sources.lease_s = limits.lease_s

    def expect(
        self, transfer: TransferId, tokens: int, have: int, table: Sequence[BlockId], peer: Peer, now: float
    ) -> None:
        """Expect a hand-off into ``table``, which has blocks for ``tokens`` tokens and already holds the KV of the
        first ``have``. Only a sender that proves that it knows ``peer``'s token gets the grant, and only KV of
        ``peer``'s element type is accepted."""
        travels = replace(self._memory.layout, dtype=peer.dtype)
        session = ReceiverSession(transfer, travels, tokens, have, now, self._limits)
        self._incoming[transfer] = _Incoming(session, table, peer.token, after=self._memory.mark())
        if early := self._early.pop(transfer, None):
            try:
                self._grant(early.peer, early.said, now)
            except WireError as error:
                self._bad(early.peer, str(error))

    def cancel(self, transfer: TransferId, reason: str) -> None:
        """Cancel a hand-off; :meth:`pump` will not return it. Unknown hand-offs are ignored."""
        self._early.pop(transfer, None)
        self.credit.close(transfer)
        incoming = self._incoming.pop(transfer, None)
        if incoming is not None and incoming.link is not None:
            incoming.link.close()
        if incoming is not None and incoming.session.end(TransferState.CANCELLED, reason) and incoming.peer:
            self._reply(incoming.peer, Cancel(transfer.request, transfer.attempt, reason))

    def pump(self, clock: Callable[[], float], budget_s: float) -> list[Landed | TransferFailed]:
        """Process what has arrived (at least one message, then more for about ``budget_s`` seconds) and run the timers.
        Returns the hand-offs that ended."""
        now = clock()
        until = now + budget_s
        first = True
        while first or (now := clock()) < until:
            first = False
            if not self._channels.readable(self._socket):
                break
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if not parts:
                continue
            peer = parts[0].bytes
            if self.ban_list.out(peer):
                self.bad_messages += 1
                continue
            try:
                self._take(peer, parts[1:], now)
            except Damaged:
                self.bad_messages += 1
            except WireError as error:
                self._bad(peer, str(error))
        self._tick(clock())
        for transfer in [*self._to_acknowledge]:
            self._acknowledge(transfer)
        ended, self._ended = self._ended, []
        return ended

    def away(self, step_s: float) -> None:
        """Prepare for a step of about ``step_s`` seconds, during which the receiver answers nothing. Senders that would
        give up before its end get a Heard with that duration, unless they already got one at least as long."""
        self.step_s = max(self.step_s, step_s)
        if step_s * self._limits.busy_steps <= self._limits.no_progress_s:
            return
        waiting: list[tuple[TransferId, _Early | _Incoming]] = [*self._early.items()]
        waiting += [(id, each) for id, each in self._incoming.items() if each.peer and not self._settled(each)]
        for transfer, sender in waiting:
            if sender.sent_step_ms < int(step_s * 1000):
                self._heard(transfer, sender)

    def close(self) -> None:
        """Cancel all hand-offs and close the socket, the links and the mapped pools."""
        for transfer in list(self._incoming):
            self.cancel(transfer, "the decode worker stops")
        self._channels.unregister(self._socket)
        self._socket.close(linger=200)  # so that the Cancel messages still leave
        self._links.close()
        self._sources.close()
        if self._nixl is not None:
            self._nixl.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _bad(self, peer: bytes, why: str) -> None:
        """Count an invalid message against a peer. The third one bans the peer, and its hand-offs fail."""
        self.bad_messages += 1
        if self.ban_list.strike(peer):
            log.warning("prefill peer %r is banned; the last of its bad messages: %s", peer[:64], why)
            for incoming in [each for each in self._incoming.values() if each.peer == peer]:
                self._fail(incoming, TransferState.FAILED, "the sender's messages make no sense")

    def _take(self, peer: bytes, parts: list[zmq.Frame], now: float) -> None:
        if len(parts) == 2:
            self._frame(peer, FrameHeader.unpack(parts[0].bytes), parts[1].buffer, now)
        elif len(parts) == 1:
            self._message(peer, decode(parts[0].buffer, ToDecode, MAX_HANDOFF_BYTES), now)
        else:
            raise WireError("neither a message (one part) nor a frame (two)")

    def _message(self, peer: bytes, message: Open | Commit | Cancel | Released, now: float) -> None:
        transfer = TransferId(message.request, message.attempt)
        incoming = self._incoming.get(transfer)
        match message:
            case Open():
                self._opened(peer, message, incoming, now)
            case Commit():
                self._commit(peer, message, incoming, now)
            case Cancel():
                if (early := self._early.get(transfer)) is not None and early.peer == peer:
                    del self._early[transfer]
                if incoming is not None and incoming.peer == peer:
                    self._fail(incoming, TransferState.CANCELLED, message.reason, reply=False)
            case Released():
                if incoming is not None and incoming.session.state is TransferState.ACCEPTED and incoming.peer == peer:
                    incoming.session.move(TransferState.RELEASED)
                    del self._incoming[transfer]

    def _opened(self, peer: bytes, message: Open, incoming: _Incoming | None, now: float) -> None:
        transfer = TransferId(message.request, message.attempt)
        if incoming is None:
            if self._nixl is None and self._links.groups is None:
                message = msgspec.structs.replace(message, agent=b"")
            early = _Early(peer, message, now)
            # another peer may have copied this Open from the network: only the first that sent it is kept
            if transfer not in self._early or self._early[transfer].peer == peer:
                self._early[transfer] = early
                self._early.move_to_end(transfer)
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            self._heard(transfer, early)
        elif not incoming.peer:
            self._grant(peer, message, now)
        elif incoming.peer == peer and not self._settled(incoming):
            incoming.session.renewed(now)
            if not incoming.session.frames:  # the Grant may have been lost
                self._answer(incoming)

    def _grant(self, peer: bytes, message: Open, now: float) -> None:
        incoming = self._incoming[TransferId(message.request, message.attempt)]
        session = incoming.session
        if not proves(message.proof, incoming.token, session.transfer, "open"):
            raise WireError(f"the sender of {session.transfer} is not the one that the coordinator chose")
        incoming.peer, incoming.announced = peer, message
        said = (message.tokens, message.dtype, message.layout)
        expected = (session.tokens, session.layout.dtype, session.layout.fingerprint)
        if said != expected:
            words = "{} tokens of {} in layout {}"
            why = f"{words.format(*said)}, expected {words.format(*expected)}"
            self._fail(incoming, TransferState.FAILED, why)
            return
        self._connect(incoming, message, now)
        if not self._settled(incoming):
            self._answer(incoming)

    def _connect(self, incoming: _Incoming, announced: Open, now: float) -> bool:
        """Choose the best link. Returns True if there is one now; False while the sender's pool is being connected, and
        after the hand-off has failed because no link is possible."""
        link = self._links.choose(announced, incoming.session.layout, incoming.after, now)
        if link is None:
            why = f"the sender's pool is out of reach of --kv-transport {self._transport}"
            self._fail(incoming, TransferState.FAILED, why)
        elif not isinstance(link, Connecting):
            incoming.link = link
        return incoming.link is not None

    def _answer(self, incoming: _Incoming) -> None:
        """Answer an Open: with the Grant, or with Heard while there is no link."""
        session, link = incoming.session, incoming.link
        transfer = session.transfer
        if link is None:
            self._heard(transfer, incoming)
            return
        incoming.sent_step_ms = int(self.step_s * 1000)
        shown = proof(incoming.token, transfer, "grant")
        credit = self.credit.open(transfer, incoming.peer)
        grant = Grant(transfer.request, transfer.attempt, session.have, link.name, credit, incoming.sent_step_ms, shown)
        self._reply(incoming.peer, grant)

    def _heard(self, transfer: TransferId, sender: _Early | _Incoming) -> None:
        sender.sent_step_ms = int(self.step_s * 1000)
        self._reply(sender.peer, Heard(transfer.request, transfer.attempt, sender.sent_step_ms))

    def _frame(self, peer: bytes, header: FrameHeader, payload: memoryview, now: float) -> None:
        incoming = self._incoming.get(header.transfer)
        if self._links.groups is not None:  # its bytes arrive even if the frame is dropped
            self._links.groups.announced(Incarnation(peer.split(b"|")[0].decode(errors="replace")), header, payload)
        if incoming is None or incoming.peer != peer or incoming.link is None:
            self.stale_frames += 1
            return
        session = incoming.session
        if incoming.pulls:
            session.renewed(now)
            if header.number == session.frames + len(incoming.pulls) and len(incoming.pulls) < MAX_PULLS:
                incoming.pulls.append((header, payload))
                if isinstance(incoming.link, nccl.NcclReceiveLink):
                    incoming.link.queued(header, payload)
            return
        verdict = session.judge(header, now)
        if verdict is FrameVerdict.TAKE:
            incoming.pulls.append((header, payload))
            self._pull(incoming, now)
        elif verdict is FrameVerdict.STRANGE:
            raise WireError(f"frame {header.number} of {header.transfer} does not belong here")
        else:
            self._to_acknowledge[header.transfer] = incoming

    def _pull(self, incoming: _Incoming, now: float) -> None:
        """Place the queued frames in order, up to the first that is still being read. If one cannot be placed, it and
        all later ones are dropped, and the sender retransmits them."""
        session, link = incoming.session, incoming.link
        while incoming.pulls and link is not None:
            header, payload = incoming.pulls[0]
            try:
                if session.judge(header, now) is not FrameVerdict.TAKE:
                    raise WireError(f"frame {header.number} of {header.transfer} does not belong here")
                if (checksum := link.place(header, payload, incoming.table)) is None:
                    return
            except WireError as error:
                incoming.pulls.clear()
                if link.lost:
                    self._fail(incoming, TransferState.FAILED, str(error))
                    return
                raise
            incoming.pulls.popleft()
            session.took(header, checksum, now)
            self._to_acknowledge[header.transfer] = incoming
            if session.bytes - incoming.acknowledged_bytes >= ACKNOWLEDGED_BYTES:
                self._acknowledge(header.transfer)
        if incoming.commit is not None:
            commit, incoming.commit = incoming.commit, None
            self._commit(incoming.peer, commit, incoming, now)

    def _acknowledge(self, transfer: TransferId) -> None:
        """Send an Ack of what has landed, or Accept again; nothing for a transfer that is over."""
        incoming = self._to_acknowledge.pop(transfer)
        session = incoming.session
        if self._incoming.get(transfer) is not incoming or session.over:
            return
        if session.state is TransferState.ACCEPTED:
            self._accepted(incoming)
        elif session.frames:
            incoming.acknowledged_bytes = session.bytes
            credit = self.credit.landed(transfer, session.bytes)
            ack = Ack(transfer.request, transfer.attempt, session.frames - 1, session.bytes, credit)
            self._reply(incoming.peer, ack)

    def _commit(self, peer: bytes, commit: Commit, incoming: _Incoming | None, now: float) -> None:
        transfer = TransferId(commit.request, commit.attempt)
        if incoming is None or incoming.peer != peer:
            self._reply(peer, Cancel(transfer.request, transfer.attempt, "no such reservation"))
            return
        session = incoming.session
        if not is_proven(commit, incoming.token):
            raise WireError(f"the commit of {transfer} has no valid proof")
        if session.state is TransferState.ACCEPTED:  # our Accept was lost
            self._to_acknowledge[transfer] = incoming
            return
        if session.over or session.behind(commit):
            incoming.commit = commit if incoming.pulls else None
            return
        if why := session.objection(commit):
            self._fail(incoming, TransferState.FAILED, why)
            return
        session.accept(now)
        self.credit.close(transfer)
        self._to_acknowledge.pop(transfer, None)
        self._accepted(incoming)
        self._ended.append(Landed(transfer, commit))

    def _accepted(self, incoming: _Incoming) -> None:
        transfer = incoming.session.transfer
        self._reply(incoming.peer, Accept(transfer.request, transfer.attempt, incoming.session.bytes))

    def _reply(self, peer: bytes, message: Message) -> None:
        send(self._socket, message, peer)  # if the peer is gone the message is dropped

    # -- endings and timers -------------------------------------------------------------------------------------------

    @staticmethod
    def _settled(incoming: _Incoming) -> bool:
        return incoming.session.over or incoming.session.state is TransferState.ACCEPTED

    def _tick(self, now: float) -> None:
        self._sources.tick(now)
        while self._early and now - next(iter(self._early.values())).at > self._limits.lease_s:
            self._early.popitem(last=False)  # a live sender would have repeated its Open
        for transfer, incoming in list(self._incoming.items()):
            session = incoming.session
            if session.over:
                continue  # an earlier iteration banned its sender because of another hand-off
            if session.state is TransferState.ACCEPTED:  # kept only to answer a repeated Commit
                if now - session.progress_at > self._limits.lease_s:
                    del self._incoming[transfer]
                continue
            session.tick(now)
            if session.state is TransferState.EXPIRED:
                self._forget(incoming, session.why_ended, reply=True)
            elif incoming.link is None and (said := incoming.announced) and self._connect(incoming, said, now):
                self._answer(incoming)
            elif incoming.pulls:
                self._look_at_pulls(incoming, now)
        self._sources.let_go(self._uses(), now)

    def _look_at_pulls(self, incoming: _Incoming, now: float) -> None:
        try:
            self._pull(incoming, now)
        except Damaged:
            self.bad_messages += 1
        except WireError as error:
            self._bad(incoming.peer, str(error))

    @property
    def reading(self) -> bool:
        """Whether a read of a sender's pool is under way. Its completion does not wake the worker's poll, so the worker
        must check for it."""
        joining = self._links.groups is not None and self._links.groups.joining
        return joining or self._sources.connecting or any(incoming.pulls for incoming in self._incoming.values())

    def _uses(self) -> Iterator[tuple[object, float]]:
        for incoming in self._incoming.values():
            if isinstance(incoming.link, (PullReceiveLink, CudaIpcReceiveLink)) and not self._settled(incoming):
                yield incoming.link.source, incoming.session.progress_at

    def _fail(self, incoming: _Incoming, to: TransferState, reason: str, *, reply: bool = True) -> None:
        if self._settled(incoming):
            return
        incoming.session.end(to, reason)
        self._forget(incoming, reason, reply=reply)

    def _forget(self, incoming: _Incoming, reason: str, *, reply: bool) -> None:
        transfer = incoming.session.transfer
        del self._incoming[transfer]
        if incoming.link is not None:
            incoming.link.close()
        self.credit.close(transfer)
        if reply and incoming.peer:
            self._reply(incoming.peer, Cancel(transfer.request, transfer.attempt, reason))
        self._ended.append(TransferFailed(transfer, reason, cancelled_by_peer=not reply))
