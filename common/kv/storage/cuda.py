"""A paged KV pool in the memory of a GPU.

The blocks are one allocation of fixed size and address (a slab), made through :class:`DeviceCalls`; expandable
segments, such as those of torch's allocator, cannot be exported. The generation words are in host memory, in a sealed
memfd like those of :mod:`common.kv.storage.host`, because the host counts and compares them. Another process on the
same machine gets descriptors of both and maps both read-only. Imports no torch; :mod:`common.kv.storage.tensors`
creates tensors over the slab. Must not know the holders of blocks.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from common.kv.layout import KvLayout
from common.kv.pieces import Numbers
from common.kv.storage.base import Table, canonical_rows
from common.kv.storage.device_calls import DeviceBuffer, DeviceCalls, DeviceFailed, Event
from common.kv.storage.host import GenerationWords, KvMemory

log = logging.getLogger("tandem.kv")


@dataclass(frozen=True, slots=True)
class DeviceDescriptors:
    """The file descriptors of a pool on a GPU: of its generation words, and of its slab of ``slab_bytes`` bytes. The
    holder of this object owns them and closes them."""

    generations: int
    slab: int
    slab_bytes: int

    def close(self) -> None:
        """Close both descriptors; called once."""
        os.close(self.generations)
        os.close(self.slab)


class CudaBlocks:
    """Blocks of ``layout`` in a slab, this process's or an attached one. ``last_read`` is an event behind the last copy
    from them that was started."""

    last_read: Event | None = None

    def __init__(self, layout: KvLayout, blocks: int, calls: DeviceCalls, slab: DeviceBuffer) -> None:
        self.layout, self.blocks, self.calls, self.slab = layout, blocks, calls, slab

    def rows(self, table: Table, tokens: range, layers: range) -> tuple[Numbers, Numbers]:
        """Return the pieces of these cells as :func:`canonical_rows`."""
        return canonical_rows(self.layout, self.slab.address, self.blocks, table, tokens, layers)

    def gather(
        self, table: Table, tokens: range, layers: range, into: DeviceBuffer, after: Event | None = None
    ) -> None:
        """Start to copy these cells in canonical form to the start of ``into``. Raises IndexError, DeviceFailed."""
        addresses, sizes = self.rows(table, tokens, layers)
        self.calls.copy_async(addresses, into.address + _offsets(sizes), sizes, after)


class CudaMemory(CudaBlocks):
    """The pool of this process. Raises DeviceFailed if the GPU has too little memory."""

    kind: Literal["cuda"] = "cuda"

    def __init__(self, layout: KvLayout, blocks: int, calls: DeviceCalls) -> None:
        self._words = GenerationWords(blocks)
        self.generations = self._words.array
        try:
            super().__init__(layout, blocks, calls, calls.allocate(layout.block_bytes * blocks))
        except DeviceFailed:
            self._words.close()
            raise

    def mark(self) -> Event | None:
        return self.calls.mark()

    def populate(self, first: int, last: int) -> None:
        """Do nothing: a GPU's memory has no page faults."""

    def descriptors(self) -> DeviceDescriptors:
        """Return new descriptors with which another process can attach the pool. Raises DeviceFailed if this GPU's
        memory cannot be exported."""
        slab = self.calls.export(self.slab)
        return DeviceDescriptors(os.dup(self._words.fd), slab, self.slab.size)

    def scatter(
        self, table: Table, tokens: range, layers: range, source: DeviceBuffer, after: Event | None = None
    ) -> None:
        """Invert :meth:`gather`: start to copy canonical cells from the start of ``source``, elements of the pool's
        type, into the blocks of ``table``."""
        addresses, sizes = self.rows(table, tokens, layers)
        self.calls.copy_async(source.address + _offsets(sizes), addresses, sizes, after)

    def close(self) -> None:
        """Free the slab. No work on it may be under way, and tensors over it must not be used afterwards."""
        self.calls.free(self.slab)
        del self.generations
        self._words.close()


Memory = KvMemory | CudaMemory
"""The memory of a worker's KV pool."""


class AttachedCudaBlocks(CudaBlocks):
    """The pool of another process on this machine. ``lost`` is set by a reader whose copy has failed."""

    def __init__(self, handed: DeviceDescriptors, layout: KvLayout, blocks: int, calls: DeviceCalls) -> None:
        """Attach the pool and close ``handed``. Raises ValueError if the announced size cannot be right, OSError if a
        descriptor is not what it should be, DeviceFailed if this GPU cannot map the slab."""
        self.lost = False
        try:
            if handed.slab_bytes < layout.block_bytes * blocks:
                raise ValueError("the slab is smaller than its layout")
            self._words = GenerationWords.attach(os.dup(handed.generations), blocks)
            try:
                super().__init__(layout, blocks, calls, calls.attach(handed.slab, handed.slab_bytes))
            except DeviceFailed:
                self._words.close()
                raise
        finally:
            handed.close()

    def generations_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return a copy of the generation words, uint64 [n], of the blocks ``ids`` [n]."""
        return self._words.array[ids]

    def close(self) -> None:
        """Unmap the pool, once the copies from it have ended. If they have failed, it stays mapped."""
        self._words.close()
        try:
            if self.last_read is not None:
                self.calls.wait(self.last_read)
            self.calls.free(self.slab)
        except DeviceFailed as error:
            log.warning("the pool of another worker stays mapped: %s", error)


def _offsets(sizes: Numbers) -> Numbers:
    """Return where pieces of these sizes begin when they lie one behind the other."""
    return np.cumsum(sizes) - sizes
