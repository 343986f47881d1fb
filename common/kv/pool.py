"""The pool of KV blocks, reference-counted by named holders.

Pure. A block has *holders*, not an owner. It is free when it has no holder, evictable when its only holder is
``cache``, and is never given out otherwise. Tying a block's life to a request's life instead is a frequent cause of
bugs in prefill/decode serving (vLLM #32255, #46289; SGLang #35049; TensorRT-LLM #12313).

    free ── take ──► held ── last drop ──► free            (or ──► evictable, when ``cache`` still holds it)
    evictable ── share ──► held            evictable ── take, least recently used first ──► held by the taker
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple, Protocol

from common.core.errors import InvariantBroken, OutOfBlocks
from common.core.ids import CACHE, BlockId, Holder


class Generations(Protocol):
    """A mutable array with one counter per block: a list, or words in shared memory."""

    def __getitem__(self, block: int, /) -> Any: ...

    def __setitem__(self, block: int, count: Any, /) -> None: ...


class PoolCounts(NamedTuple):
    """Number of blocks by state. The states add up to ``total``; a block that is both held and cached counts as
    ``held``."""

    total: int
    free: int
    cached: int
    held: int


class BlockPool:
    """The reference counts of ``total`` blocks by named holders. Raises ValueError unless ``total`` is positive.

    ``on_evict`` is called with each block that is evicted from the cache, before it is given out again.
    ``generations`` counts how often each block was taken, so that a remote reader can detect that a block was reused
    while it read.
    """

    def __init__(
        self,
        total: int,
        on_evict: Callable[[BlockId], None] | None = None,
        generations: Generations | None = None,
    ) -> None:
        if total <= 0:
            raise ValueError(f"a pool needs at least one block, not {total}")
        self.total = total
        self.on_evict = on_evict or (lambda block: None)
        self.generations: Generations = [0] * total if generations is None else generations
        self.peak = 0
        """The highest block number ever used plus one; 0 if no block was used."""
        # the block freed last is taken first, since its memory is still in the CPU's caches. Tables are dropped from
        # their end, so that their blocks are taken again in ascending order and adjacent blocks stay together
        self._free = [BlockId(i) for i in reversed(range(total))]
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._holders: list[set[Holder]] = [set() for _ in range(total)]
        self._held: Counter[Holder] = Counter()  # blocks per holder, CACHE included

    # -- queries ------------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Number of blocks that :meth:`take` can give now, by eviction if needed."""
        return len(self._free) + len(self._evictable)

    @property
    def counts(self) -> PoolCounts:
        """Number of blocks by state."""
        free, cached = len(self._free), len(self._evictable)
        return PoolCounts(self.total, free, cached, self.total - free - cached)

    def holders(self, block: BlockId) -> frozenset[Holder]:
        """Return the holders of ``block``; empty if it is free."""
        return frozenset(self._holders[block])

    def held_by(self, holder: Holder) -> int:
        """Return how many blocks ``holder`` holds."""
        return self._held[holder]

    def strays(self, live: Container[Holder]) -> int:
        """Return how many blocks are held by holders that are neither ``cache`` nor in ``live``, counted once per
        holder. Cheap enough for a metric."""
        return sum([count for holder, count in self._held.items() if holder not in live and holder != CACHE])

    def leaks(self, live: Iterable[Holder] = ()) -> dict[BlockId, set[Holder]]:
        """Return the blocks with holders that are neither ``cache`` nor in ``live``, and those holders; ``{}`` when
        nothing leaks."""
        known = {CACHE, *live}
        return {BlockId(i): gone for i, holders in enumerate(self._holders) if (gone := holders - known)}

    # -- changes ------------------------------------------------------------------------------------------------------

    def take(self, count: int, holder: Holder) -> list[BlockId]:
        """Take ``count`` blocks with undefined contents, held only by ``holder``; raises OutOfBlocks and takes none if
        fewer are available."""
        if holder == CACHE:
            raise InvariantBroken("the cache shares computed blocks and never takes empty ones")
        if count > self.available:
            held = {str(name): n for name, n in self._held.items() if n and name != CACHE}
            raise OutOfBlocks(holder, count, len(self._free), len(self._evictable), held)
        return [self._take_one(holder) for _ in range(count)]

    def share(self, blocks: Iterable[BlockId], holder: Holder) -> None:
        """Add ``holder`` to blocks that already have a holder."""
        for block in blocks:
            holders = self._holders[block]
            if not holders or holder in holders:
                raise InvariantBroken(f"{holder} shares block {block} held by {sorted(holders) or 'no holder'}")
            self._evictable.pop(block, None)
            holders.add(holder)
            self._held[holder] += 1
            self._rank(block)

    def drop(self, blocks: Iterable[BlockId], holder: Holder) -> None:
        """Remove ``holder`` from blocks; a block without holders is free at once."""
        for block in blocks:
            holders = self._holders[block]
            if holder not in holders:
                raise InvariantBroken(f"{holder} drops block {block} held by {sorted(holders) or 'no holder'}")
            holders.discard(holder)
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]
            self._rank(block)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _take_one(self, holder: Holder) -> BlockId:
        if self._free:
            block = self._free.pop()
            self.peak = max(self.peak, block + 1)
        else:
            block, _ = self._evictable.popitem(last=False)
            self.on_evict(block)
            self._holders[block].discard(CACHE)
            self._held[CACHE] -= 1
        if self._holders[block]:
            raise InvariantBroken(f"block {block} is given out while held by {sorted(self._holders[block])}")
        self._holders[block].add(holder)
        self._held[holder] += 1
        self.generations[block] += 1
        return block

    def _rank(self, block: BlockId) -> None:
        """Put the block where its holders require: into the free list, the evictable ones, or neither."""
        holders = self._holders[block]
        if not holders:
            self._evictable.pop(block, None)
            self._free.append(block)
        elif holders == {CACHE}:
            self._evictable[block] = None
