"""The state machines of one hand-off, one for each side.

Pure: no I/O and no clock; time is an argument. ``PROTOCOL.md`` specifies the messages between the two:

    sender    RESERVED ─ granted ► SENDING ─ all sent, first tokens known ► COMMITTING ─ accept ► ACCEPTED ► RELEASED
    receiver  RESERVED ─ first frame ► SENDING ─ commit, everything right ► ACCEPTED ─ released ► RELEASED
    either    before ACCEPTED ─► EXPIRED (lease or no progress) | FAILED (wrong content) | CANCELLED (given up)

Frames are numbered and accepted strictly in order: a duplicate is dropped, and a gap is answered with the number of the
last good frame. The sender retransmits by its own timer: first all unacknowledged frames once, then only the oldest.
Received data becomes visible to batches and to the prefix cache only with ACCEPTED.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from common.core.errors import InvariantBroken, WireError
from common.core.ids import TransferId
from common.core.timeouts import FailureTimes
from common.kv.layout import KvLayout
from common.net.messages import Commit, Welcome
from kvtransfer.frames import UNSAID, FrameHeader, Rectangle, fold
from kvtransfer.plan import TARGET_BYTES, SendPlan


class TransferState(Enum):
    """States of a hand-off; :data:`SENDER_MOVES` and :data:`RECEIVER_MOVES` list the moves between them."""

    RESERVED = "reserved"
    SENDING = "sending"
    COMMITTING = "committing"
    ACCEPTED = "accepted"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = TransferState
ENDINGS = frozenset({_S.EXPIRED, _S.FAILED, _S.CANCELLED})
Moves = dict[TransferState, frozenset[TransferState]]
"""Maps each state of a machine to the states that may follow it."""
_OVER: Moves = {state: frozenset() for state in (_S.RELEASED, _S.EXPIRED, _S.FAILED, _S.CANCELLED)}
SENDER_MOVES: Moves = {
    _S.RESERVED: frozenset({_S.SENDING, *ENDINGS}),
    _S.SENDING: frozenset({_S.COMMITTING, *ENDINGS}),
    _S.COMMITTING: frozenset({_S.ACCEPTED, *ENDINGS}),
    _S.ACCEPTED: frozenset({_S.RELEASED}),
    **_OVER,
}
RECEIVER_MOVES: Moves = {
    _S.RESERVED: frozenset({_S.SENDING, *ENDINGS}),
    _S.SENDING: frozenset({_S.ACCEPTED, *ENDINGS}),
    _S.ACCEPTED: frozenset({_S.RELEASED, _S.CANCELLED}),  # cancelled before it became a sequence
    **_OVER,
}


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Timeouts and sizes of a hand-off, in seconds and bytes.

    A sender gives up after ``no_progress_s`` without an answer, or after ``busy_steps`` of the receiver's steps if that
    is longer. It retransmits after ``resend_s`` and renews the receiver's lease of ``lease_s`` every ``renew_s``. If
    two ticks are more than ``lag_s`` apart, this process itself was busy or stopped: the excess does not count as
    silence of the peer. Frames have about ``frame_bytes``.
    """

    no_progress_s: float = FailureTimes().timeout_s
    busy_steps: float = 4.0
    resend_s: float = 0.2
    renew_s: float = FailureTimes().heartbeat_s
    lease_s: float = FailureTimes().lease_s
    lag_s: float = 0.25
    frame_bytes: int = TARGET_BYTES

    @classmethod
    def of_welcome(cls, welcome: Welcome) -> TransferLimits:
        """Return the limits with the times that the coordinator's Welcome prescribes."""
        patience, renewal, lease = welcome.patience_ms, welcome.heartbeat_ms, welcome.lease_ms
        return cls(no_progress_s=patience / 1000, renew_s=renewal / 1000, lease_s=lease / 1000)


class Session:
    """The part that both sides share: the state, the allowed moves, and the time of the last progress.

    ``have``: number of leading tokens that decode has in its own prefix cache, which are not sent. ``frames``,
    ``bytes``, ``checksum``: totals of what was sent or placed so far, the checksum folded over the frames."""

    moves: ClassVar[Moves]

    def __init__(self, transfer: TransferId, tokens: int, now: float, limits: TransferLimits) -> None:
        self.transfer, self.tokens, self.limits = transfer, tokens, limits
        self.state = TransferState.RESERVED
        self.have = 0
        self.frames = self.bytes = self.checksum = 0
        self.progress_at = now
        self.why_ended = ""

    def move(self, to: TransferState, why: str = "") -> None:
        """Change the state; raises InvariantBroken if ``moves`` does not allow it."""
        if to not in self.moves[self.state]:
            raise InvariantBroken(f"transfer {self.transfer}: {self.state.name} cannot become {to.name}")
        self.state, self.why_ended = to, why

    @property
    def over(self) -> bool:
        """Whether the transfer has ended, with or without success."""
        return self.state in ENDINGS or self.state is TransferState.RELEASED

    def end(self, to: TransferState, why: str) -> bool:
        """End the transfer without success; False if it was over already (endings are idempotent)."""
        if self.over:
            return False
        self.move(to, why)
        return True


class SenderSession(Session):
    """The prefill side. ``link`` is the transport that decode chose; :meth:`computed` may be called before the
    grant."""

    moves = SENDER_MOVES

    def __init__(self, transfer: TransferId, layout: KvLayout, tokens: int, now: float, limits: TransferLimits) -> None:
        super().__init__(transfer, tokens, now, limits)
        self.layout = layout
        self.link = ""
        self.limit_bytes = 0
        self.granted_at = self.accepted_at = 0.0
        self._send_plan: SendPlan | None = None
        self._progress = (0, 0)  # tokens, layers computed
        self._unacked: deque[FrameHeader] = deque()
        self.unsummed: deque[FrameHeader] = deque()
        """Frames, in order, whose checksums have not been computed yet."""
        self.unacked_bytes = self.unsummed_bytes = 0
        self._again: deque[FrameHeader] = deque()
        self._resent_at = now
        self._repeated = self._heard = False
        self._renew_at = now
        self._patience_s = limits.no_progress_s
        self._ticked_at = now
        self.waits_for_device = False
        """Whether a copy or checksum in this worker's GPU, which takes microseconds, holds the hand-off up. If it does
        not end, the hand-off ends as if no answer came."""

    def heard(self, step_s: float, now: float) -> None:
        """Record an answer to an announcement (Open). ``step_s`` is the duration in seconds of decode's engine steps;
        decode answers only between them.

        Before the grant this counts as progress, because no other answer can be expected. Afterwards only acknowledged
        frames count: a repeated Grant means that no frame has landed.
        """
        self._heard = True
        if self.state is TransferState.RESERVED:
            self.progress_at = max(self.progress_at, now)
        self._patience_s = max(self.limits.no_progress_s, self.limits.busy_steps * step_s)

    def waited(self, now: float) -> None:
        """Restart the timers, because frames of other transfers that were sent before ours on the same connection are
        still arriving: it is too early to retransmit our frames or to give up."""
        self.progress_at = max(self.progress_at, now)
        self._resent_at = max(self._resent_at, now)

    def granted(self, have: int, link: str, credit_bytes: int, now: float, grain: int = 1) -> None:
        """Start sending, because decode has reserved blocks; it already has the first ``have`` tokens. ``credit_bytes``
        is the initial limit in bytes, and frames on this link are ``grain`` times as large as usual. A repeated grant
        is ignored."""
        if self.state is not TransferState.RESERVED:
            return  # a repeated grant
        self.move(TransferState.SENDING)
        self.have, self.link, self.limit_bytes = have, link, credit_bytes
        self.granted_at = self.progress_at = now
        self._send_plan = SendPlan(self.layout, have, self.tokens, grain * self.limits.frame_bytes)
        self._send_plan.computed(*self._progress)

    def computed(self, tokens: int, layers: int) -> None:
        """Record that layers ``[0, layers)`` of the tokens ``[0, tokens)`` are in the source blocks."""
        self._progress = (tokens, layers)
        if self._send_plan is not None:
            self._send_plan.computed(tokens, layers)

    @property
    def ready(self) -> bool:
        """Whether :meth:`next_cells` would return something."""
        if self._again and self.state in (TransferState.SENDING, TransferState.COMMITTING):
            return True
        if self.state is not TransferState.SENDING or self._send_plan is None:
            return False
        if self._unacked and self.bytes >= self.limit_bytes:
            return False  # even without credit one frame may be in flight
        return self._send_plan.ready

    def next_cells(self) -> Rectangle | FrameHeader | None:
        """Return what to send next: the cells of a new frame (the caller then calls :meth:`sent`), the header of a
        frame to retransmit, or None."""
        if not self.ready or self._send_plan is None:
            return None
        return self._again.popleft() if self._again else self._send_plan.next()

    @property
    def repeats_oldest(self) -> bool:
        """Whether :meth:`next_cells` would return the oldest unacknowledged frame, which all later ones wait for."""
        return bool(self._again) and self._again[0] is self._unacked[0]

    def sent(self, cells: Rectangle, size: int, checksum: int) -> FrameHeader:
        """Record that a new frame was sent and return its header. If ``checksum`` is UNSAID, it must be supplied to
        :meth:`summed` later."""
        header = FrameHeader(self.transfer, self.frames, cells, size, checksum)
        self.frames += 1
        self.bytes += size
        self._unacked.append(header)
        self.unacked_bytes += size
        self.unsummed.append(header)
        self.unsummed_bytes += size
        if checksum != UNSAID:
            if len(self.unsummed) > 1:
                raise InvariantBroken(f"transfer {self.transfer}: a frame has its checksum before the previous one")
            self.summed(checksum)
        return header

    def summed(self, checksum: int) -> None:
        """Record the checksum of the first of the ``unsummed`` frames. Checksums are folded in the order of frames."""
        self.unsummed_bytes -= self.unsummed.popleft().size_bytes
        self.checksum = fold(self.checksum, checksum)

    def acked(self, frame: int, limit_bytes: int, now: float) -> None:
        """Record that frames up to ``frame`` (inclusive) have landed, and that new frames may begin before offset
        ``limit_bytes`` of the transfer's byte stream. Raises WireError for a frame that was never sent."""
        if frame >= self.frames:
            raise WireError(f"transfer {self.transfer}: frame {frame} is acknowledged, only {self.frames} were sent")
        self.limit_bytes = max(self.limit_bytes, limit_bytes)
        while self._unacked and self._unacked[0].number <= frame:
            self.unacked_bytes -= self._unacked.popleft().size_bytes
            self.progress_at = self._resent_at = now
            self._repeated = False
        while self._again and self._again[0].number <= frame:
            self._again.popleft()

    def may_commit(self) -> bool:
        """Return whether every cell has been sent. Before it sends Commit, the caller also needs the first tokens and
        the checksums of the ``unsummed`` frames."""
        return self.state is TransferState.SENDING and self._send_plan is not None and self._send_plan.complete

    def committed(self, now: float) -> None:
        """Record that Commit is sent. All checksums must be known."""
        if self.unsummed:
            raise InvariantBroken(f"transfer {self.transfer} is committed without the checksums of its frames")
        self.move(TransferState.COMMITTING)
        self._resent_at = now

    def accepted(self, received_bytes: int, now: float) -> bool:
        """Record decode's Accept; False if this transfer is not waiting for one. Raises WireError if ``received_bytes``
        is wrong; the transfer then keeps waiting for a correct Accept, and repeats its Commit."""
        if self.state is not TransferState.COMMITTING:
            return False
        if received_bytes != self.bytes:
            raise WireError(f"transfer {self.transfer}: {self.bytes} bytes sent, {received_bytes} accepted")
        self.accepted_at = now
        self.move(TransferState.ACCEPTED)
        return True

    def tick(self, now: float) -> bool:
        """Run the timers. Returns whether to send the commit again; :meth:`next_cells` returns the frames to
        retransmit.

        Before the grant decode must answer announcements, afterwards frames and commits. Two kinds of time do not count
        as lack of progress: waiting for our own prompt to be computed, and time in which we did not listen.
        """
        away, self._ticked_at = now - self._ticked_at - self.limits.lag_s, now
        if away > 0:
            self.progress_at = min(now, self.progress_at + away)  # answers that arrived meanwhile have just been read
        asked = self.state in (TransferState.RESERVED, TransferState.COMMITTING) or bool(self._unacked)
        asked = asked or self.waits_for_device
        if self.over or not asked:
            self.progress_at = now
            return False
        if now - self.progress_at > self._patience_s:
            waited = "blocks" if self.state is TransferState.RESERVED else "frames"
            why = f"no answer about {waited} for {self._patience_s:.1f} s"
            if self.waits_for_device:
                why = f"this worker's GPU has not copied or hashed KV for {self._patience_s:.1f} s"
            self.end(TransferState.EXPIRED, why)
            return False
        if self.state is TransferState.RESERVED:
            return False
        if now - self._resent_at <= self.limits.resend_s:
            return False
        self._resent_at = now
        # first all frames, since they may be lost; later only one as a probe, since the receiver may just be busy
        self._again = deque(itertools.islice(self._unacked, 1)) if self._repeated else deque(self._unacked)
        self._repeated = True
        return self.state is TransferState.COMMITTING

    def renewal_due(self, now: float) -> bool:
        """Return whether to send Open again now. It renews the receiver's lease, and makes decode repeat a Grant that
        was lost."""
        if self.over or self.state is TransferState.ACCEPTED or now < self._renew_at:
            return False
        self._renew_at = now + (self.limits.renew_s if self._heard else self.limits.resend_s)
        return True


class FrameVerdict(Enum):
    """What to do with an arriving frame: place it, acknowledge it again, wait for the missing one before it, or count a
    bad message against its sender."""

    TAKE = "take"
    REPEATED = "repeated"
    GAP = "gap"
    STRANGE = "strange"


class ReceiverSession(Session):
    """The decode side. :meth:`judge` checks a frame against the reservation before a byte is copied. :meth:`took`
    counts it once its bytes are placed and match its header. :meth:`accept` follows if the Commit matches the
    totals."""

    moves = RECEIVER_MOVES

    def __init__(
        self, transfer: TransferId, layout: KvLayout, tokens: int, have: int, now: float, limits: TransferLimits
    ) -> None:
        super().__init__(transfer, tokens, now, limits)
        self.layout, self.have = layout, have
        self._upto = [have] * len(layout.layers)

    def judge(self, header: FrameHeader, now: float) -> FrameVerdict:
        """Return what to do with this frame. The state changes only in :meth:`took`."""
        if self.state not in (TransferState.RESERVED, TransferState.SENDING):
            return FrameVerdict.REPEATED if self.state is TransferState.ACCEPTED else FrameVerdict.STRANGE
        self.progress_at = now
        if header.number != self.frames:
            return FrameVerdict.REPEATED if header.number < self.frames else FrameVerdict.GAP
        cells = header.cells
        inside = cells.last_layer <= len(self._upto) and cells.last_token <= self.tokens
        if not inside or any(self._upto[layer] != cells.first_token for layer in cells.layers):
            return FrameVerdict.STRANGE
        if header.size_bytes != self.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens)):
            return FrameVerdict.STRANGE
        return FrameVerdict.TAKE

    def took(self, header: FrameHeader, checksum: int, now: float) -> None:
        """Record that the frame's bytes are placed. ``checksum`` is that of the placed bytes; if the header has one,
        the caller has compared the two."""
        if self.state is TransferState.RESERVED:
            self.move(TransferState.SENDING)
        for layer in header.cells.layers:
            self._upto[layer] = header.cells.last_token
        self.frames += 1
        self.bytes += header.size_bytes
        self.checksum = fold(self.checksum, checksum)
        self.progress_at = now

    def objection(self, commit: Commit) -> str:
        """Return why this commit cannot be accepted, or "" if it matches everything received."""
        if commit.layout != self.layout.fingerprint:
            return f"layout {commit.layout}, not {self.layout.fingerprint}"
        mine = (self.tokens, self.have, self.frames, self.bytes, self.checksum)
        theirs = (commit.tokens, commit.have, commit.frames, commit.bytes, commit.checksum)
        for name, want, got in zip(("tokens", "have", "frames", "bytes", "checksum"), mine, theirs, strict=True):
            if want != got:
                return f"{name}: {got} committed, {want} received"
        if any(upto != self.tokens for upto in self._upto):
            return "some layers are incomplete"
        return ""

    def behind(self, commit: Commit) -> bool:
        """Return whether frames of this commit are still missing. They were lost and will be sent again."""
        return self.state in (TransferState.RESERVED, TransferState.SENDING) and commit.frames > self.frames

    def renewed(self, now: float) -> None:
        """Renew the lease, because the sender is alive and still intends to send."""
        self.progress_at = now

    def accept(self, now: float) -> None:
        """Accept the transfer: everything has landed and matches its Commit."""
        if self.state is TransferState.RESERVED:  # impossible: the last token at least is always sent
            raise InvariantBroken(f"transfer {self.transfer} is accepted without a frame")
        self.move(TransferState.ACCEPTED)
        self.progress_at = now

    def tick(self, now: float) -> None:
        """Run the timers: a reservation that its sender no longer renews expires after the lease."""
        if not self.over and self.state is not TransferState.ACCEPTED and now - self.progress_at > self.limits.lease_s:
            self.end(TransferState.EXPIRED, f"nothing arrived for {self.limits.lease_s:g} s")
