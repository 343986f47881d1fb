"""The block table of one sequence: the blocks that hold its tokens' KV, in order.

Pure. A table is a list of block ids held by one holder. Position ``p`` lies in entry ``p // block_size`` at offset
``p % block_size``. Full blocks may be shared with other tables and the prefix cache; a partial last block never is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence
from typing import cast

from common.core.ids import BlockId, Holder
from common.kv.prefix import ChainKey


def packed(blocks: Iterable[BlockId] = ()) -> MutableSequence[BlockId]:
    """Return ``blocks`` as an array of C ints, which kernels take. A list would cost a cache miss per block: a decode
    step reads the tables of all streams after its weights have displaced everything else from the CPU's caches."""
    return cast("MutableSequence[BlockId]", array("i", blocks))


class BlockTable:
    """The block table of one holder. The first ``published`` of ``blocks`` have been offered to the prefix index."""

    __slots__ = ("block_size", "blocks", "cached_tokens", "chain", "holder", "published", "root")

    def __init__(self, holder: Holder, block_size: int, root: ChainKey) -> None:
        self.holder, self.block_size, self.root = holder, block_size, root
        self.blocks = packed()
        self.chain: list[ChainKey] = []
        self.published = 0
        self.cached_tokens = 0
        """Tokens found in the prefix cache when the table was opened."""

    @property
    def capacity(self) -> int:
        """Tokens that fit into the present blocks."""
        return len(self.blocks) * self.block_size

    def lacking(self, tokens: int) -> int:
        """Return how many blocks must be added so that ``tokens`` tokens fit."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))
