"""Block tables, pool and prefix index together, against a model that remembers what was written into which block.

After any sequence of open, fork, rename, publish, evict and close, every table must find its own tokens in its blocks,
and a cached block must hold exactly the prefix (of the same salt) under which it is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from common.core.errors import InvariantBroken, OutOfBlocks
from common.core.ids import CACHE, BlockId, Holder
from common.kv.cache import KvCache
from common.kv.prefix import chain_root, extend_chain
from common.kv.table import BlockTable

VOCABULARY = 2  # small, so that prefixes coincide
Written = tuple[str, tuple[int, ...]]  # salt and all tokens up to the last one in the block


def cached_prefix(cache: KvCache, tokens: Sequence[int], salt: str = "") -> int:
    """Return the number of tokens that ``cache.open`` would find cached now, without changing anything."""
    chain = extend_chain(chain_root(salt, "m", "float32"), [], tokens)
    return len(cache.prefix.match(chain, len(tokens) - 1)) * cache.block_size


def evict_all(cache: KvCache) -> None:
    """Evict every block that only the cache holds."""
    everything = Holder("xfer:all")
    cache.pool.drop(cache.pool.take(cache.pool.available, everything), everything)


@dataclass(eq=False)
class OpenSequence:
    table: BlockTable
    tokens: list[int]
    salt: str
    computed: int


class CacheMachine(RuleBasedStateMachine):
    tables = Bundle("tables")

    @initialize(blocks=st.integers(3, 14), block_size=st.sampled_from([16, 32]), caching=st.booleans())
    def build(self, blocks: int, block_size: int, caching: bool) -> None:
        self.cache = KvCache(blocks, block_size, model_fingerprint="m", kv_dtype="float32", prefix_caching=caching)
        self.caching, self.block_size = caching, block_size
        self.contents: dict[BlockId, Written] = {}
        self.open: list[OpenSequence] = []
        self.minted = 0

    def holder(self) -> Holder:
        self.minted += 1
        return Holder(f"seq:{self.minted}")

    def write(self, entry: OpenSequence, upto: int) -> None:
        """Do what the engine does: fill the table's blocks with the KV of tokens ``[computed, upto)``."""
        for index in range(entry.computed // self.block_size, -(-upto // self.block_size)):
            end = min(upto, (index + 1) * self.block_size)
            block = entry.table.blocks[index]
            assert len(self.cache.pool.holders(block) - {CACHE}) == 1, "writes into a shared block"
            self.contents[block] = (entry.salt, tuple(entry.tokens[:end]))
        entry.computed = upto

    @rule(
        target=tables,
        steps=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
        tail=st.integers(1, 16),
        salt=st.sampled_from(["", "s"]),
    )
    def open_table(self, steps: list[int], tail: int, salt: str) -> OpenSequence:
        tokens = [token for kind in steps for token in [kind] * 16] + [7] * tail
        expected = cached_prefix(self.cache, tokens, salt)
        before = self.cache.pool.counts
        table = self.cache.open(self.holder(), tokens, salt)
        assert table.cached_tokens == expected == table.capacity
        assert table.cached_tokens < len(tokens), "the last token is always computed, or nothing could be sampled"
        assert self.cache.pool.counts.free == before.free, "opening takes nothing"
        for index, block in enumerate(table.blocks):
            assert self.contents[block] == (salt, tuple(tokens[: (index + 1) * self.block_size])), "someone else's KV"
        entry = OpenSequence(table, tokens, salt, table.cached_tokens)
        self.open.append(entry)
        with pytest.raises(InvariantBroken):
            self.cache.open(table.holder, tokens, salt)
        return entry

    @rule(entry=tables, more=st.integers(0, 40), share=st.floats(0, 1), publish=st.booleans())
    def compute(self, entry: OpenSequence, more: int, share: float, publish: bool) -> None:
        if entry not in self.open:
            return
        entry.tokens += [entry.computed % VOCABULARY] * more
        before = list(entry.table.blocks)
        try:
            self.cache.grow(entry.table, len(entry.tokens))
        except OutOfBlocks:
            assert list(entry.table.blocks) == before, "a refused growth changed the table"
            del entry.tokens[max(entry.computed, len(entry.tokens) - more) :]
            return
        assert entry.table.capacity >= len(entry.tokens) > entry.table.capacity - self.block_size or more == 0
        self.write(entry, entry.computed + int(share * (len(entry.tokens) - entry.computed)))
        if publish:
            self.cache.publish(entry.table, entry.tokens, entry.computed)

    @rule(target=tables, entry=tables)
    def fork(self, entry: OpenSequence) -> OpenSequence:
        if entry not in self.open:
            return entry
        try:
            table, copies = self.cache.fork(entry.table, self.holder(), entry.computed)
        except OutOfBlocks:
            return entry
        for copy in copies:
            assert copy.target not in entry.table.blocks
            self.contents[copy.target] = self.contents[copy.source]
        other = OpenSequence(table, entry.tokens[: entry.computed], entry.salt, entry.computed)
        self.open.append(other)
        return other

    @rule(entry=tables)
    def rename(self, entry: OpenSequence) -> None:
        if entry not in self.open:
            return
        old, new, blocks = entry.table.holder, self.holder(), list(entry.table.blocks)
        before = self.cache.pool.counts
        self.cache.rename(entry.table, new)
        assert list(entry.table.blocks) == blocks
        assert self.cache.pool.counts == before
        assert self.cache.pool.held_by(old) == 0
        assert self.cache.pool.held_by(new) == len(blocks)

    @rule(entry=consumes(tables))
    def close(self, entry: OpenSequence) -> None:
        if entry not in self.open:
            return
        self.open.remove(entry)
        holder = entry.table.holder
        self.cache.close(entry.table)
        assert self.cache.pool.held_by(holder) == 0
        with pytest.raises(InvariantBroken):
            self.cache.close(entry.table)

    @rule()
    def clear(self) -> None:
        evict_all(self.cache)
        assert self.cache.pool.counts.cached == 0

    @invariant()
    def everyone_finds_their_tokens(self) -> None:
        if not hasattr(self, "cache"):
            return
        for entry in self.open:
            assert len(set(entry.table.blocks)) == len(entry.table.blocks)
            assert entry.table.published * self.block_size <= entry.computed
            for index in range(-(-entry.computed // self.block_size)):
                salt, written = self.contents[entry.table.blocks[index]]
                end = min(entry.computed, (index + 1) * self.block_size)
                assert (salt, written[:end]) == (entry.salt, tuple(entry.tokens[:end])), "someone else's KV"

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        total, free, cached, held = self.cache.pool.counts
        mine = {block for entry in self.open for block in entry.table.blocks}
        assert held == len(mine)
        assert free + cached + held == total
        assert self.cache.pool.held_by(CACHE) == len(self.cache.prefix)
        assert self.caching or len(self.cache.prefix) == 0
        assert self.cache.leaks() == {}
        assert set(self.cache.tables.values()) == {entry.table for entry in self.open}

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for entry in self.open:
            self.cache.close(entry.table)
        assert self.cache.pool.counts.held == 0
        assert self.cache.pool.leaks() == {}
        evict_all(self.cache)
        assert self.cache.pool.counts.free == self.cache.pool.total


TestKvCache = CacheMachine.TestCase
TestKvCache.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    cache = KvCache(4, 16, model_fingerprint="m", kv_dtype="float32")
    tokens = list(range(64))
    table = cache.open(Holder("seq:a"), tokens, "")
    cache.grow(table, 64)
    cache.publish(table, tokens, 64)
    cache.close(table)
    for left in (48, 32, 16, 0):
        assert cached_prefix(cache, [*tokens, 1]) == left + 16
        cache.pool.take(1, Holder("xfer:b"))
        assert cached_prefix(cache, [*tokens, 1]) == left


def test_two_computations_of_one_prefix_are_cached_once() -> None:
    cache = KvCache(4, 16, model_fingerprint="m", kv_dtype="float32")
    tokens = list(range(32))
    tables = [cache.open(Holder(f"seq:{name}"), tokens, "") for name in "ab"]
    for table in tables:
        cache.grow(table, 32)
    for table in tables:
        cache.publish(table, tokens, 32)
    assert cache.pool.held_by(CACHE) == 2
    for table in tables:
        cache.close(table)
    assert cache.pool.counts == (4, 2, 2, 0)


def test_a_prompt_that_is_cached_whole_still_leaves_a_token_to_compute() -> None:
    cache = KvCache(4, 16, model_fingerprint="m", kv_dtype="float32")
    tokens = list(range(32))
    table = cache.open(Holder("seq:a"), tokens, "")
    cache.grow(table, 32)
    cache.publish(table, tokens, 32)
    cache.close(table)
    assert cached_prefix(cache, tokens) == 16
    assert cache.open(Holder("seq:b"), tokens, "").cached_tokens == 16
    assert cache.open(Holder("seq:c"), [*tokens, 1], "").cached_tokens == 32


def test_a_fork_is_found_by_its_own_tokens_where_they_differ_from_those_that_the_first_had_yet_to_compute() -> None:
    cache = KvCache(4, 16, model_fingerprint="m", kv_dtype="float32")
    table = cache.open(Holder("seq:a"), [1] * 17, "")
    other, _ = cache.fork(table, Holder("seq:b"), 0)
    cache.grow(other, 16)
    cache.publish(other, [0] * 16, 16)
    assert (cached_prefix(cache, [0] * 17), cached_prefix(cache, [1] * 17)) == (16, 0)
