"""The ``zmq`` link of a worker whose KV pool is in a GPU: KV bytes travel in the message, through pinned host memory.

The sender's GPU copies the cells of a frame into pinned memory, from which they are hashed and sent. The receiver
hashes its own pinned copy, from which its GPU copies them into blocks. The other end may have its pool in host memory:
the bytes on the wire are those of :mod:`kvtransfer.links.zeromq`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from common.core.errors import InvariantBroken, WireError
from common.core.ids import BlockId, TransferId
from common.kv.layout import KvDtype
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.device_calls import DeviceFailed, Event
from kvtransfer.frames import FrameHeader, Rectangle, checksum_of
from kvtransfer.links import zeromq
from kvtransfer.links.base import LinkLost, Made
from kvtransfer.links.stages import DeviceWriter, Staging, Steps, ended


class PinnedSendLink:
    """Sends the canonical bytes with their checksum, copied from the GPU into a buffer of ``pinned`` first."""

    name, grain = zeromq.NAME, 1

    def __init__(self, memory: CudaMemory, pinned: Staging) -> None:
        self.memory, self._pinned = memory, pinned
        self._steps: Steps[Made] = Steps()

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made | None:
        try:
            return self._steps.go_on(transfer, lambda: self._copied(table, cells))
        except DeviceFailed as error:
            raise LinkLost(f"KV cannot be copied from {self.memory.calls.name}: {error}") from error

    def checksum(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> int:
        raise InvariantBroken("every payload of this link has its checksum")

    def forget(self, transfer: TransferId) -> None:
        self._steps.drop(transfer)

    def _copied(self, table: Sequence[BlockId], cells: Rectangle) -> Generator[None, None, Made]:
        size = self.memory.layout.range_bytes(cells.first_layer, cells.last_layer, len(cells.tokens))
        buffer = yield from self._pinned.lent(size)
        copying: Event | None = None
        try:
            self.memory.gather(table, cells.tokens, cells.layers, buffer)
            copying = self.memory.calls.record_event()
            yield from ended(self.memory.calls, copying)
            copying = None
            assert buffer.array is not None
            data = buffer.array[:size].copy()  # libzmq may keep it for long, the pinned buffer is needed again
        finally:
            self._pinned.give_back(buffer, copying)
        return data.data, size, checksum_of(data)


class PinnedReceiveLink:
    """Places payloads with elements of ``dtype`` into the blocks of a GPU, as ``writer`` does."""

    name = zeromq.NAME

    def __init__(self, writer: DeviceWriter, dtype: KvDtype) -> None:
        self._writer, self._dtype = writer, dtype
        self._steps: Steps[int] = Steps()
        self.lost = False

    def place(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> int | None:
        data = np.frombuffer(payload, np.uint8)
        try:
            return self._steps.go_on(None, lambda: self._writer.write(header, data, self._dtype, table))
        except DeviceFailed as error:
            self.lost = True
            raise WireError(f"KV cannot be copied to the GPU: {error}") from error

    def close(self) -> None:
        self._steps.clear()
