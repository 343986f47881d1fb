"""The link on one host: the receiver maps the sender's pool read-only and pulls.

The message carries only which blocks, and the generation of each. The sender holds those blocks until the receiver has
acknowledged them; if its hold ended early (its lease lapsed) and a block was given to somebody else, the generation
word has moved on, and the reader, who looks before and after its copy, drops what it read.

The pool's descriptor is handed out at a *door*: an abstract Unix socket that serves processes of the same user. It has
a thread of its own because the sender's engine may be in the middle of a long step when a receiver knocks.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Sequence

import numpy as np

from common.errors import WireError
from common.ids import BlockId, Incarnation
from common.kv.layout import KvLayout
from common.kv.memory import KvMemory
from kvtransfer.frames import FrameHeader, Rectangle, checksum_of
from kvtransfer.links.base import Payload, placed

NAME = "shm"
_KNOCK_TIMEOUT_S = 1.0
_UCRED = struct.Struct("3i")


class PoolDoor:
    """Hands the descriptor of ``memory`` to processes of the same user that connect to :attr:`address`."""

    def __init__(self, memory: KvMemory, incarnation: Incarnation) -> None:
        self.address = f"tandem-kv-{incarnation}"
        self._fd = memory.fd
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._serve, name="kv-pool-door", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed
                return
            with peer:
                credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
                if _UCRED.unpack(credentials)[1] == os.getuid():
                    try:
                        socket.send_fds(peer, [b"pool"], [self._fd])
                    except OSError:  # the visitor has left
                        continue

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        finally:
            self._socket.close()
            self._thread.join()


def knock(address: str, layout: KvLayout, blocks: int) -> KvMemory:
    """Maps the pool behind a door, read-only; OSError or ValueError if that cannot be had."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(_KNOCK_TIMEOUT_S)
        visitor.connect(f"\0{address}")
        _, descriptors, _, _ = socket.recv_fds(visitor, 16, 1)
    if len(descriptors) != 1:
        raise OSError(f"{address} gave no descriptor")
    return KvMemory.attach(descriptors[0], layout, blocks)


class ShmSendLink:
    """Sends directions instead of bytes: per block its id (uint32) and generation (uint64), in columns."""

    name = NAME

    def __init__(self, memory: KvMemory) -> None:
        self.memory = memory

    def payload(self, table: Sequence[BlockId], cells: Rectangle) -> tuple[Payload, int, int]:
        block_size = self.memory.layout.block_size
        blocks = table[cells.first_token // block_size : -(-cells.last_token // block_size)]
        ids = np.asarray(blocks, "<u4")
        generations = self.memory.generations[ids].astype("<u8")
        data = self.memory.read(table, cells.tokens, cells.layers)
        return generations.tobytes() + ids.tobytes(), data.nbytes, checksum_of(data)


class ShmReceiveLink:
    """Pulls from ``source``, another process's pool (whose block size may differ), into ``memory``."""

    name = NAME

    def __init__(self, memory: KvMemory, source: KvMemory) -> None:
        self.memory, self.source = memory, source

    def place(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> None:
        cells, block_size = header.cells, self.source.layout.block_size
        first = cells.first_token // block_size
        count = -(-cells.last_token // block_size) - first
        if len(payload) != 12 * count:
            raise WireError(f"directions of {len(payload)} bytes for {count} blocks")
        generations = np.frombuffer(payload, "<u8", count)
        ids = np.frombuffer(payload, "<u4", count, 8 * count).astype(np.int64)
        if int(ids.max()) >= self.source.blocks:
            raise WireError(f"block {int(ids.max())} of a pool of {self.source.blocks}")
        shift = first * block_size
        tokens = range(cells.first_token - shift, cells.last_token - shift)
        self._check(ids, generations)
        data = self.source.read(ids, tokens, cells.layers)
        self._check(ids, generations)
        placed(header, data, self.memory, table)

    def _check(self, ids: np.ndarray, generations: np.ndarray) -> None:
        if not np.array_equal(self.source.generations[ids], generations):
            raise WireError("the sender has reused a block that was to be read")
