"""Which KV block is held by whom.

Pure. A block has *holders*, not an owner: it is free when nobody holds it, evictable when only ``cache`` does, and
never given out while anybody else holds it. Tying a block's life to a request's life instead is the most repeated bug
family of prefill/decode serving (vLLM #32255, #46289; SGLang #35049; TensorRT-LLM #12313).

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
    """A mutable array of one counter per block: a list, or words in shared memory."""

    def __getitem__(self, block: int, /) -> Any: ...

    def __setitem__(self, block: int, count: Any, /) -> None: ...


class PoolCounts(NamedTuple):
    """Blocks by state; they add up to ``total``. ``held`` wins over ``cached``."""

    total: int
    free: int
    cached: int
    held: int


class BlockPool:
    """Reference counts of ``total`` blocks by named holders.

    ``on_evict`` is told about each block that leaves the cache to be reused, before it is given out. ``generations``
    counts how often each block was taken: a reader who finds another count than it was told reads another's KV.
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
        """Blocks of this number and higher were never in use."""
        # the last one freed is the first one taken: its memory is still warm, and tables dropped from their end come
        # back in rising order, so that runs of neighbours stay together
        self._free = [BlockId(i) for i in reversed(range(total))]
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._holders: list[set[Holder]] = [set() for _ in range(total)]
        self._held: Counter[Holder] = Counter()  # blocks per holder, CACHE included

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that :meth:`take` could give now."""
        return len(self._free) + len(self._evictable)

    @property
    def counts(self) -> PoolCounts:
        free, cached = len(self._free), len(self._evictable)
        return PoolCounts(self.total, free, cached, self.total - free - cached)

    def holders(self, block: BlockId) -> frozenset[Holder]:
        return frozenset(self._holders[block])

    def held_by(self, holder: Holder) -> int:
        """How many blocks ``holder`` holds."""
        return self._held[holder]

    def strays(self, live: Container[Holder]) -> int:
        """Blocks held under names that are neither ``cache`` nor in ``live``: cheap, for a metric."""
        return sum([count for holder, count in self._held.items() if holder not in live and holder != CACHE])

    def leaks(self, live: Iterable[Holder] = ()) -> dict[BlockId, set[Holder]]:
        """Blocks with holders other than ``cache`` that are not in ``live``; at quiescence ``{}``."""
        known = {CACHE, *live}
        return {BlockId(i): gone for i, holders in enumerate(self._holders) if (gone := holders - known)}

    # -- changing -----------------------------------------------------------------------------------------------------

    def take(self, count: int, holder: Holder) -> list[BlockId]:
        """``count`` blocks with undefined contents, held by ``holder`` alone; all or OutOfBlocks."""
        if holder == CACHE:
            raise InvariantBroken("the cache shares blocks that were computed, it never takes empty ones")
        if count > self.available:
            held = {str(name): n for name, n in self._held.items() if n and name != CACHE}
            raise OutOfBlocks(holder, count, len(self._free), len(self._evictable), held)
        return [self._take_one(holder) for _ in range(count)]

    def share(self, blocks: Iterable[BlockId], holder: Holder) -> None:
        """Adds ``holder`` to blocks that somebody already holds."""
        for block in blocks:
            holders = self._holders[block]
            if not holders or holder in holders:
                raise InvariantBroken(f"{holder} shares block {block} held by {sorted(holders) or 'nobody'}")
            self._evictable.pop(block, None)
            holders.add(holder)
            self._held[holder] += 1
            self._rank(block)

    def drop(self, blocks: Iterable[BlockId], holder: Holder) -> None:
        """Removes ``holder``; a block that nobody holds any more is free at once."""
        for block in blocks:
            holders = self._holders[block]
            if holder not in holders:
                raise InvariantBroken(f"{holder} drops block {block} held by {sorted(holders) or 'nobody'}")
            holders.discard(holder)
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]
            self._rank(block)

    # -- inside -------------------------------------------------------------------------------------------------------

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
        """Files the block where its holders put it: nowhere, among the evictable, or among the free."""
        holders = self._holders[block]
        if not holders:
            self._evictable.pop(block, None)
            self._free.append(block)
        elif holders == {CACHE}:
            self._evictable[block] = None
