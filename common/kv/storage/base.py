"""What a worker and its hand-offs need of the memory of a KV pool, and the addresses of KV cells in it.

Host memory (:mod:`common.kv.storage.host`) is read and written at once, by this process. Device memory
(:mod:`common.kv.storage.cuda`) is written by kernels and copies that end later than the Python call that starts them.
Must not know the holders of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from common.core.ids import BlockId
from common.kv.layout import KvLayout
from common.kv.pieces import Numbers

Table = Sequence[BlockId] | npt.NDArray[np.int64]
"""Block ids in the order of a sequence's tokens."""


class PoolMemory(Protocol):
    """One worker's KV pool of ``blocks`` blocks. ``generations``, one word per block (uint64 [blocks], always in host
    memory), counts how often each block was taken."""

    layout: KvLayout
    blocks: int
    generations: npt.NDArray[np.uint64]

    @property
    def kind(self) -> Literal["host", "cuda"]:
        """Where the blocks are."""
        ...

    def mark(self) -> Any | None:
        """Return an event that ends with all work on the blocks that the engine has started so far; None if that work
        has ended, as always in host memory."""
        ...

    def populate(self, first: int, last: int) -> None:
        """Pre-fault bytes [first, last) of the pool, if its memory has page faults. Raises OSError if memory is
        short."""
        ...

    def close(self) -> None:
        """Free the memory. No work on it may be under way, and no view of it be used afterwards."""
        ...


class Places(NamedTuple):
    """Where the blocks of a pool lie: ``shards`` are the addresses of each shard of block 0, int64 [head_shards], and
    ``stride`` is the number of bytes from a block to the next one."""

    shards: Numbers
    stride: int

    @classmethod
    def of(cls, layout: KvLayout, addresses: Sequence[int]) -> Places:
        """Return the places in slabs at ``addresses``: one with whole blocks, or one per shard."""
        if len(addresses) == layout.head_shards:
            return cls(np.array(addresses, np.int64), layout.shard_bytes)
        (base,) = addresses
        return cls(base + np.arange(layout.head_shards, dtype=np.int64) * layout.shard_bytes, layout.block_bytes)


def canonical_rows(
    layout: KvLayout, places: Places, blocks: int, table: Table, tokens: range, layers: range
) -> tuple[Numbers, Numbers]:
    """Return where the cells of ``tokens`` and ``layers`` of the sequence in ``table`` lie in a pool of ``blocks``
    blocks at ``places``: the addresses and the sizes in bytes of their pieces, int64 [n] each, in the order of the
    canonical form (:mod:`common.kv.layout`).

    With one shard a piece is a run of tokens in one block, else one token's heads in one shard. Raises IndexError if a
    block or layer is out of range, or if there are no cells.
    """
    if not tokens or not 0 <= layers.start < layers.stop <= len(layout.layers):
        raise IndexError(f"tokens {tokens}, layers {layers} of {len(layout.layers)}")
    starts, counts = token_runs(tokens, layout.block_size if layout.head_shards == 1 else 1)
    first = tokens.start // layout.block_size
    ids = np.asarray(table[first : int(starts[-1]) // layout.block_size + 1], np.int64)
    ids = ids[starts // layout.block_size - first]
    if ids.min() < 0 or ids.max() >= blocks:
        raise IndexError(f"blocks {ids.min()} to {ids.max()} of {blocks}")
    at, row_bytes = _parts(layout, layers)
    addresses = at[:, None] + row_bytes[:, None] * (starts % layout.block_size) + ids * places.stride
    sizes = np.broadcast_to((row_bytes[:, None] * counts)[..., None], (*addresses.shape, layout.head_shards))
    return (addresses[..., None] + places.shards).ravel(), sizes.ravel()


def token_runs(tokens: range, size: int) -> tuple[Numbers, Numbers]:
    """Split ``tokens`` at multiples of ``size``; return the first position and the length of each run."""
    starts = np.arange(tokens.start - tokens.start % size, tokens.stop, size)
    starts[0] = tokens.start
    return starts, np.diff(starts, append=tokens.stop)


def _parts(layout: KvLayout, layers: range) -> tuple[Numbers, Numbers]:
    """Return, for the keys and the values of each of ``layers``, their offset in the first shard of a block and the
    bytes of one token in one shard: int64 [2 * len(layers)] each."""
    at, row_bytes = [], []
    for index in layers:
        layer = layout.layers[index]
        keys, values = (
            layer.kv_heads * width * layout.element_bytes // layout.head_shards for width in (layer.k_dim, layer.v_dim)
        )
        at += [layout.layer_offsets[index], layout.layer_offsets[index] + keys * layout.block_size]
        row_bytes += [keys, values]
    return np.array(at, np.int64), np.array(row_bytes, np.int64)
