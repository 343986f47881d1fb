"""The stream socket between rank 0 and another rank: a pool's memory first, then the columns of each step.

    rank 0 ──► kind (1 byte), size (uint64), then what the kind asks for
    other  ──► an answer to some kinds

    kind               size               what follows                        answer
    P, NewPool (CPU)   blocks             one byte, the memory's descriptor   one byte
    G, NewPool (GPU)   blocks                                                 size (uint64) and descriptor of the slab
    S, Step            bytes of columns   the columns (int64)
    R, Replay          bytes of columns   the columns (int64)
    C, CopyBlocks      bytes of numbers   source, target (int64) of each      one byte
    Z, ClearBlocks     bytes of numbers   blocks (int64)
    B, BeginMeasuring  0
    M, MeasureGraphs   bytes of numbers   its fields (int64)                  outcomes, see below
    K, CaptureGraphs   bytes of numbers   its fields (int64)                  outcomes, see below
    E, EndMeasuring    0                                                      the fields of a GpuUse (int64)

While graphs are measured or captured, each rank sends the outcome of each attempt (one byte), and gets the worst of all
ranks' outcomes (one byte).

The socket is one end of a pair that only these two processes have. When rank 0 closes it, the other rank ends.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence

from common.core.errors import StartError
from common.engine.rank_messages import (
    BeginMeasuring,
    CaptureGraphs,
    ClearBlocks,
    CopyBlocks,
    EndMeasuring,
    MeasureGraphs,
    NewPool,
    Outcome,
    RankMessage,
    Replay,
    Slab,
    Step,
)
from common.kv.gpu_budget import GpuUse

_HEADER, _SLAB = struct.Struct("<cQ"), struct.Struct("<Q")
_USE = struct.Struct(f"<{len(dataclasses.fields(GpuUse))}q")
_HOST_POOL, _GPU_POOL, _STEP, _REPLAY, _COPY, _CLEAR = b"P", b"G", b"S", b"R", b"C", b"Z"
_BEGIN, _MEASURE, _CAPTURE, _END = b"B", b"M", b"K", b"E"
_DONE = b"\1"
_MOST_PARTS = os.sysconf("SC_IOV_MAX")


class LeaderChannel:
    """Rank 0's ends of the sockets to all other ranks; see :class:`common.engine.rank_messages.Channel`."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets

    def share_pool(self, descriptor: int, blocks: int) -> None:
        """Give the ranks the pool one after another, since each may try its attention backend on some blocks."""
        for rank, each in enumerate(self._sockets, 1):
            self._send(rank, [memoryview(_HEADER.pack(_HOST_POOL, blocks))])
            socket.send_fds(each, [b"\0"], [descriptor])
            self._receive(rank, 1)

    def make_slabs(self, blocks: int) -> list[Slab]:
        self._ask(_GPU_POOL, blocks)
        return [self._receive_slab(rank) for rank in range(1, len(self._sockets) + 1)]

    def share_step(self, columns: Sequence[array[int]]) -> None:
        self._tell(_STEP, columns)

    def share_replay(self, columns: Sequence[array[int]]) -> None:
        self._tell(_REPLAY, columns)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._tell(_COPY, [array("q", (block for pair in copies for block in pair))])
        for rank in range(1, len(self._sockets) + 1):
            self._receive(rank, 1)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self._tell(_CLEAR, [array("q", blocks)])

    def begin_measuring(self) -> None:
        self._ask(_BEGIN, 0)

    def measure_graphs(self, rows: int, max_model_len: int, driver_bytes: int) -> None:
        self._tell(_MEASURE, [array("q", (rows, max_model_len, driver_bytes))])

    def capture_graphs(self, rows: int, max_model_len: int) -> None:
        self._tell(_CAPTURE, [array("q", (rows, max_model_len))])

    def settle(self, own: Outcome) -> Outcome:
        ranks = range(1, len(self._sockets) + 1)
        worst = max(own, *(Outcome(self._receive(rank, 1)[0]) for rank in ranks))
        for rank in ranks:
            self._send(rank, [memoryview(bytes([worst]))])
        return worst

    def end_measuring(self) -> list[GpuUse]:
        self._ask(_END, 0)
        return [GpuUse(*_USE.unpack(self._receive(rank, _USE.size))) for rank in range(1, len(self._sockets) + 1)]

    def close(self) -> None:
        """Close the sockets. The other ranks then end."""
        for each in self._sockets:
            each.close()

    def _ask(self, kind: bytes, number: int) -> None:
        for rank in range(1, len(self._sockets) + 1):
            self._send(rank, [memoryview(_HEADER.pack(kind, number))])

    def _tell(self, kind: bytes, columns: Sequence[array[int]]) -> None:
        size = sum(len(column) * column.itemsize for column in columns)
        parts = [memoryview(_HEADER.pack(kind, size)), *(memoryview(column).cast("B") for column in columns if column)]
        for rank in range(1, len(self._sockets) + 1):
            self._send(rank, parts)

    def _send(self, rank: int, parts: Sequence[memoryview]) -> None:
        """Send all of ``parts``, in one call unless the socket's buffer is full."""
        assert len(parts) <= _MOST_PARTS
        to = self._sockets[rank - 1]
        try:
            left = to.sendmsg(parts)
            for part in parts:
                if left < len(part):
                    to.sendall(part[left:])
                left = max(0, left - len(part))
        except OSError as error:
            raise _gone(rank, str(error)) from error

    def _receive_slab(self, rank: int) -> Slab:
        try:
            words, descriptors, _, _ = socket.recv_fds(self._sockets[rank - 1], _SLAB.size, 1)
        except OSError as error:
            raise _gone(rank, str(error)) from error
        if not words:
            raise _gone(rank)
        assert len(words) == _SLAB.size and len(descriptors) == 1
        return Slab(descriptors[0], *_SLAB.unpack(words))

    def _receive(self, rank: int, size: int) -> bytes:
        try:
            answer = self._sockets[rank - 1].recv(size, socket.MSG_WAITALL)
        except OSError as error:
            raise _gone(rank, str(error)) from error
        if len(answer) != size:
            raise _gone(rank)
        return answer


def _gone(rank: int, why: str = "it ended before it answered") -> StartError:
    return StartError(f"rank {rank} has exited", why, "see its log lines")


class FollowerChannel:
    """Another rank's end; see :class:`common.engine.rank_messages.Followed`."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._buffer = bytearray(1 << 16)

    def messages(self) -> Iterator[RankMessage]:
        header = memoryview(bytearray(_HEADER.size))
        while self._fill(header):
            kind, size = _HEADER.unpack(header)
            if kind in (_STEP, _REPLAY):
                if not self._fill(step := self._room(size)):
                    return
                yield Step(step) if kind == _STEP else Replay(step)
            elif (message := self._rare(kind, size)) is not None:
                yield message
            else:
                return

    def _rare(self, kind: bytes, size: int) -> RankMessage | None:
        """Return a message other than a step; None if rank 0 has left."""
        match kind:
            case b"P":
                _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
                return NewPool(size, descriptors[0]) if descriptors else None
            case b"G":
                return NewPool(size, None)
            case b"B":
                return BeginMeasuring()
            case b"E":
                return EndMeasuring()
        if not self._fill(room := self._room(size)):
            return None
        numbers = array("q")
        numbers.frombytes(room)
        match kind:
            case b"C":
                return CopyBlocks(_pairs(numbers))
            case b"Z":
                return ClearBlocks(numbers.tolist())
            case b"M":
                return MeasureGraphs(*numbers)
        assert kind == _CAPTURE
        return CaptureGraphs(*numbers)

    def watch(self, check: Callable[[], None]) -> None:
        """Do nothing: a subclass has the thread for it."""

    def ready(self, slab: Slab | None) -> None:
        if slab is None:
            self._socket.sendall(_DONE)
            return
        socket.send_fds(self._socket, [_SLAB.pack(slab.size)], [slab.descriptor])
        os.close(slab.descriptor)

    def copied(self) -> None:
        self._socket.sendall(_DONE)

    def settle(self, own: Outcome) -> Outcome:
        self._socket.sendall(bytes([own]))
        if not self._fill(worst := memoryview(bytearray(1))):
            raise StartError("rank 0 has exited", "it ended while graphs were captured", "see its log lines")
        return Outcome(worst[0])

    def report(self, use: GpuUse) -> None:
        self._socket.sendall(_USE.pack(*dataclasses.astuple(use)))

    def _room(self, size: int) -> memoryview:
        if size > len(self._buffer):
            self._buffer = bytearray(2 * size)
        return memoryview(self._buffer)[:size]

    def _fill(self, room: memoryview) -> bool:
        """Receive exactly ``room``; False if rank 0 has left."""
        while len(room):
            if not (count := self._socket.recv_into(room)):
                return False
            room = room[count:]
        return True


def _pairs(numbers: array[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))
