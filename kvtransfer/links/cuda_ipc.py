"""The link between two GPU pools of one machine: the receiver maps the sender's slab read-only and pulls.

The payload is that of :mod:`kvtransfer.links.pull`; descriptors of the slab and of the generation words come from the
endpoint of :mod:`kvtransfer.links.shm`. Cells are copied into a landing buffer of the receiver's GPU, hashed there
(:mod:`common.kv.device_hash`), and written into blocks only if the hash and the generations are right. The KV never
crosses the host's memory.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from common.core.errors import Damaged, WireError
from common.core.ids import BlockId, TransferId
from common.kv.storage.cuda import AttachedCudaBlocks, CudaMemory
from common.kv.storage.device_calls import DeviceFailed, Event
from kvtransfer.frames import UNSAID, FrameHeader, Rectangle
from kvtransfer.links.base import LinkLost, Made, compare
from kvtransfer.links.landings import LandingBuffers
from kvtransfer.links.pull import Directions, directions_to, read_directions
from kvtransfer.links.stages import Steps, checked_size

NAME = "cuda-ipc"
GRAIN = 8
"""Size factor of frames: each costs both workers a few calls into the driver, whatever its size."""


class CudaIpcSendLink:
    """Sends directions; the cells are hashed after that, while the receiver copies, for Commit."""

    name, grain = NAME, GRAIN

    def __init__(self, memory: CudaMemory, landings: LandingBuffers) -> None:
        self.memory, self._landings = memory, landings
        self._steps: Steps[int] = Steps()

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made:
        size = self.memory.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
        return directions_to(self.memory, transfer, table, cells, UNSAID), size, UNSAID

    def checksum(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> int | None:
        try:
            return self._steps.go_on(transfer, lambda: self._hashed(table, cells))
        except DeviceFailed as error:
            raise LinkLost(f"KV cannot be hashed on {self.memory.calls.name}: {error}") from error

    def forget(self, transfer: TransferId) -> None:
        self._steps.drop(transfer)

    def _hashed(self, table: Sequence[BlockId], cells: Rectangle) -> Generator[None, None, int]:
        size = self.memory.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
        landing = yield from self._landings.lent(size)
        try:
            return (yield from self._landings.gathered(landing, self.memory, table, cells.tokens, cells.layers))
        finally:
            self._landings.give_back(landing)


class CudaIpcReceiveLink:
    """Pulls from ``source``, the sender's pool, into ``memory``, whose block size may differ.

    ``after`` is an event behind the engine's earlier work on the receiver's blocks, which must end before they are
    written.
    """

    name = NAME

    def __init__(
        self, memory: CudaMemory, source: AttachedCudaBlocks, landings: LandingBuffers, after: Event | None
    ) -> None:
        self.memory, self.source, self._landings, self._after = memory, source, landings, after
        self._steps: Steps[int] = Steps()

    @property
    def lost(self) -> bool:
        return self.source.lost

    def place(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> int | None:
        try:
            return self._steps.go_on(None, lambda: self._pull(header, payload, table))
        except DeviceFailed as error:
            self.source.lost = True
            raise WireError(f"the sender's pool cannot be read: {error}") from error

    def close(self) -> None:
        self._steps.clear()

    def _pull(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> Generator[None, None, int]:
        cells, size = header.cells, checked_size(header)
        where = read_directions(header, payload, self.source.layout.block_size, self.source.blocks)
        self._check(where)
        if size != self.source.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens)):
            raise WireError(f"{size} bytes announced for {cells}")
        landing = yield from self._landings.lent(size)
        try:
            hashed = yield from self._landings.gathered(landing, self.source, where.ids, where.tokens, cells.layers)
            self._check(where)
            compare(header, hashed, size)
            yield from self._landings.scattered(landing, self.memory, table, cells.tokens, cells.layers, self._after)
            return hashed
        finally:
            self._landings.give_back(landing)

    def _check(self, where: Directions) -> None:
        if not np.array_equal(self.source.generations_of(where.ids), where.generations):
            raise Damaged("the sender reused a block while it was read")
