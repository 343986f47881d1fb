"""The link over NCCL: the sender sends a frame's cells from one GPU into a landing buffer of the receiver's.

The message carries the number of the send and the sizes of all sends that may not have begun yet, so that the receiver
posts its receives in the same order even if earlier messages were lost. The landing is hashed there
(:mod:`common.kv.device_hash`) and written into blocks only if the hash is right. A lost group (:mod:`.groups`) fails
the hand-offs that use it; the next ones take ``zmq`` until there is a new group. NCCL neither encrypts nor
authenticates, so this link is for networks and workers that trust each other. In tests the groups are those of gloo.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.core.errors import Damaged, InvariantBroken, WireError
from common.core.ids import BlockId, Incarnation, TransferId
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.device_calls import DeviceCalls, DeviceFailed, Event
from kvtransfer.frames import FrameHeader, Rectangle
from kvtransfer.links.base import LinkLost, Made, compare
from kvtransfer.links.groups import JOIN_S, Meeting, Operation, PairGroup, Store
from kvtransfer.links.landings import Landing, LandingBuffers
from kvtransfer.links.pull import signed, verified
from kvtransfer.links.stages import MAX_FRAME_BYTES, SPIN_S, Steps, checked_size

NAME = "nccl"
GRAIN = 4
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Pauses after a group was lost or could not be made, doubling."""
_LEDGER = struct.Struct("<QI")
_MAX_PENDING = 1024


@dataclass(slots=True)
class _Retry:
    """When a group may be made again after a failure, in seconds."""

    at: float = 0.0
    pause_s: float = PAUSE_S

    def failed(self, now: float) -> None:
        self.at, self.pause_s = now + self.pause_s, min(2 * self.pause_s, LONGEST_PAUSE_S)


@dataclass(slots=True)
class _Transit:
    """One operation and the landing buffer that it reads or writes."""

    operation: Operation
    landing: Landing
    size: int


class _End:
    """One end of a group with the buffers of its operations. A buffer is given back once its operation cannot touch it
    any more: when it is done, or when the lost group has ended."""

    def __init__(self, group: PairGroup, landings: LandingBuffers) -> None:
        self.group, self._landings = group, landings
        self._unused: list[_Transit] = []

    def let_go(self, transit: _Transit) -> None:
        """Give the buffer of an operation back, now or when it is done."""
        self._unused.append(transit)
        self.collect()

    def collect(self) -> None:
        for transit in self._unused[:]:
            with contextlib.suppress(WireError):
                self.group.poll(transit.operation)
            if transit.operation.done or self.group.ended:
                self._unused.remove(transit)
                self._landings.give_back(transit.landing)

    def close(self) -> None:
        self.group.close()
        self.collect()


# -- sending ----------------------------------------------------------------------------------------------------------


class _Outbound(_End):
    """The sender's end. ``pending`` are the sends that may not be done, in order; ``number`` counts all."""

    def __init__(self, group: PairGroup, landings: LandingBuffers) -> None:
        super().__init__(group, landings)
        self.pending: deque[_Transit] = deque()
        self.number = 0

    def send(self, landing: Landing, size: int) -> bytes:
        """Send ``landing``, which belongs to the group from here on; return the directions to it. Raises WireError."""
        operation = self.group.send(landing.buffer, size)
        self.pending.append(_Transit(operation, landing, size))
        self.number += 1
        sizes = np.array([each.size for each in self.pending], "<u4")
        return _LEDGER.pack(self.number - 1, len(sizes)) + sizes.tobytes()

    def collect(self) -> None:
        while self.pending:
            with contextlib.suppress(WireError):
                self.group.poll(self.pending[0].operation)
            if not (self.pending[0].operation.done or self.group.ended):
                break
            self._landings.give_back(self.pending.popleft().landing)
        super().collect()


class SenderGroups:
    """The groups of one prefill worker with decode workers, and which one each hand-off uses."""

    def __init__(self, calls: DeviceCalls, landings: LandingBuffers, host: str) -> None:
        self._calls, self._landings, self._store = calls, landings, Store(host)
        self._ends: dict[Incarnation, _Outbound] = {}
        self._retries: dict[Incarnation, _Retry] = {}
        self._bound: dict[TransferId, tuple[Incarnation, _Outbound | None]] = {}
        self._gone: list[_Outbound] = []

    def bind(self, transfer: TransferId, peer: Incarnation, now: float) -> bytes:
        """Return the ``agent`` of the Open of ``transfer`` to ``peer``: the group that this hand-off uses, b"" for
        none."""
        if transfer not in self._bound:
            self._bound[transfer] = peer, self._reach(peer, now)
        end = self._bound[transfer][1]
        return end.group.meeting.pack() if end is not None else b""

    def of(self, transfer: TransferId) -> _Outbound:
        """Return the end that ``transfer`` uses; raises LinkLost if there is none, or it is lost."""
        _, end = self._bound.get(transfer, ("", None))
        if end is None or end.group.lost:
            raise LinkLost("the process group with the decode worker is lost: " + (end.group.lost if end else "none"))
        return end

    def declined(self, transfer: TransferId, now: float) -> None:
        """Record that the receiver chose another link for ``transfer``: its end of the group does not work."""
        peer, end = self._bound.get(transfer, (Incarnation(""), None))
        if end is not None and self._ends.get(peer) is end:
            self._drop(peer, "the decode worker declines it", now)

    def failed(self, transfer: TransferId, now: float) -> None:
        """Record that ``transfer`` made no progress: its group may hang, and is given up."""
        self.declined(transfer, now)

    def forget(self, transfer: TransferId) -> None:
        """Unbind a transfer that has ended from its group."""
        self._bound.pop(transfer, None)

    def collect(self) -> None:
        """Take back buffers of operations that are done."""
        for end in (*self._ends.values(), *self._gone):
            end.collect()
        self._gone = [end for end in self._gone if end.pending]

    def close(self) -> None:
        """Give all groups up, wait for their threads, and close the store."""
        for end in (*self._ends.values(), *self._gone):
            end.close()
        self._ends.clear()
        del self._store

    def _reach(self, peer: Incarnation, now: float) -> _Outbound | None:
        if (end := self._ends.get(peer)) is not None and end.group.lost:
            self._drop(peer, end.group.lost, now)
            end = None
        if end is None and now >= self._retries.setdefault(peer, _Retry()).at:
            group = PairGroup(self._calls, self._store.meeting(self._calls.group_backend), 0, self._store.store)
            end = self._ends[peer] = _Outbound(group, self._landings)
        if end is not None and end.group.ready:
            self._retries.pop(peer, None)
        return end

    def _drop(self, peer: Incarnation, why: str, now: float) -> None:
        end = self._ends.pop(peer)
        end.group.lose(why)
        self._retries.setdefault(peer, _Retry()).failed(now)
        self._gone.append(end)


class NcclSendLink:
    """Sends cells from a landing buffer, where they are hashed first."""

    name, grain = NAME, GRAIN

    def __init__(self, memory: CudaMemory, landings: LandingBuffers, groups: SenderGroups) -> None:
        self.memory, self._landings, self._groups = memory, landings, groups
        self._steps: Steps[Made] = Steps()

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made | None:
        self._groups.collect()
        try:
            return self._steps.go_on(transfer, lambda: self._sent(transfer, table, cells))
        except (DeviceFailed, WireError) as error:
            raise LinkLost(str(error)) from error

    def checksum(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> int:
        raise InvariantBroken("every payload of this link has its checksum")

    def forget(self, transfer: TransferId) -> None:
        self._steps.drop(transfer)
        self._groups.forget(transfer)

    def _sent(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Generator[None, None, Made]:
        size = self.memory.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
        while not self._groups.of(transfer).group.ready:
            yield
        while (landing := self._landings.lend(size)) is None:
            self._groups.of(transfer)  # raises LinkLost rather than waiting for the buffers of a lost group
            yield
        directions = None
        try:
            hashed = yield from self._landings.gathered(landing, self.memory, table, cells.tokens, cells.layers)
            directions = self._groups.of(transfer).send(landing, size)
        finally:
            if directions is None:
                self._landings.give_back(landing)
        return signed(directions, transfer, cells, hashed), size, hashed


# -- receiving --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ledger:
    """The number of a send, and the sizes of the sends from ``number - len(sizes) + 1`` to it."""

    number: int
    sizes: tuple[int, ...]

    @classmethod
    def read(cls, header: FrameHeader, payload: memoryview) -> _Ledger:
        """Parse the payload of a frame. Raises Damaged for a wrong checksum, WireError if it makes no sense."""
        directions = verified(header, payload)
        if len(directions) < _LEDGER.size:
            raise WireError(f"directions of {len(directions)} bytes")
        number, count = _LEDGER.unpack_from(directions)
        if not 0 < count <= min(_MAX_PENDING, number + 1) or len(directions) != _LEDGER.size + 4 * count:
            raise WireError(f"directions of {len(directions)} bytes to {count} sends")
        sizes = tuple(np.frombuffer(directions, "<u4", count, _LEDGER.size).tolist())
        if not 0 < min(sizes) <= max(sizes) <= MAX_FRAME_BYTES:
            raise WireError(f"sends of {min(sizes)} to {max(sizes)} bytes")
        return cls(number, sizes)


class Inbound(_End):
    """The receiver's end: posts receives in the order of the sends. ``_arrived`` are the posted receives that no frame
    has claimed yet; some belong to hand-offs that are over."""

    def __init__(self, group: PairGroup, landings: LandingBuffers) -> None:
        super().__init__(group, landings)
        self._due: deque[tuple[int, int]] = deque()
        self._next = 0
        self._arrived: dict[int, _Transit] = {}
        self._queued: dict[int, TransferId] = {}
        """Sends whose frames wait for an earlier frame of their hand-off: their buffers are kept when these are
        short."""

    def announced(self, ledger: _Ledger) -> None:
        """Post receives for all sends of ``ledger`` that have none. Raises WireError if the group is lost."""
        first = ledger.number - len(ledger.sizes) + 1
        if first > self._next:
            self.group.lose("sends are missing between two frames")
        for number, size in enumerate(ledger.sizes, first):
            if number >= self._next:
                self._due.append((number, size))
                self._next = number + 1
        self._post()

    def queued(self, transfer: TransferId, number: int) -> None:
        """Keep the buffer of this send, which a queued frame of ``transfer`` will claim."""
        self._queued[number] = transfer

    def unqueue(self, transfer: TransferId, below: int | None = None) -> None:
        """Stop keeping the buffers of ``transfer`` (with ``below``: of its sends before that number), because their
        frames were dropped."""
        for number in [
            key for key, each in self._queued.items() if each == transfer and (below is None or key < below)
        ]:
            del self._queued[number]

    def claim(self, transfer: TransferId, number: int) -> _Transit | None:
        """Return the receive of this send, which then belongs to the caller; None while it waits for a buffer. Raises
        Damaged if it was given up, WireError if the group is lost."""
        self.unqueue(transfer, number)
        self._queued[number] = transfer
        if number not in self._arrived:
            self._post()
            if self._due and number >= self._due[0][0]:
                return None
        del self._queued[number]
        if (transit := self._arrived.pop(number, None)) is None:
            raise Damaged("the landing buffer of a frame was needed for later ones")
        return transit

    def abandon(self) -> None:
        """Let go of all receives, because the group is lost."""
        self._due.clear()
        while self._arrived:
            self.let_go(self._arrived.pop(next(iter(self._arrived))))

    def close(self) -> None:
        """Give the group up, wait for its thread, and give all buffers back."""
        self.group.close()
        self.abandon()

    def _post(self) -> None:
        self.collect()
        while self._due:
            number, size = self._due[0]
            if (landing := self._landings.lend(size)) is None:
                spare = (key for key in self._arrived if key not in self._queued)
                done = next((key for key in spare if self.group.poll(self._arrived[key].operation)), None)
                if done is None:
                    return
                self.let_go(self._arrived.pop(done))
                continue
            try:
                operation = self.group.receive(landing.buffer, size)
            except WireError:
                self._landings.give_back(landing)
                raise
            self._due.popleft()
            self._arrived[number] = _Transit(operation, landing, size)


@dataclass(slots=True)
class _Known:
    """The group that a sender announced last; it is given up if it is not ready at ``until`` (seconds)."""

    end: Inbound
    until: float
    retry: _Retry = field(default_factory=_Retry)


class ReceiverGroups:
    """The groups of one decode worker, by prefill worker."""

    def __init__(self, calls: DeviceCalls, landings: LandingBuffers) -> None:
        self._calls, self._landings = calls, landings
        self._known: dict[Incarnation, _Known] = {}
        self._gone: list[Inbound] = []

    def reach(self, owner: Incarnation, announced: bytes, now: float) -> Inbound | None:
        """Return our end of the announced group, None while it is being made. Raises WireError if there is none now."""
        meeting = Meeting.unpack(announced)
        if meeting.backend != self._calls.group_backend:
            raise WireError(f"its process groups are of {meeting.backend}, ours of {self._calls.group_backend}")
        known = self._known.get(owner)
        if known is None or known.end.group.meeting != meeting:
            known = self._join(owner, known, meeting, now)
        group = known.end.group
        if not group.ready and not group.lost and now > known.until:
            group.lose("the prefill worker has not joined")
        if group.lost:
            known.end.abandon()
            raise WireError(f"the process group with it is lost: {group.lost}")
        if group.ready:
            known.retry = _Retry()
        return known.end if group.ready else None

    def announced(self, owner: Incarnation, header: FrameHeader, payload: memoryview) -> None:
        """Post the receive of an arrived frame, even if it will be dropped: later receives are queued behind it."""
        if (known := self._known.get(owner)) is not None:
            with contextlib.suppress(WireError):
                known.end.announced(_Ledger.read(header, payload))

    @property
    def joining(self) -> bool:
        """Whether a group is being made, whose completion wakes no poll."""
        return any(not (known.end.group.ready or known.end.group.lost) for known in self._known.values())

    def close(self) -> None:
        """Give all groups up and wait for their threads."""
        for end in (*(known.end for known in self._known.values()), *self._gone):
            end.close()
        self._known.clear()

    def _join(self, owner: Incarnation, before: _Known | None, meeting: Meeting, now: float) -> _Known:
        retry = before.retry if before is not None else _Retry()
        if now < retry.at:
            raise WireError("the process group with it was lost a moment ago")
        if before is not None:
            before.end.group.lose("the prefill worker makes another one")
            before.end.abandon()
            self._gone = [*(end for end in self._gone if not end.group.ended), before.end]
            retry.failed(now)
        known = _Known(Inbound(PairGroup(self._calls, meeting, 1), self._landings), now + JOIN_S, retry)
        self._known[owner] = known
        return known


class NcclReceiveLink:
    """Receives into landing buffers, and writes from there into the blocks of ``memory``. ``after`` as in
    :class:`kvtransfer.links.cuda_ipc.CudaIpcReceiveLink`."""

    name = NAME

    def __init__(
        self, memory: CudaMemory, transfer: TransferId, end: Inbound, landings: LandingBuffers, after: Event | None
    ) -> None:
        self.memory, self._transfer, self._end, self._landings, self._after = memory, transfer, end, landings, after
        self._steps: Steps[int] = Steps()

    @property
    def lost(self) -> bool:
        return bool(self._end.group.lost)

    def place(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> int | None:
        try:
            return self._steps.go_on(None, lambda: self._received(header, payload, table))
        except DeviceFailed as error:
            self._end.group.lose(str(error))
            raise WireError(f"KV cannot be received: {error}") from error

    def queued(self, header: FrameHeader, payload: memoryview) -> None:
        """Record that this frame will be placed after an earlier one."""
        with contextlib.suppress(WireError):  # what is wrong with it is found then
            self._end.queued(self._transfer, _Ledger.read(header, payload).number)

    def close(self) -> None:
        self._steps.clear()
        self._end.unqueue(self._transfer)

    def _received(
        self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]
    ) -> Generator[None, None, int]:
        size, ledger = checked_size(header), _Ledger.read(header, payload)
        self._end.announced(ledger)
        while (transit := self._end.claim(header.transfer, ledger.number)) is None:
            yield
        try:
            if transit.size != size:
                raise WireError(f"a send of {transit.size} bytes for a frame of {size}")
            until = time.monotonic() + SPIN_S
            while not self._end.group.poll(transit.operation):
                if time.monotonic() >= until:
                    yield
            landing, cells = transit.landing, header.cells
            hashed = yield from self._landings.hashed(landing, size)
            compare(header, hashed, size)
            yield from self._landings.scattered(landing, self.memory, table, cells.tokens, cells.layers, self._after)
            return hashed
        finally:
            self._end.let_go(transit)
