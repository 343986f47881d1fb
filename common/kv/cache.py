"""The KV book-keeping of one worker: pool, prefix index and the tables of all sequences, kept in step.

Pure: it moves no bytes. Copies that a change needs (a fork's partial block) are returned for the engine to make.
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
    """Copy block ``source`` over block ``target``, whole."""

    source: BlockId
    target: BlockId


class KvCache:
    """Opens, grows, publishes, forks and closes block tables.

    ``model_fingerprint`` and the element type in which the KV was computed (``kv_dtype``, where nobody says another)
    salt the prefix chain together with each request's ``cache_salt``.
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
    ) -> BlockTable:
        """A table that shares the longest cached prefix of ``tokens``, always leaving the last token to compute.

        ``chain`` holds prefix keys of these tokens from an earlier try, and gets the missing ones. ``computed_in``:
        the element type of the worker whose KV will be handed over, which is not found for those of another.
        """
        if holder in self.tables:
            raise InvariantBroken(f"{holder} opens a second table")
        root = chain_root(cache_salt, self._fingerprint, computed_in or self._kv_dtype)
        table = BlockTable(holder, self.block_size, root)
        if self.prefix_caching:
            known = [] if chain is None else chain
            table.chain = extend_chain(table.root, known, tokens)[:]
            table.blocks = packed(self.prefix.match(table.chain, len(tokens) - 1))
            self.pool.share(table.blocks, holder)
            table.published = len(table.blocks)
            table.cached_tokens = table.capacity
        self.tables[holder] = table
        return table

    def grow(self, table: BlockTable, tokens: int) -> None:
        """Makes room for ``tokens`` tokens in all; OutOfBlocks leaves the table as it was."""
        if lacking := table.lacking(tokens):
            table.blocks.extend(self.pool.take(lacking, table.holder))

    def publish(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Makes the full blocks among the first ``computed`` tokens findable for later requests."""
        full = computed // self.block_size
        if not self.prefix_caching or full <= table.published:
            return
        extend_chain(table.root, table.chain, tokens[: full * self.block_size])
        self.pool.share(self.prefix.add(table.chain, table.blocks, table.published, full), CACHE)
        table.published = full

    def fork(self, table: BlockTable, holder: Holder, computed: int) -> tuple[BlockTable, list[BlockCopy]]:
        """A second table over the same ``computed`` tokens: full blocks shared, a partial last one to be copied."""
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
        """The same blocks for another holder: a reservation that becomes a sequence, a sequence kept for a transfer."""
        if holder in self.tables:
            raise InvariantBroken(f"{holder} takes over a table but has one")
        self.pool.share(table.blocks, holder)
        self.pool.drop(table.blocks, table.holder)
        del self.tables[table.holder]
        table.holder = holder
        self.tables[holder] = table

    def close(self, table: BlockTable) -> None:
        """Drops all blocks, the last first, so that the cache evicts the ends of prefixes before their beginnings."""
        if self.tables.pop(table.holder, None) is not table:
            raise InvariantBroken(f"{table.holder} closes a table that is not open")
        self.pool.drop(reversed(table.blocks), table.holder)
        table.blocks = packed()

    def strays(self) -> int:
        """How many blocks are held by somebody whose table is closed; always 0."""
        return self.pool.strays(self.tables)

    def leaks(self) -> dict[BlockId, set[Holder]]:
        """Blocks held by somebody whose table is closed; always ``{}``."""
        return self.pool.leaks(self.tables)
