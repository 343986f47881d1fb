"""The header of a KV frame: damage on the way is distinguished from a header that its sender wrote wrong."""

from __future__ import annotations

import dataclasses

import pytest
import xxhash

from common.core.errors import Damaged, WireError
from common.core.ids import RequestId, TransferId
from kvtransfer.frames import HEADER_BYTES, FrameHeader, Rectangle

HEADER = FrameHeader(TransferId(RequestId(bytes(range(16))), 3), 7, Rectangle(0, 2, 16, 48), 4096, 0xDEADBEEF)


def signed(fields: bytes) -> bytes:
    """Return ``fields`` with the checksum that a correct sender would add."""
    return fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")


def test_a_header_comes_back_as_it_was() -> None:
    packed = HEADER.pack()
    assert len(packed) == HEADER_BYTES and FrameHeader.unpack(packed) == HEADER
    assert packed == signed(packed[:-8])


def test_every_changed_bit_is_damage() -> None:
    packed = HEADER.pack()
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(packed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            FrameHeader.unpack(bytes(changed))


def test_every_other_length_is_damage() -> None:
    packed = HEADER.pack() + bytes(8)
    for length in (*range(HEADER_BYTES), HEADER_BYTES + 1, HEADER_BYTES + 8):
        with pytest.raises(Damaged):
            FrameHeader.unpack(packed[:length])


@pytest.mark.parametrize("cells", [Rectangle(2, 2, 0, 16), Rectangle(3, 2, 0, 16), Rectangle(0, 2, 16, 16)])
def test_an_intact_header_of_no_cells_is_no_damage(cells: Rectangle) -> None:
    with pytest.raises(WireError) as caught:
        FrameHeader.unpack(dataclasses.replace(HEADER, cells=cells).pack())
    assert not isinstance(caught.value, Damaged)


def test_an_intact_header_of_another_kind_is_no_damage() -> None:
    with pytest.raises(WireError) as caught:
        FrameHeader.unpack(signed(b"TKV9" + HEADER.pack()[4:-8]))
    assert not isinstance(caught.value, Damaged)
