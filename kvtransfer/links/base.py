"""The interface of links: KV cells of a sender's pool arrive in a receiver's pool, or an error is raised.

A link decides how the bytes of a frame travel besides its header: in the message itself, or as directions from where
the receiver can pull them. Only the receiver writes its memory, never the sender, and it computes the checksum over the
bytes in its own memory. The bytes count only once that matches the header or, for all frames together, the Commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.core.errors import Damaged, TandemError, WireError
from common.core.ids import BlockId, TransferId
from common.kv.convert import Bytes
from common.kv.layout import KvDtype
from common.kv.storage.host import KvMemory
from kvtransfer.frames import UNSAID, FrameHeader, Rectangle, checksum_of

Payload = bytes | memoryview
Made = tuple[Payload, int, int]
"""The payload behind a header, the canonical size of its cells in bytes, and their checksum, or ``UNSAID`` if it is to
be computed later."""


class LinkLost(TandemError):
    """A link of the sender cannot send this hand-off any more; it fails, and the request is placed again."""


class SendLink(Protocol):
    """The prefill side of a link.

    ``grain`` is the size of its frames as a multiple of ``TARGET_BYTES`` (1 for ``zmq``, 2 or 4 for links that pull).
    Fewer, larger frames cost prefill less time; where bytes travel in the payload, small ones stay in cache.
    """

    name: str
    grain: int

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made | None:
        """Make the payload of one frame; None while its cells are being copied from a device: call again with the same
        arguments, and for this transfer with no others before.

        Called again for each retransmission. Raises nothing but LinkLost: any other undeliverable payload counts as a
        lost frame.
        """
        ...

    def checksum(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> int | None:
        """Return the checksum of cells that :meth:`payload` has left unsaid; None while it is being computed: call
        again as above. Raises LinkLost."""
        ...

    def forget(self, transfer: TransferId) -> None:
        """Release what is kept for a transfer that has ended."""
        ...


class ReceiveLink(Protocol):
    """The decode side of a link, for one sender."""

    name: str

    @property
    def lost(self) -> bool:
        """Whether nothing more can arrive over the link, so that the hand-off has failed."""
        ...

    def place(self, header: FrameHeader, payload: memoryview, table: Sequence[BlockId]) -> int | None:
        """Write the cells into the blocks of ``table`` and return their checksum.

        None while they are still being read: call again with the same arguments, and with no others before. Raises
        Damaged if the bytes were damaged on their way (or a source block was reused), WireError if the frame makes no
        sense or the pool cannot be read. Then these cells may hold anything, and nothing else was written. Frames that
        were placed before never come here.
        """
        ...

    def close(self) -> None:
        """Abandon a read that is under way, because the transfer was cancelled or has failed (not after Accept)."""
        ...


def placed(header: FrameHeader, data: Bytes, dtype: KvDtype, memory: KvMemory, table: Sequence[BlockId]) -> int:
    """Verify ``data``, the receiver's own copy of the cells with elements of ``dtype``, write it into the blocks of
    ``table`` and return its checksum. Raises as :func:`compare`."""
    compare(header, checksum := checksum_of(data), data.nbytes)
    memory.write(table, header.cells.tokens, header.cells.layers, data, dtype)
    return checksum


def compare(header: FrameHeader, checksum: int, size_bytes: int) -> None:
    """Compare what the receiver got with the header; raises Damaged for a wrong checksum, WireError for a wrong
    size."""
    if header.checksum not in (checksum, UNSAID):
        raise Damaged(f"frame {header.number} of {header.transfer} fails its checksum")
    if size_bytes != header.size_bytes:
        raise WireError(f"a frame of {size_bytes} bytes, {header.size_bytes} announced")
