"""The stream socket between rank 0 and another rank: the pool's memory first, then the columns of each step.

    rank 0 ──► POOL blocks (with the pool's descriptor), then STEP length, columns, for each step
    other  ──► one byte when the pool is mapped

The socket is one end of a pair that only these two processes have. When rank 0 closes it, the other rank ends.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence

from common.core.errors import StartError

_HEADER = struct.Struct("<cQ")
_POOL, _STEP = b"P", b"S"
_MOST_PARTS = os.sysconf("SC_IOV_MAX")


class LeaderChannel:
    """Rank 0's ends of the sockets to all other ranks."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets

    def share_pool(self, descriptor: int, blocks: int) -> None:
        """Send the descriptor of the pool of ``blocks`` blocks to one rank after another, and wait until it has mapped
        the pool: each rank may try its attention backend on some of the blocks. Raises StartError if a rank has
        ended."""
        for rank, each in enumerate(self._sockets, 1):
            socket.send_fds(each, [_HEADER.pack(_POOL, blocks)], [descriptor])
            if not each.recv(1):
                raise StartError(
                    f"rank {rank} has exited", "it ended before it had mapped the KV pool", "see its log lines"
                )

    def share_step(self, columns: Sequence[array[int]]) -> None:
        """Send one step to every rank. Raises StartError if one has ended."""
        size = sum(len(column) * column.itemsize for column in columns)
        parts = [memoryview(_HEADER.pack(_STEP, size)), *(memoryview(column).cast("B") for column in columns if column)]
        for rank, each in enumerate(self._sockets, 1):
            try:
                _send(each, parts)
            except OSError as error:
                raise StartError(f"rank {rank} has exited", str(error), "see its log lines") from error

    def close(self) -> None:
        """Close the sockets. The other ranks then end."""
        for each in self._sockets:
            each.close()


def _send(to: socket.socket, parts: Sequence[memoryview]) -> None:
    """Send all of ``parts``, in one call unless the socket's buffer is full."""
    assert len(parts) <= _MOST_PARTS
    left = to.sendmsg(parts)
    for part in parts:
        if left < len(part):
            to.sendall(part[left:])
        left = max(0, left - len(part))


class FollowerChannel:
    """Another rank's end; see :class:`common.engine.parallel.Followed`. ``pool`` raises SystemExit if rank 0 has
    ended."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._buffer = bytearray(1 << 16)

    def pool(self) -> tuple[int, int]:
        header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
        if not header:  # rank 0 could not load its share
            raise SystemExit(0)
        kind, blocks = _HEADER.unpack(header)
        assert kind == _POOL and len(descriptors) == 1
        return descriptors[0], blocks

    def mapped(self) -> None:
        self._socket.sendall(b"\1")

    def steps(self) -> Iterator[memoryview]:
        header = memoryview(bytearray(_HEADER.size))
        while self._fill(header):
            kind, size = _HEADER.unpack(header)
            assert kind == _STEP
            if size > len(self._buffer):
                self._buffer = bytearray(2 * size)
            step = memoryview(self._buffer)[:size]
            if not self._fill(step):
                return
            yield step

    def _fill(self, room: memoryview) -> bool:
        """Receive exactly ``room``; False if rank 0 has left."""
        while len(room):
            if not (count := self._socket.recv_into(room)):
                return False
            room = room[count:]
        return True
