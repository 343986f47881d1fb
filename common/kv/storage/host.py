"""A paged KV pool in host memory, in an anonymous file that other processes may map read-only.

The file is a sealed memfd: it disappears with its owner, even after SIGKILL, and no other process can map it writable,
except the other ranks of a tensor-parallel worker, which do so before it is sealed.
The blocks are followed by one generation word per block, which a reader in another process checks before and after its
copy. Reads and writes here use the canonical form of :mod:`common.kv.layout` and numpy only, so that a process without
torch can hold a pool; :mod:`common.kv.storage.tensors` creates torch tensors over the same bytes.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from common.kv import pieces
from common.kv.convert import Bytes, converted
from common.kv.layout import KvDtype, KvLayout
from common.kv.pieces import Numbers
from common.kv.storage.base import Table, token_runs

_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
# from fcntl.h; F_SEAL_FUTURE_WRITE keeps the owner's existing mapping writable and forbids later writable ones
_F_ADD_SEALS, _F_GET_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1033, 1034, 1, 2, 4, 16
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE


def _bytes_of(layout: KvLayout, blocks: int) -> tuple[int, int]:
    """Return the offset of the generation words and the size of the whole file, in bytes."""
    generations = -(-layout.block_bytes * blocks // _PAGE) * _PAGE
    return generations, generations + _words_bytes(blocks)


class BlockArray:
    """Blocks of ``layout`` in ``raw`` (uint8 [blocks, block_bytes]), read and written in canonical form."""

    def __init__(self, layout: KvLayout, raw: Bytes) -> None:
        self.layout, self.raw = layout, raw
        self._parts: dict[int, tuple[_LayerRows, _LayerRows]] = {}

    def read(self, table: Table, tokens: range, layers: range, out: Bytes | None = None) -> Bytes:
        """Return a copy of the canonical bytes of token positions ``tokens`` and ``layers`` of the sequence in
        ``table``: per layer all keys, then all values. With ``out`` (uint8 of exactly that size) they are written
        there."""
        size = self.layout.range_bytes(layers.start, layers.stop, len(tokens))
        buffer = np.empty(size, np.uint8) if out is None else out
        rows = _Rows(table, tokens, self.layout.block_size)
        for slab, canonical in self._places(buffer, rows.tokens, layers):
            rows.copy_out(slab, canonical)
        return buffer

    def checksum(self, table: Table, tokens: range, layers: range) -> int:
        """Return the XXH3-64 of the bytes of :meth:`read`. They are hashed in place if ``pieces.c`` is compiled and
        rows are contiguous (one shard)."""
        if pieces.are_compiled() and self.layout.head_shards == 1 and tokens and layers:
            starts, counts = token_runs(tokens, self.layout.block_size)
            return pieces.digest(self._addresses(table, starts, layers), self._sizes(counts, layers))
        return xxhash.xxh3_64_intdigest(self.read(table, tokens, layers).data)

    def takes(self, source: BlockArray) -> bool:
        """Return whether :meth:`take` can copy from ``source``: the same layers and element type, contiguous rows on
        both sides (one shard), and ``pieces.c`` compiled."""
        own, other = self.layout, source.layout
        alike = own.layers == other.layers and own.dtype == other.dtype and own.head_shards == other.head_shards == 1
        return alike and pieces.are_compiled()

    def take(self, table: Table, tokens: range, layers: range, source: BlockArray, blocks: Table) -> int:
        """Copy ``tokens`` (not empty) and ``layers`` from blocks of ``source`` to their places in ``table``, and return
        the XXH3-64 of the written bytes in the order of :meth:`read`, in one pass.

        ``blocks`` are the blocks of ``source`` that hold ``tokens``, the first of them being the one in which
        ``tokens`` begin. Raises IndexError and writes nothing if a block or layer is out of range, and ValueError if
        this pool is another process's.
        """
        if not self.raw.flags.writeable:
            raise ValueError("this pool belongs to another process and is read-only")
        starts, counts = token_runs(tokens, math.gcd(self.layout.block_size, source.layout.block_size))
        before = tokens.start - tokens.start % source.layout.block_size
        sources = source._addresses(blocks, starts - before, layers)
        return pieces.digest(sources, self._sizes(counts, layers), self._addresses(table, starts, layers))

    @cached_property
    def _slabs(self) -> tuple[Numbers, Numbers]:
        """Byte offsets in a block, and bytes per row, of each layer's keys and values: int64 [2 * layers] each, in the
        order k, v per layer. For one shard only."""
        at, row_bytes = [], []
        for layer, inside in zip(self.layout.layers, self.layout.layer_offsets, strict=True):
            keys, values = (layer.kv_heads * width * self.layout.element_bytes for width in (layer.k_dim, layer.v_dim))
            at += [inside, inside + keys * self.layout.block_size]
            row_bytes += [keys, values]
        return np.array(at, np.int64), np.array(row_bytes, np.int64)

    def _addresses(self, table: Table, starts: Numbers, layers: range) -> Numbers:
        """Return the addresses of the rows of token positions ``starts`` in the keys and values of each layer: int64
        [2 * layers * starts]. Raises IndexError if a layer or block is out of range."""
        size, slabs = self.layout.block_size, slice(2 * layers.start, 2 * layers.stop)
        slab_at, row_bytes = self._slabs
        if not 0 <= layers.start < layers.stop <= len(self.layout.layers):
            raise IndexError(f"layers {layers.start} to {layers.stop} of {len(self.layout.layers)}")
        first = int(starts[0]) // size
        ids = np.asarray(table[first : int(starts[-1]) // size + 1], np.int64)[starts // size - first]
        if ids.min() < 0 or ids.max() >= len(self.raw):
            raise IndexError(f"blocks {ids.min()} to {ids.max()} of {len(self.raw)}")
        inside = slab_at[slabs, None] + row_bytes[slabs, None] * (starts % size)
        return (self.raw.ctypes.data + ids * self.layout.block_bytes + inside).ravel()

    def _sizes(self, counts: Numbers, layers: range) -> Numbers:
        """Return the bytes of runs of ``counts`` rows, in the order of :meth:`_addresses`."""
        return (self._slabs[1][2 * layers.start : 2 * layers.stop, None] * counts).ravel()

    def write(self, table: Table, tokens: range, layers: range, data: Bytes, dtype: KvDtype | None = None) -> None:
        """Invert :meth:`read`: write canonical bytes, elements of ``dtype`` (default: the pool's), into the blocks of
        ``table``. Elements of another type are converted."""
        own = converted(data, dtype or self.layout.dtype, self.layout.dtype)
        rows = _Rows(table, tokens, self.layout.block_size)
        for slab, canonical in self._places(own, rows.tokens, layers):
            rows.copy_in(slab, canonical)

    def _places(self, data: Bytes, tokens: int, layers: range) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield, for the keys and values of each layer and shard, a view of their place in every block ([blocks,
        block_size, row_bytes]) and of their rows in canonical ``data`` ([tokens, row_bytes])."""
        at = 0
        for index in layers:
            if (parts := self._parts.get(index)) is None:
                parts = self._parts[index] = self._parts_of(index)
            for part in parts:
                end = at + part.row_bytes * tokens
                whole, at = data[at:end].reshape(tokens, part.row_bytes), end
                for slab, columns in part.shards:
                    yield slab, whole[:, columns]

    def _parts_of(self, index: int) -> tuple[_LayerRows, _LayerRows]:
        """Return the keys and the values of layer ``index``."""
        layout, layer, inside = self.layout, self.layout.layers[index], self.layout.layer_offsets[index]
        parts = []
        for width in (layer.k_dim, layer.v_dim):
            row_bytes = layer.kv_heads * width * layout.element_bytes
            own, shards = row_bytes // layout.head_shards, []
            for shard in range(layout.head_shards):
                first = shard * layout.shard_bytes + inside
                slab = self.raw[:, first : first + own * layout.block_size]
                shards.append(
                    (slab.reshape(len(self.raw), layout.block_size, own), slice(shard * own, (shard + 1) * own))
                )
            parts.append(_LayerRows(row_bytes, tuple(shards)))
            inside += own * layout.block_size
        return parts[0], parts[1]


class KvMemory(BlockArray):
    """``blocks`` blocks of ``layout`` in shared memory; :meth:`attach` maps another process's pool read-only.

    ``raw`` are the bytes of the blocks, uint8 [blocks, block_bytes]; ``generations`` is uint64 [blocks].
    """

    kind: Literal["host"] = "host"

    def __init__(self, layout: KvLayout, blocks: int, before_sealing: Callable[[int], None] | None = None) -> None:
        """``before_sealing`` is called with the file's descriptor while other ranks of this worker can still map it
        writable (:meth:`join`)."""
        self.fd, self._mmap = _sealed(_bytes_of(layout, blocks)[1], before_sealing)
        self._view(layout, blocks)

    @classmethod
    def join(cls, fd: int, layout: KvLayout, blocks: int) -> KvMemory:
        """Map the pool of this worker's rank 0 writable, before it is sealed, and own the descriptor from here on.
        ValueError if its size is wrong."""
        memory = cls.__new__(cls)
        memory.fd = fd
        if os.fstat(fd).st_size != _bytes_of(layout, blocks)[1]:
            os.close(fd)
            raise ValueError("the pool's size does not match its layout")
        memory._mmap = mmap.mmap(fd, _bytes_of(layout, blocks)[1], mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        memory._view(layout, blocks)
        return memory

    @classmethod
    def attach(cls, fd: int, layout: KvLayout, blocks: int) -> KvMemory:
        """Map the pool of a received file descriptor read-only, and own the descriptor from here on.

        Raises ValueError if its size is wrong or may still change (a read beyond the end of the file would be a
        SIGBUS), OSError if it is no memfd.
        """
        memory = cls.__new__(cls)
        memory.fd, memory._mmap = fd, _attached(fd, _bytes_of(layout, blocks)[1])
        memory._view(layout, blocks)
        return memory

    def _view(self, layout: KvLayout, blocks: int) -> None:
        self.blocks = blocks
        offset = _bytes_of(layout, blocks)[0]
        whole: Bytes = np.frombuffer(self._mmap, np.uint8)
        super().__init__(layout, whole[: layout.block_bytes * blocks].reshape(blocks, layout.block_bytes))
        self.generations = whole[offset : offset + 8 * blocks].view(np.uint64)

    @property
    def lost(self) -> bool:
        """Whether the pool's memory is gone; never, since a mapping outlives the pool's owner."""
        return False

    def mark(self) -> None:
        """Return None: the engine's work on host memory ends before its calls do."""

    def generations_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return a copy of the generation words, uint64 [n], of the blocks ``ids`` [n]."""
        return self.generations[ids]

    def populate(self, first: int, last: int) -> None:
        """Pre-fault bytes [first, last) of the pool without changing them, so that a later step has no page faults.
        Raises OSError if memory is short or Linux is older than 5.14."""
        first -= first % _PAGE
        self._mmap.madvise(_MADV_POPULATE_WRITE, first, last - first)

    def close(self) -> None:
        """Unmap the memory. Views of it must not be used afterwards."""
        del self.raw, self.generations, self._parts
        os.close(self.fd)
        self.fd = -1
        try:
            self._mmap.close()
        except BufferError:  # a tensor over the pool is still alive; it unmaps the memory when it is freed
            pass


class GenerationWords:
    """Generation words alone (``array``, uint64 [blocks]) in a sealed memfd, for a pool whose blocks are elsewhere.
    :meth:`attach` maps another process's words read-only."""

    def __init__(self, blocks: int) -> None:
        self.fd, self._mmap = _sealed(_words_bytes(blocks))
        self._view(blocks)

    @classmethod
    def attach(cls, fd: int, blocks: int) -> GenerationWords:
        """Map the words of a received descriptor, and own the descriptor from here on; raises as
        :meth:`KvMemory.attach`."""
        words = cls.__new__(cls)
        words.fd, words._mmap = fd, _attached(fd, _words_bytes(blocks))
        words._view(blocks)
        return words

    def _view(self, blocks: int) -> None:
        self.array: npt.NDArray[np.uint64] = np.frombuffer(self._mmap, np.uint64, blocks)

    def close(self) -> None:
        """Unmap the words. Views of them must not be used afterwards."""
        del self.array
        os.close(self.fd)
        self.fd = -1
        try:
            self._mmap.close()
        except BufferError:  # a view is still alive; it unmaps the memory when it is freed
            pass


def _words_bytes(blocks: int) -> int:
    return -(-blocks * 8 // _PAGE) * _PAGE


def _sealed(size: int, before_sealing: Callable[[int], None] | None = None) -> tuple[int, mmap.mmap]:
    """Return a new sealed memfd of ``size`` bytes, which can be written only through this mapping, and through those
    that ``before_sealing`` lets others make."""
    fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    if before_sealing is not None:
        before_sealing(fd)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd, mapping


def _attached(fd: int, size: int) -> mmap.mmap:
    """Map a received memfd of ``size`` bytes read-only. If it is none, or its size may still change, the descriptor is
    closed and ValueError or OSError is raised."""
    try:
        if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the shared pool is not sealed")
        if os.fstat(fd).st_size != size:
            raise ValueError("the shared pool's size does not match its layout")
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except BaseException:
        os.close(fd)
        raise


class _Rows:
    """A token range of a table: a partial head block, whole blocks and a partial tail block, any of which may be
    missing."""

    def __init__(self, table: Table, tokens: range, block_size: int) -> None:
        self.tokens = len(tokens)
        first, last = tokens.start, tokens.stop
        whole_first, whole_last = -(-first // block_size), last // block_size
        self.edges: list[tuple[int, int, int, int]] = []  # (block, first row in it, rows, row in the canonical range)
        if whole_first > whole_last:  # all inside one block
            self.edges.append((table[first // block_size], first % block_size, last - first, 0))
            whole_last = whole_first
        else:
            if head := whole_first * block_size - first:
                self.edges.append((table[whole_first - 1], block_size - head, head, 0))
            if tail := last - whole_last * block_size:
                self.edges.append((table[whole_last], 0, tail, whole_last * block_size - first))
        self.whole: slice | npt.NDArray[np.intp] | None = None
        """The whole blocks; as a slice, which is one copy, if they are adjacent."""
        self.inner = slice(whole_first * block_size - first, whole_last * block_size - first)
        """The rows of the whole blocks in the canonical range."""
        if whole_first < whole_last:
            whole = table[whole_first:whole_last]
            blocks: list[int] = whole.tolist() if isinstance(whole, np.ndarray) else [*whole]
            run = range(blocks[0], blocks[0] + len(blocks))
            self.whole = slice(run.start, run.stop) if blocks == [*run] else np.array(blocks, np.intp)

    def copy_out(self, slab: Bytes, out: Bytes) -> None:
        if self.whole is not None:
            out[self.inner].reshape(-1, *slab.shape[1:])[:] = slab[self.whole]
        for block, row, count, at_row in self.edges:
            out[at_row : at_row + count] = slab[block, row : row + count]

    def copy_in(self, slab: Bytes, data: Bytes) -> None:
        if self.whole is not None:
            slab[self.whole] = data[self.inner].reshape(-1, *slab.shape[1:])
        for block, row, count, at_row in self.edges:
            slab[block, row : row + count] = data[at_row : at_row + count]


class _LayerRows(NamedTuple):
    """The keys or the values of one layer: bytes of a canonical row, and per shard a view of its place in every block
    ([blocks, block_size, bytes of its row]) and its columns of a canonical row."""

    row_bytes: int
    shards: tuple[tuple[Bytes, slice], ...]
