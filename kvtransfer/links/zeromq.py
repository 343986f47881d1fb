"""The link between hosts: the KV bytes travel in the message, behind the header, over ZeroMQ (TCP)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.core.ids import BlockId, TransferId
from common.kv.layout import KvDtype
from common.kv.storage.host import KvMemory
from kvtransfer.frames import FrameHeader, Rectangle, checksum_of
from kvtransfer.links.base import Made, placed

NAME = "zmq"


class ZmqSendLink:
    """Sends the canonical bytes themselves, with their checksum."""

    name, grain = NAME, 1

    def __init__(self, memory: KvMemory) -> None:
        self.memory = memory

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made:
        data = self.memory.read(table, cells.tokens, cells.layers)
        return data.data, data.nbytes, checksum_of(data)

    def checksum(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> int:
        return self.memory.checksum(table, cells.tokens, cells.layers)

    def forget(self, transfer: TransferId) -> None: ...


class ZmqReceiveLink:
    """Places payloads with elements of ``dtype`` into ``memory``, whose element type may differ."""

    name, lost = NAME, False

    def __init__(self, memory: KvMemory, dtype: KvDtype) -> None:
        self.memory, self.dtype = memory, dtype

    def place(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> int:
        return placed(header, np.frombuffer(payload, np.uint8), self.dtype, self.memory, table)

    def close(self) -> None: ...
