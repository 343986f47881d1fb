"""The block pool against a model that is a list of sets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.core.errors import InvariantBroken, OutOfBlocks
from common.core.ids import CACHE, BlockId, Holder
from common.kv.pool import BlockPool

HOLDERS = [Holder(f"seq:{name}/0/0") for name in "abc"] + [Holder("xfer:a/1")]
ALL = [*HOLDERS, CACHE]


class PoolMachine(RuleBasedStateMachine):
    """Model of the pool: ``holders`` of each block, and ``lru``, the blocks that only the cache holds, least recently
    used first."""

    @initialize(total=st.integers(1, 12))
    def build(self, total: int) -> None:
        self.evicted: list[BlockId] = []
        self.pool = BlockPool(total, self.evicted.append)
        self.holders: list[set[Holder]] = [set() for _ in range(total)]
        self.lru: list[BlockId] = []
        self.generations = [0] * total

    @property
    def free(self) -> int:
        return sum(not holders for holders in self.holders)

    def settle(self, block: BlockId) -> None:
        """Update ``lru``: a block becomes the most recently used one when the cache is left as its only holder."""
        if block in self.lru:
            self.lru.remove(block)
        if self.holders[block] == {CACHE}:
            self.lru.append(block)

    @rule(count=st.integers(0, 14), holder=st.sampled_from(HOLDERS))
    def take(self, count: int, holder: Holder) -> None:
        free = self.free
        if count > free + len(self.lru):
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.take(count, holder)
            assert (caught.value.wanted, caught.value.free, caught.value.evictable) == (count, free, len(self.lru))
            return
        self.evicted.clear()
        blocks = self.pool.take(count, holder)
        assert len(set(blocks)) == count
        expected = self.lru[: max(0, count - free)]
        assert self.evicted == expected, "evicts only what it must, least recently used first"
        for block in blocks:
            assert self.holders[block] == ({CACHE} if block in expected else set()), "gave out a block in use"
            self.holders[block] = {holder}
            self.generations[block] += 1
            self.settle(block)

    @rule(blocks=st.lists(st.integers(0, 11), max_size=4, unique=True), holder=st.sampled_from(ALL))
    def share(self, blocks: list[int], holder: Holder) -> None:
        wanted = [BlockId(b) for b in blocks if b < self.pool.total]
        good = [b for b in wanted if self.holders[b] and holder not in self.holders[b]]
        self.pool.share(good, holder)
        for block in good:
            self.holders[block].add(holder)
            self.settle(block)
        for block in set(wanted) - set(good):
            with pytest.raises(InvariantBroken):
                self.pool.share([block], holder)

    @rule(blocks=st.lists(st.integers(0, 11), max_size=6, unique=True), holder=st.sampled_from(ALL))
    def drop(self, blocks: list[int], holder: Holder) -> None:
        wanted = [BlockId(b) for b in blocks if b < self.pool.total]
        good = [b for b in wanted if holder in self.holders[b]]
        self.pool.drop(good, holder)
        for block in good:
            self.holders[block].discard(holder)
            self.settle(block)
        for block in set(wanted) - set(good):
            with pytest.raises(InvariantBroken):
                self.pool.drop([block], holder)

    @precondition(lambda self: any(self.holders))
    @rule(holder=st.sampled_from(ALL))
    def drop_twice(self, holder: Holder) -> None:
        held = [BlockId(i) for i, holders in enumerate(self.holders) if holder in holders]
        if not held:
            return
        self.drop([held[0]], holder)
        with pytest.raises(InvariantBroken):
            self.pool.drop([held[0]], holder)

    @rule()
    def the_cache_takes_nothing(self) -> None:
        with pytest.raises(InvariantBroken):
            self.pool.take(1, CACHE)

    @invariant()
    def what_lies_behind_the_peak_was_never_used(self) -> None:
        assert not any(self.generations[self.pool.peak :])
        assert self.pool.peak <= sum(count > 0 for count in self.generations), "the lowest are given out first"

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        total, free, cached, held = self.pool.counts
        assert (total, free, cached) == (len(self.holders), self.free, len(self.lru))
        assert free + cached + held == total
        assert self.pool.available == free + cached
        for block, holders in enumerate(self.holders):
            assert self.pool.holders(BlockId(block)) == holders
        for holder in ALL:
            assert self.pool.held_by(holder) == sum(holder in holders for holders in self.holders)
        assert self.pool.generations == self.generations
        assert self.pool.leaks(HOLDERS) == {}
        named = {BlockId(b): h - {CACHE} for b, h in enumerate(self.holders) if h - {CACHE}}
        assert self.pool.leaks() == named

    def teardown(self) -> None:
        """Check that no block leaks and all are free after each holder has dropped its blocks."""
        if not hasattr(self, "pool"):
            return
        for holder in ALL:
            self.pool.drop([BlockId(i) for i, holders in enumerate(self.holders) if holder in holders], holder)
        assert self.pool.leaks() == {}
        assert self.pool.counts.free == self.pool.total


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_table_that_was_dropped_from_its_end_comes_back_as_one_run() -> None:
    pool = BlockPool(8)
    assert pool.take(3, HOLDERS[1]) == [0, 1, 2]
    blocks = pool.take(4, HOLDERS[0])
    pool.drop(reversed(blocks), HOLDERS[0])
    assert pool.take(4, HOLDERS[0]) == blocks == [3, 4, 5, 6]


def test_out_of_blocks_error_names_holders() -> None:
    pool = BlockPool(4)
    pool.take(3, HOLDERS[0])
    with pytest.raises(OutOfBlocks, match=r"seq:b/0/0 wants 2 blocks, 1 free, 0 evictable; held by: seq:a/0/0 3"):
        pool.take(2, HOLDERS[1])


@pytest.mark.parametrize("total", [0, -1])
def test_an_empty_pool_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(total)
