"""Links whose receiver can read the sender's pool: the message says where, the receiver pulls.

The message carries only which blocks, and the generation of each. The sender holds those blocks until the receiver has
acknowledged them; if its hold ended early (its lease lapsed) and a block was given to somebody else, the generation
word has moved on, and the reader, who looks before and after its copy, lets what it has read count for nothing.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from common.core.errors import Damaged, WireError
from common.core.ids import REQUEST_ID_BYTES, BlockId, TransferId
from common.kv.convert import Bytes
from common.kv.layout import KvLayout
from common.kv.storage.host import BlockArray, KvMemory
from kvtransfer.frames import UNSAID, FrameHeader, Rectangle
from kvtransfer.links.base import Payload, compare, placed

T = TypeVar("T")
GRAIN = 2
"""Of frames whose receiver copies twice."""
_CHECKSUM_BYTES, _PLACE = 8, struct.Struct(f"<{REQUEST_ID_BYTES}sIHHII")


class Reading(ABC, Generic[T]):
    """Something of a pool that is on its way."""

    @abstractmethod
    def landed(self) -> T | None:
        """What was read, once; None while it is on its way. WireError if it cannot be had."""

    @abstractmethod
    def close(self) -> None:
        """Gives it up, if it has not landed."""


class PullSendLink:
    """Sends directions instead of bytes: per block its generation (uint64) and id (uint32), in columns, signed. With
    ``sums_later`` the bytes are not touched for that: their checksum is left to the Commit."""

    def __init__(self, name: str, memory: KvMemory, grain: int = GRAIN, *, sums_later: bool = False) -> None:
        self.name, self.memory, self.grain, self.sums_later = name, memory, grain, sums_later

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> tuple[Payload, int, int]:
        block_size = self.memory.layout.block_size
        blocks = table[cells.first_token // block_size : -(-cells.last_token // block_size)]
        ids = np.asarray(blocks, "<u4")
        generations = self.memory.generations[ids].astype("<u8")
        checksum = UNSAID if self.sums_later else self.memory.checksum(table, cells.tokens, cells.layers)
        size = self.memory.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
        return signed(generations.tobytes() + ids.tobytes(), transfer, cells, checksum), size, checksum


def signed(directions: bytes, transfer: TransferId, cells: Rectangle, checksum: int) -> bytes:
    """Directions to these cells, whose bytes have this checksum (or ``UNSAID``), and behind them their own: who reads
    it knows whether the line or the sender is at fault when they lead nowhere."""
    return directions + _signature(directions, transfer, cells, checksum)


def _signature(directions: Payload, transfer: TransferId, cells: Rectangle, checksum: int) -> bytes:
    hashed = xxhash.xxh3_64(directions, checksum)
    place = (cells.first_layer, cells.last_layer, cells.first_token, cells.last_token)
    hashed.update(_PLACE.pack(transfer.request, transfer.attempt, *place))
    return hashed.intdigest().to_bytes(_CHECKSUM_BYTES, "little")


class SourcePool(Protocol):
    """A sender's pool, within the receiver's reach: what is in it can be had at once, or is read."""

    layout: KvLayout
    blocks: int

    @property
    def lost(self) -> bool:
        """Whether a read has failed: the pool must be reached anew, if it still is there."""
        ...

    def generations_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64] | Reading[npt.NDArray[np.uint64]]:
        """The generation words of these blocks, as they are now."""
        ...

    def read(self, table: npt.NDArray[np.int64], tokens: range, layers: range) -> Bytes | Reading[Bytes]:
        """The receiver's own copy of these cells, in canonical form
        (:meth:`common.kv.storage.host.BlockArray.read`)."""
        ...

    def close(self) -> None: ...


class PullReceiveLink:
    """Pulls from ``source``, the sender's pool (whose layout of blocks may differ), into ``memory``.

    Out of a mapped pool whose rows are the same bytes each is copied once, to its place; the checksum is that of what
    was written there. Of any other pool a copy is checked and then laid out.
    """

    def __init__(self, name: str, memory: KvMemory, source: SourcePool) -> None:
        self.name, self.memory, self.source = name, memory, source
        self._pulls: Generator[None, None, int] | None = None

    @property
    def lost(self) -> bool:
        return self.source.lost

    def place(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> int | None:
        if self._pulls is None:
            self._pulls = self._pull(header, payload, table)
        try:
            next(self._pulls)
        except StopIteration as end:
            self._pulls = None
            return int(end.value)
        except BaseException:
            self._pulls = None
            raise
        return None

    def close(self) -> None:
        if self._pulls is not None:
            self._pulls.close()
            self._pulls = None

    def _pull(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> Generator[None, None, int]:
        """Yields while something is on its way; the checksum of what has come."""
        cells, block_size = header.cells, self.source.layout.block_size
        first = cells.first_token // block_size
        count = -(-cells.last_token // block_size) - first
        directions = payload[:-_CHECKSUM_BYTES]
        if payload[-_CHECKSUM_BYTES:] != _signature(directions, header.transfer, cells, header.checksum):
            raise Damaged(f"the directions of frame {header.number} of {header.transfer} fail their checksum")
        if len(directions) != 12 * count:
            raise WireError(f"directions of {len(directions)} bytes for {count} blocks")
        generations = np.frombuffer(directions, "<u8", count)
        ids = np.frombuffer(directions, "<u4", count, 8 * count).astype(np.int64)
        if int(ids.max()) >= self.source.blocks:
            raise WireError(f"block {int(ids.max())} of a pool of {self.source.blocks}")
        shift = first * block_size
        tokens = range(cells.first_token - shift, cells.last_token - shift)
        yield from self._check(ids, generations)
        if isinstance(self.source, BlockArray) and self.memory.takes(self.source):
            checksum = self.memory.take(table, cells.tokens, cells.layers, self.source, ids)
            yield from self._check(ids, generations)
            size = self.memory.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
            compare(header, checksum, size)
            return checksum
        data = yield from _had(self.source.read(ids, tokens, cells.layers))
        yield from self._check(ids, generations)
        return placed(header, data, self.source.layout.dtype, self.memory, table)

    def _check(self, ids: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]) -> Generator[None]:
        now = yield from _had(self.source.generations_of(ids))
        if not np.array_equal(now, generations):
            raise Damaged("the sender has reused a block that was to be read")


def _had(what: T | Reading[T]) -> Generator[None, None, T]:
    """What can be had at once, or has landed."""
    if not isinstance(what, Reading):
        return what
    try:
        while (landed := what.landed()) is None:
            yield
        return landed
    finally:
        what.close()
