"""The frame header in front of KV bytes: which cells of which transfer the frame carries.

The header has a fixed size, is little-endian and is verified first. A frame covers a rectangle of (layers × tokens) in
the canonical layout of :mod:`common.kv.layout`. Its checksum is the XXH3-64 of the rectangle's canonical bytes, on
every link. The checksum may be omitted, since Commit carries one over all frames. MessagePack never touches KV bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from common.core.errors import Damaged, WireError
from common.core.ids import REQUEST_ID_BYTES, RequestId, TransferId
from common.kv.convert import Bytes

_FIELDS = struct.Struct(f"<4s{REQUEST_ID_BYTES}sIIHHIIQQ")
_CHECKSUM = struct.Struct("<Q")
MAGIC = b"TKV3"
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
UNSAID = 0
"""Value in place of a checksum, if only Commit's checksum covers the frame."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Layers ``[first_layer, last_layer)`` of token positions ``[first_token, last_token)``."""

    first_layer: int
    last_layer: int
    first_token: int
    last_token: int

    @property
    def layers(self) -> range:
        """The layers as a range."""
        return range(self.first_layer, self.last_layer)

    @property
    def tokens(self) -> range:
        """The token positions as a range."""
        return range(self.first_token, self.last_token)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Frame ``number`` of ``transfer``: its cells, their canonical size in bytes, and their checksum or ``UNSAID``."""

    transfer: TransferId
    number: int
    cells: Rectangle
    size_bytes: int
    checksum: int

    def pack(self) -> bytes:
        """Return the header's HEADER_BYTES bytes, the last eight of which are the checksum of the others."""
        cells = self.cells
        fields = _FIELDS.pack(
            MAGIC,
            self.transfer.request,
            self.transfer.attempt,
            self.number,
            cells.first_layer,
            cells.last_layer,
            cells.first_token,
            cells.last_token,
            self.size_bytes,
            self.checksum,
        )
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def unpack(cls, data: bytes) -> FrameHeader:
        """Parse a header. Raises Damaged if its size or checksum is wrong, and WireError if the checksum is right but
        the content is not a header of a non-empty rectangle."""
        if len(data) != HEADER_BYTES:
            raise Damaged(f"a frame header has {HEADER_BYTES} bytes, not {len(data)}")
        fields = data[: _FIELDS.size]
        if data[_FIELDS.size :] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields)):
            raise Damaged("a frame header fails its checksum")
        magic, request, attempt, number, l0, l1, t0, t1, size, checksum = _FIELDS.unpack(fields)
        if magic != MAGIC or l0 >= l1 or t0 >= t1:
            raise WireError("not a frame header")
        return cls(TransferId(RequestId(request), attempt), number, Rectangle(l0, l1, t0, t1), size, checksum)


def checksum_of(data: Bytes) -> int:
    """Return the XXH3-64 (https://xxhash.com) of canonical bytes; releases the interpreter lock."""
    return xxhash.xxh3_64_intdigest(data.data)


def fold(total: int, checksum: int) -> int:
    """Fold one more frame's ``checksum`` into ``total``, the checksum of the transfer so far (0 at first)."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", total, checksum))
