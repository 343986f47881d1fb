"""The KV bookkeeping of one worker: keeps the pool, the prefix index and the block tables of all sequences consistent.

Pure: it moves no bytes. The copies that a change needs (the partial block of a fork) are returned for the engine to
make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.core.errors import InvariantBroken
from common.core.ids import CACHE, BlockId, Holder
from common.kv.layout import CHAIN_STEP, KvDtype
from common.kv.pool import BlockPool, Generations
from common.kv.prefix import ChainKey, PrefixIndex, chain_root, extend_chain
from common.kv.table import BlockTable, packed


class BlockCopy(NamedTuple):
    """A copy to make of the whole block ``source`` over block ``target``."""

    source: BlockId
    target: BlockId


class KvCache:
    """Opens, grows, publishes, forks and closes block tables.

    The prefix chain is salted with ``model_fingerprint``, the element type in which the KV was computed (``kv_dtype``
    unless :meth:`open` gets another) and each request's ``cache_salt``.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        model_fingerprint: str,
        kv_dtype: KvDtype,
        prefix_caching: bool = True,
        generations: Generations | None = None,
    ) -> None:
        self.block_size = block_size
        self.prefix = PrefixIndex(block_size)
        self.pool = BlockPool(blocks, self.prefix.forget, generations)
        self.tables: dict[Holder, BlockTable] = {}
        self.prefix_caching = prefix_caching
        self._fingerprint, self._kv_dtype = model_fingerprint, kv_dtype

    def open(
        self,
        holder: Holder,
        tokens: Sequence[int],
        cache_salt: str,
        chain: list[ChainKey] | None = None,
        computed_in: KvDtype | None = None,
        most: int | None = None,
    ) -> BlockTable:
        """Open a table that shares the longest cached prefix of ``tokens`` but never their last token, which must be
        computed to sample. ``most``: share at most so many leading tokens.

        ``chain`` holds prefix keys of these tokens from an earlier try and gets the missing ones appended.
        ``computed_in`` is the element type of the worker that will hand its KV over; cached KV that was computed in
        another type does not match.
        """
        if holder in self.tables:
            raise InvariantBroken(f"{holder} opens a second table")
        root = chain_root(cache_salt, self._fingerprint, computed_in or self._kv_dtype)
        table = BlockTable(holder, self.block_size, root)
        if self.prefix_caching:
            known = [] if chain is None else chain
            table.chain = extend_chain(table.root, known, tokens)[:]
            most = len(tokens) - 1 if most is None else most
            table.blocks = packed(self.prefix.match(table.chain, most))
            self.pool.share(table.blocks, holder)
            table.published = len(table.blocks)
            table.cached_tokens = table.capacity
        self.tables[holder] = table
        return table

    def grow(self, table: BlockTable, tokens: int) -> None:
        """Add blocks until ``tokens`` tokens fit in the table. Raises OutOfBlocks and leaves the table unchanged if the
        pool has too few."""
        if lacking := table.lacking(tokens):
            table.blocks.extend(self.pool.take(lacking, table.holder))

    def publish(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Add the full blocks among the first ``computed`` tokens to the prefix cache."""
        full = computed // self.block_size
        if not self.prefix_caching or full <= table.published:
            return
        extend_chain(table.root, table.chain, tokens[: full * self.block_size])
        self.pool.share(self.prefix.add(table.chain, table.blocks, table.published, full), CACHE)
        table.published = full

    def fork(self, table: BlockTable, holder: Holder, computed: int) -> tuple[BlockTable, list[BlockCopy]]:
        """Open a second table over the same ``computed`` tokens. Full blocks are shared; the copy of a partial last
        block is returned for the caller to make. Raises OutOfBlocks."""
        full, partial = divmod(computed, self.block_size)
        fresh = self.pool.take(1 if partial else 0, holder)
        other = BlockTable(holder, self.block_size, table.root)
        other.chain, other.published = table.chain[: computed // CHAIN_STEP], min(table.published, full)
        shared = table.blocks[:full]
        self.pool.share(shared, holder)
        other.blocks = packed([*shared, *fresh])
        self.tables[holder] = other
        return other, [BlockCopy(table.blocks[full], fresh[0])] if partial else []

    def rename(self, table: BlockTable, holder: Holder) -> None:
        """Move a table to another holder, for example when a reservation becomes a sequence, or when the blocks of a
        finished sequence are kept for a transfer."""
        if holder in self.tables:
            raise InvariantBroken(f"{holder} takes over a table but already has one")
        self.pool.share(table.blocks, holder)
        self.pool.drop(table.blocks, table.holder)
        del self.tables[table.holder]
        table.holder = holder
        self.tables[holder] = table

    def close(self, table: BlockTable) -> None:
        """Drop all blocks of a table, the last first, so that the cache evicts prefixes from their ends."""
        if self.tables.pop(table.holder, None) is not table:
            raise InvariantBroken(f"{table.holder} closes a table that is not open")
        self.pool.drop(reversed(table.blocks), table.holder)
        table.blocks = packed()

    def strays(self) -> int:
        """Return how many blocks are held by holders without an open table. Anything but 0 is a leak."""
        return self.pool.strays(self.tables)

    def leaks(self) -> dict[BlockId, set[Holder]]:
        """Return blocks and their holders without an open table. Anything but ``{}`` is a leak."""
        return self.pool.leaks(self.tables)
