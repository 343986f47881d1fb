"""Links whose receiver reads the sender's pool: the message says where, and the receiver pulls.

The payload carries only the block ids and the generation of each block. The sender holds the blocks until the hand-off
ends. If its hold ended early (its lease expired) and a block was reused, the block's generation word has changed. The
receiver compares the words before and after its copy, and discards the copy if they differ.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from common.core.errors import Damaged, WireError
from common.core.ids import REQUEST_ID_BYTES, BlockId, TransferId
from common.kv.convert import Bytes
from common.kv.layout import KvLayout
from common.kv.storage.base import PoolMemory
from common.kv.storage.host import BlockArray, KvMemory
from kvtransfer.frames import UNSAID, FrameHeader, Rectangle
from kvtransfer.links.base import Made, Payload, compare
from kvtransfer.links.stages import BlockWriter, HostWriter

T = TypeVar("T")
GRAIN = 2
"""Size factor of frames whose receiver copies twice."""
_CHECKSUM_BYTES, _PLACE = 8, struct.Struct(f"<{REQUEST_ID_BYTES}sIHHII")


class Reading(ABC, Generic[T]):
    """A read of a pool that is under way."""

    @abstractmethod
    def landed(self) -> T | None:
        """Return the result, once; None while the read is under way. Raises WireError if it failed."""

    @abstractmethod
    def close(self) -> None:
        """Abandon the read if it has not landed."""


class PullSendLink:
    """Sends directions to the cells (:func:`directions_to`) instead of their bytes. With ``sums_later`` frames carry no
    checksum, so that the KV is not read when they are sent; only Commit covers it."""

    def __init__(self, name: str, memory: KvMemory, grain: int = GRAIN, *, sums_later: bool = False) -> None:
        self.name, self.memory, self.grain, self.sums_later = name, memory, grain, sums_later

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made:
        checksum = UNSAID if self.sums_later else self.checksum(transfer, table, cells)
        size = self.memory.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
        return directions_to(self.memory, transfer, table, cells, checksum), size, checksum

    def checksum(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> int:
        return self.memory.checksum(table, cells.tokens, cells.layers)

    def forget(self, transfer: TransferId) -> None: ...


def directions_to(
    memory: PoolMemory, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle, checksum: int
) -> bytes:
    """Return directions to these cells in ``memory``: the blocks' generations (uint64 each), then their ids (uint32
    each), then a checksum of the directions."""
    block_size = memory.layout.block_size
    ids = np.asarray(table[cells.first_token // block_size : -(-cells.last_token // block_size)], "<u4")
    generations = memory.generations[ids].astype("<u8")
    return signed(generations.tobytes() + ids.tobytes(), transfer, cells, checksum)


def signed(directions: bytes, transfer: TransferId, cells: Rectangle, checksum: int) -> bytes:
    """Return ``directions`` to these cells followed by their own checksum, which also covers ``checksum``, that of the
    cells (or ``UNSAID``). It tells the receiver whether wrong directions are the fault of the network or the sender."""
    return directions + _signature(directions, transfer, cells, checksum)


class Directions(NamedTuple):
    """Where the cells of a frame are in the sender's pool: the ids of their blocks (int64 [n]), the generations that
    these must have, and the positions of the cells' tokens in a sequence of only these blocks."""

    ids: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    tokens: range


def read_directions(header: FrameHeader, payload: memoryview, block_size: int, blocks: int) -> Directions:
    """Return the directions in ``payload`` to a pool of ``blocks`` blocks of ``block_size`` tokens. Raises Damaged if
    they fail their checksum, WireError if they lead nowhere."""
    cells = header.cells
    first = cells.first_token // block_size
    count = -(-cells.last_token // block_size) - first
    directions = verified(header, payload)
    if len(directions) != 12 * count:
        raise WireError(f"directions of {len(directions)} bytes for {count} blocks")
    generations = np.frombuffer(directions, "<u8", count)
    ids = np.frombuffer(directions, "<u4", count, 8 * count).astype(np.int64)
    if int(ids.max()) >= blocks:
        raise WireError(f"block {int(ids.max())} of a pool of {blocks}")
    shift = first * block_size
    return Directions(ids, generations, range(cells.first_token - shift, cells.last_token - shift))


def verified(header: FrameHeader, payload: memoryview) -> memoryview:
    """Return the directions in ``payload`` without their checksum; raises Damaged if it is wrong."""
    directions = payload[:-_CHECKSUM_BYTES]
    if payload[-_CHECKSUM_BYTES:] != _signature(directions, header.transfer, header.cells, header.checksum):
        raise Damaged(f"the directions of frame {header.number} of {header.transfer} fail their checksum")
    return directions


def _signature(directions: Payload, transfer: TransferId, cells: Rectangle, checksum: int) -> bytes:
    hashed = xxhash.xxh3_64(directions, checksum)
    place = (cells.first_layer, cells.last_layer, cells.first_token, cells.last_token)
    hashed.update(_PLACE.pack(transfer.request, transfer.attempt, *place))
    return hashed.intdigest().to_bytes(_CHECKSUM_BYTES, "little")


class SourcePool(Protocol):
    """A sender's pool that the receiver can read: at once if it is mapped, else by a :class:`Reading`."""

    layout: KvLayout
    blocks: int

    @property
    def lost(self) -> bool:
        """Whether a read has failed, so that the pool must be reached anew."""
        ...

    def generations_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64] | Reading[npt.NDArray[np.uint64]]:
        """Read the current generation words, uint64 [n], of the blocks ``ids`` [n]."""
        ...

    def read(self, table: npt.NDArray[np.int64], tokens: range, layers: range) -> Bytes | Reading[Bytes]:
        """Copy these cells in canonical form, uint8 [size], as :meth:`common.kv.storage.host.BlockArray.read`."""
        ...

    def close(self) -> None:
        """Release the pool; no copy from it may be used or started afterwards."""
        ...


class PullReceiveLink:
    """Pulls from ``source``, the sender's pool (whose block layout may differ), into ``memory``.

    From a mapped pool whose rows have the same bytes, each row is copied once, to its place, and the checksum is
    computed over what was written. From any other pool, or into blocks that ``writer`` writes elsewhere, a copy is
    made, verified and then written into blocks.
    """

    def __init__(
        self, name: str, memory: KvMemory | None, source: SourcePool, writer: BlockWriter | None = None
    ) -> None:
        self.name, self.memory, self.source = name, memory, source
        if writer is None:
            assert memory is not None
            writer = HostWriter(memory)
        self._writer = writer
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
        """Pull one frame; yields while a read is under way, and returns the checksum of the cells."""
        cells = header.cells
        where = read_directions(header, payload, self.source.layout.block_size, self.source.blocks)
        yield from self._check(where)
        if self.memory is not None and isinstance(self.source, BlockArray) and self.memory.takes(self.source):
            checksum = self.memory.take(table, cells.tokens, cells.layers, self.source, where.ids)
            yield from self._check(where)
            size = self.memory.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
            compare(header, checksum, size)
            return checksum
        data = yield from _had(self.source.read(where.ids, where.tokens, cells.layers))
        yield from self._check(where)
        return (yield from self._writer.write(header, data, self.source.layout.dtype, table))

    def _check(self, where: Directions) -> Generator[None]:
        now = yield from _had(self.source.generations_of(where.ids))
        if not np.array_equal(now, where.generations):
            raise Damaged("the sender reused a block while it was read")


def _had(what: T | Reading[T]) -> Generator[None, None, T]:
    """Return ``what``, or its result if it is a Reading; yields while that is under way."""
    if not isinstance(what, Reading):
        return what
    try:
        while (landed := what.landed()) is None:
            yield
        return landed
    finally:
        what.close()
