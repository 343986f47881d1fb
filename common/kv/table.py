"""The blocks that cover one sequence's tokens, in order.

Pure. A table is a list of block ids held by one holder; position ``p`` lies in block ``p // block_size`` at offset
``p % block_size``. Full blocks may be shared with other tables and the prefix cache, the last partial one never is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence
from typing import cast

from common.core.ids import BlockId, Holder
from common.kv.prefix import ChainKey


def packed(blocks: Iterable[BlockId] = ()) -> MutableSequence[BlockId]:
    """``blocks`` as the numbers of C that kernels take. A decode step has the tables of all its streams, after its
    weights have gone through the caches: a list would have as many objects to find in memory as it has blocks."""
    return cast("MutableSequence[BlockId]", array("i", blocks))


class BlockTable:
    """``blocks`` are held by ``holder``; the first ``published`` of them have been offered to the prefix index."""

    __slots__ = ("block_size", "blocks", "cached_tokens", "chain", "holder", "published", "root")

    def __init__(self, holder: Holder, block_size: int, root: ChainKey) -> None:
        self.holder, self.block_size, self.root = holder, block_size, root
        self.blocks = packed()
        self.chain: list[ChainKey] = []
        self.published = 0
        self.cached_tokens = 0
        """Tokens that came from the prefix cache when the table was opened."""

    @property
    def capacity(self) -> int:
        """Tokens that fit without another block."""
        return len(self.blocks) * self.block_size

    def lacking(self, tokens: int) -> int:
        """Blocks to add so that ``tokens`` tokens fit."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))
