"""What a link promises: KV cells of a sender's pool arrive in a receiver's pool, or an error says so.

A link decides how the bytes of one frame travel beside its header: in the message itself, or as directions to where the
receiver can pull them. The receiver writes its own memory (never the sender), and takes the checksum of the bytes it
holds itself: it must be that of the header, or of all frames together that of the Commit, before they count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.core.errors import Damaged, WireError
from common.core.ids import BlockId, TransferId
from common.kv.convert import Bytes
from common.kv.layout import KvDtype
from common.kv.storage.host import KvMemory
from kvtransfer.frames import UNSAID, FrameHeader, Rectangle, checksum_of

Payload = bytes | memoryview


class SendLink(Protocol):
    """The prefill side of a link. Its frames have ``grain`` times the usual size: a frame costs prefill more than its
    bytes do, but where bytes travel smaller ones are faster, since they stay in a cache."""

    name: str
    grain: int

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> tuple[Payload, int, int]:
        """What travels behind the header, the canonical size of the cells in bytes, and their checksum, or ``UNSAID``:
        it can be taken later."""
        ...


class ReceiveLink(Protocol):
    """The decode side of a link, for one sender."""

    name: str

    @property
    def lost(self) -> bool:
        """Whether nothing can arrive over it any more: the hand-off has failed."""
        ...

    def place(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> int | None:
        """Puts the cells into the blocks of ``table``; the checksum of what is there. None while they are on their
        way: call it again with the same, and with nothing else before. If they are not what was said they do not
        count, and nothing but them has been written: Damaged if they are not what was sent either, WireError if that
        made no sense or cannot be had."""
        ...

    def close(self) -> None:
        """Nothing more is wanted."""
        ...


def placed(header: FrameHeader, data: Bytes, dtype: KvDtype, memory: KvMemory, table: Sequence[BlockId]) -> int:
    """Checks the receiver's own copy of the cells, elements of ``dtype``, and writes it into its blocks; the checksum
    of that copy."""
    compare(header, checksum := checksum_of(data), data.nbytes)
    memory.write(table, header.cells.tokens, header.cells.layers, data, dtype)
    return checksum


def compare(header: FrameHeader, checksum: int, size_bytes: int) -> None:
    """What the receiver has of a frame with what was announced: Damaged or WireError where they differ."""
    if header.checksum not in (checksum, UNSAID):
        raise Damaged(f"frame {header.number} of {header.transfer} fails its checksum")
    if size_bytes != header.size_bytes:
        raise WireError(f"a frame of {size_bytes} bytes, {header.size_bytes} announced")
