"""The records of :mod:`kvtransfer.sender`: connections to decode workers, and hand-offs on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from common.core.ids import BlockId
from common.kv.storage.device_calls import Event
from common.net.messages import Logprobs, Peer
from kvtransfer.frames import FrameHeader, Rectangle
from kvtransfer.session import SenderSession


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The fields of Commit that sampling determines, one entry per choice, and the ``figures`` (timings in ms and token
    counts, by name) of the prompt's computation."""

    ids: bytes
    finish: tuple[int, ...]
    stop_ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...]
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class PeerConnection:
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
        """Payload bytes given to the socket that are not known to have arrived."""
        return self.handed - self.passed

    def pass_on(self, end: int) -> None:
        """Record that the first ``end`` bytes have arrived."""
        if end > self.passed:
            self.asked = max(0, self.asked - (end - self.passed))
            self.passed = end


@dataclass(slots=True)
class Computed:
    """Layers ``[0, layers)`` of tokens ``[0, tokens)``, which are in the pool once ``event`` has ended."""

    event: Event
    tokens: int
    layers: int


@dataclass(slots=True)
class Outgoing:
    """One hand-off. ``ends``: per unacknowledged frame, ``connection.handed`` just after it was first sent. ``seen``:
    ``connection.passed`` when the timers last ran. ``commit_due``: send Commit (again) behind the frames that are due.

    Of a pool in a GPU's memory only: ``computing`` is what kernels are still writing, in order. ``staged`` is the frame
    that is being copied from there. ``summing``: a checksum is being computed there, on which the Commit waits.
    """

    session: SenderSession
    connection: PeerConnection
    table: Sequence[BlockId]
    token: bytes
    first: FirstTokens | None = None
    finished_at: float = 0.0
    commit_due: bool = False
    ends: dict[int, int] = field(default_factory=dict)
    seen: int = 0
    computing: deque[Computed] = field(default_factory=deque)
    staged: Rectangle | FrameHeader | None = None
    summing: bool = False

    @property
    def waits_for_device(self) -> bool:
        """Whether the device must finish something before the hand-off can go on. The layers of a prompt count only
        once its first tokens are known, since computing the prompt may take any time."""
        return self.staged is not None or self.summing or (self.first is not None and bool(self.computing))

    def queued_behind_others(self) -> bool:
        """Whether our oldest frame is queued behind frames of other hand-offs, of which some were acknowledged since
        the last check."""
        moved, self.seen = self.connection.passed > self.seen, self.connection.passed
        return moved and next(iter(self.ends.values()), 0) > self.connection.passed

    def passed(self, frame: int) -> None:
        """Record that frames up to ``frame`` (inclusive) have arrived."""
        while self.ends and (number := next(iter(self.ends))) <= frame:
            self.connection.pass_on(self.ends.pop(number))
