"""A paged KV pool in the memory of a GPU.

The blocks are one allocation of fixed size and address (a slab), made through :class:`DeviceCalls`; expandable
segments, such as those of torch's allocator, cannot be exported. The generation words are in host memory, in a sealed
memfd like those of :mod:`common.kv.storage.host`, because the host counts and compares them. Another process on the
same machine gets descriptors of both and maps both read-only. Imports no torch; :mod:`common.kv.storage.tensors`
creates tensors over the slab. A worker on several GPUs has a slab on each. Must not know
the holders of blocks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from common.kv.layout import KvLayout
from common.kv.pieces import Numbers
from common.kv.storage.base import Places, Table, canonical_rows
from common.kv.storage.device_calls import DeviceBuffer, DeviceCalls, DeviceFailed, Event
from common.kv.storage.host import GenerationWords, KvMemory

log = logging.getLogger("tandem.kv")


class OutOfReach(DeviceFailed):
    """A GPU cannot map the memory of another one."""


@dataclass(frozen=True, slots=True)
class DeviceDescriptors:
    """The file descriptors of a pool on a GPU: of its generation words, and of its slabs of ``slab_bytes`` bytes each:
    one, or on several GPUs one per shard. The holder of this object owns them and closes them."""

    generations: int
    slabs: tuple[int, ...]
    slab_bytes: int

    def close(self) -> None:
        """Close all descriptors; called once."""
        for each in (self.generations, *self.slabs):
            os.close(each)


class CudaBlocks:
    """Blocks of ``layout`` in ``slabs``, this process's or attached ones: one with whole blocks, or one per shard.
    ``last_read`` is an event behind the last copy from them that was started."""

    last_read: Event | None = None

    def __init__(self, layout: KvLayout, blocks: int, calls: DeviceCalls, slabs: Sequence[DeviceBuffer]) -> None:
        self.layout, self.blocks, self.calls = layout, blocks, calls
        self.slabs = tuple(slabs)
        self._places = Places.of(layout, [slab.address for slab in slabs])

    def rows(self, table: Table, tokens: range, layers: range) -> tuple[Numbers, Numbers]:
        """Return the pieces of these cells as :func:`canonical_rows`."""
        return canonical_rows(self.layout, self._places, self.blocks, table, tokens, layers)

    def gather(
        self, table: Table, tokens: range, layers: range, into: DeviceBuffer, after: Event | None = None
    ) -> None:
        """Start to copy these cells in canonical form to the start of ``into``. Raises IndexError, DeviceFailed."""
        addresses, sizes = self.rows(table, tokens, layers)
        self.calls.copy_async(addresses, into.address + _offsets(sizes), sizes, after)


class CudaMemory(CudaBlocks):
    """The pool of this process. ``slab`` is the memory on its own GPU.

    In a tensor-parallel worker this is rank 0, and ``others`` are a descriptor (owned from here on) and the size of the
    slab of each other rank, which is on a GPU of its own. Each slab has one shard of every block, that of its rank.
    Rank 0 maps them all, to move KV for hand-offs; the other ranks read and write only theirs, in their steps. If
    several ranks have the same heads, KV is read from the first and written to all of them.

    Raises DeviceFailed if the GPU has too little memory or cannot reach that of another rank's GPU.
    """

    kind: Literal["cuda"] = "cuda"

    def __init__(
        self, layout: KvLayout, blocks: int, calls: DeviceCalls, others: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._descriptors = [descriptor for descriptor, _ in others]
        self._words = GenerationWords(blocks)
        self.generations = self._words.array
        with ExitStack() as undo:
            undo.callback(self._close_files)
            self.slab = calls.allocate((layout.shard_bytes if others else layout.block_bytes) * blocks)
            undo.callback(calls.free, self.slab)
            self._ranks = [self.slab]
            for rank, (descriptor, size) in enumerate(others, 1):
                self._ranks.append(_reached(calls, rank, descriptor, size, self.slab.size))
                undo.callback(calls.free, self._ranks[-1])
            undo.pop_all()
        copies = max(1, len(self._ranks) // layout.head_shards)
        super().__init__(layout, blocks, calls, self._ranks[::copies])
        self._written = [
            Places.of(layout, [slab.address for slab in self._ranks[first::copies]]) for first in range(copies)
        ]

    @property
    def ranks(self) -> int:
        """How many GPUs the pool lies on."""
        return len(self._ranks)

    def mark(self) -> Event | None:
        return self.calls.mark()

    def populate(self, first: int, last: int) -> None:
        """Do nothing: a GPU's memory has no page faults."""

    def descriptors(self) -> DeviceDescriptors:
        """Return new descriptors with which another process can attach the pool. Raises DeviceFailed if this GPU's
        memory cannot be exported."""
        own = self.calls.export(self.slab)
        others = [
            os.dup(descriptor)
            for slab, descriptor in zip(self._ranks[1:], self._descriptors, strict=True)
            if slab in self.slabs
        ]
        return DeviceDescriptors(os.dup(self._words.fd), (own, *others), self.slab.size)

    def scatter(
        self, table: Table, tokens: range, layers: range, source: DeviceBuffer, after: Event | None = None
    ) -> None:
        """Invert :meth:`gather`: start to copy canonical cells from the start of ``source``, elements of the pool's
        type, into the blocks of ``table``."""
        for places in self._written:
            addresses, sizes = canonical_rows(self.layout, places, self.blocks, table, tokens, layers)
            self.calls.copy_async(source.address + _offsets(sizes), addresses, sizes, after)

    def close(self) -> None:
        """Free the slab, and unmap those of other ranks. No work on them may be under way, and tensors over them must
        not be used afterwards."""
        for slab in self._ranks:
            self.calls.free(slab)
        self._close_files()

    def _close_files(self) -> None:
        del self.generations
        self._words.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _reached(calls: DeviceCalls, rank: int, descriptor: int, size: int, expected: int) -> DeviceBuffer:
    """Map the slab of another rank of this worker, for reading and writing."""
    if size != expected:
        raise DeviceFailed(f"the slab of rank {rank} has {size} bytes, that of rank 0 {expected}")
    try:
        return calls.attach(descriptor, size, writable=True)
    except DeviceFailed as error:
        raise OutOfReach(f"{calls.name} cannot reach the memory of the GPU of rank {rank}: {error}") from error


class RankSlab:
    """The slab of a rank other than 0: its shard of ``blocks`` blocks, of which ``layout`` is that shard alone. Raises
    DeviceFailed if the GPU has too little memory."""

    def __init__(self, layout: KvLayout, blocks: int, calls: DeviceCalls) -> None:
        self._calls = calls
        self.buffer = calls.allocate(layout.block_bytes * blocks)

    def export(self) -> tuple[int, int]:
        """Return a new descriptor of the slab for rank 0, and the slab's size in bytes. Raises DeviceFailed."""
        return self._calls.export(self.buffer), self.buffer.size

    def close(self) -> None:
        """Free the slab. Tensors over it must not be used afterwards."""
        self._calls.free(self.buffer)


Memory = KvMemory | CudaMemory
"""The memory of a worker's KV pool."""


class AttachedCudaBlocks(CudaBlocks):
    """The pool of another process on this machine. ``lost`` is set by a reader whose copy has failed."""

    def __init__(self, handed: DeviceDescriptors, layout: KvLayout, blocks: int, calls: DeviceCalls) -> None:
        """Attach the pool and close ``handed``. Raises ValueError if the announced size cannot be right, OSError if a
        descriptor is not what it should be, DeviceFailed if this GPU cannot map a slab."""
        self.lost = False
        with ExitStack() as handed_over, ExitStack() as undo:
            handed_over.callback(handed.close)
            count = len(handed.slabs)
            if count not in (1, layout.head_shards):
                raise ValueError(f"{count} slabs for {layout.head_shards} shards")
            if handed.slab_bytes < layout.block_bytes * blocks // count:
                raise ValueError("a slab is smaller than its layout")
            self._words = GenerationWords.attach(os.dup(handed.generations), blocks)
            undo.callback(self._words.close)
            slabs: list[DeviceBuffer] = []
            for each in handed.slabs:
                slabs.append(calls.attach(each, handed.slab_bytes))
                undo.callback(calls.free, slabs[-1])
            super().__init__(layout, blocks, calls, slabs)
            undo.pop_all()

    def generations_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return a copy of the generation words, uint64 [n], of the blocks ``ids`` [n]."""
        return self._words.array[ids]

    def close(self) -> None:
        """Unmap the pool, once the copies from it have ended. If they have failed, it stays mapped."""
        self._words.close()
        try:
            if self.last_read is not None:
                self.calls.wait(self.last_read)
            for slab in self.slabs:
                self.calls.free(slab)
        except DeviceFailed as error:
            log.warning("the pool of another worker stays mapped: %s", error)


def _offsets(sizes: Numbers) -> Numbers:
    """Return where pieces of these sizes begin when they lie one behind the other."""
    return np.cumsum(sizes) - sizes
