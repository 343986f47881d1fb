"""The bytes of a paged KV pool in host memory, as a file without a name that other processes may map read-only.

The pool is a sealed memfd: it is gone with its owner even after SIGKILL, and nobody else can get a writable mapping.
Behind the blocks lies one generation word per block, which a reader in another process checks before and after its
copy. Reads and writes here are in the canonical form of :mod:`common.kv.layout` and use numpy only, so that a process
without torch can hold a pool; :mod:`common.kv.store` lays torch tensors over the same bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from common.ids import BlockId
from common.kv.convert import Bytes, converted
from common.kv.layout import KvDtype, KvLayout

Table = Sequence[BlockId] | npt.NDArray[np.int64]
"""Block ids in the order of a sequence's tokens."""
_PAGE = mmap.PAGESIZE
# fcntl.h; F_SEAL_FUTURE_WRITE keeps the owner's own mapping writable and forbids every later one
_F_ADD_SEALS, _F_GET_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1033, 1034, 1, 2, 4, 16
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE


def _bytes_of(layout: KvLayout, blocks: int) -> tuple[int, int]:
    """Offset of the generation words, and the size of the whole file."""
    generations = -(-layout.block_bytes * blocks // _PAGE) * _PAGE
    return generations, generations + -(-blocks * 8 // _PAGE) * _PAGE


class BlockArray:
    """Blocks of ``layout`` in ``raw``, uint8 [blocks, block_bytes], read and written in canonical form."""

    def __init__(self, layout: KvLayout, raw: Bytes) -> None:
        self.layout, self.raw = layout, raw

    def read(self, table: Table, tokens: range, layers: range, out: Bytes | None = None) -> Bytes:
        """Canonical bytes of token positions ``tokens`` of the sequence in ``table``, layers ``layers``; a copy.

        Per layer all keys, then all values. ``out`` is where to put them, if given (exactly that many bytes).
        """
        size = self.layout.range_bytes(layers.start, layers.stop, len(tokens))
        buffer = np.empty(size, np.uint8) if out is None else out
        rows = _Rows(table, tokens, self.layout.block_size)
        for part, canonical in self._parts(buffer, rows, layers):
            part.copy_out(self.raw, rows, canonical)
        return buffer

    def write(self, table: Table, tokens: range, layers: range, data: Bytes, dtype: KvDtype | None = None) -> None:
        """The inverse of :meth:`read`: places canonical bytes into the blocks of ``table``. They are elements of
        ``dtype`` (default: the pool's own) and become the pool's."""
        own = converted(data, dtype or self.layout.dtype, self.layout.dtype)
        rows = _Rows(table, tokens, self.layout.block_size)
        for part, canonical in self._parts(own, rows, layers):
            part.copy_in(self.raw, rows, canonical)

    def _parts(self, data: Bytes, rows: _Rows, layers: range) -> Iterator[tuple[_Part, Bytes]]:
        """Keys and values of each layer and shard, with their rows of canonical ``data``, [tokens, row_bytes] each."""
        layout, at = self.layout, 0
        for index in layers:
            layer, inside = layout.layers[index], layout.layer_offsets[index]
            for width in (layer.k_dim, layer.v_dim):
                row_bytes = layer.kv_heads * width * layout.element_bytes
                part_bytes = row_bytes // layout.head_shards
                whole = data[at : at + row_bytes * rows.tokens].reshape(rows.tokens, row_bytes)
                for shard in range(layout.head_shards):
                    part = _Part(shard * layout.shard_bytes + inside, part_bytes, layout.block_size)
                    yield part, whole[:, shard * part_bytes : (shard + 1) * part_bytes]
                inside += part_bytes * layout.block_size
                at += row_bytes * rows.tokens


class KvMemory(BlockArray):
    """``blocks`` blocks of ``layout`` in shared memory; :meth:`attach` maps another process's pool read-only.

    ``raw`` is the block bytes, shape [blocks, block_bytes] uint8; ``generations`` one uint64 word per block.
    """

    def __init__(self, layout: KvLayout, blocks: int) -> None:
        self.fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _bytes_of(layout, blocks)[1])
        self._map(layout, blocks, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)

    @classmethod
    def attach(cls, fd: int, layout: KvLayout, blocks: int) -> KvMemory:
        """The pool behind a received descriptor (owned from here on), read-only; ValueError if its size is wrong or
        may still change (who reads beyond a file's end dies of SIGBUS), OSError if it is no memory file."""
        memory = cls.__new__(cls)
        memory.fd = fd
        try:
            if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("the shared pool is not sealed")
            if os.fstat(fd).st_size != _bytes_of(layout, blocks)[1]:
                raise ValueError("the shared pool's size does not match its layout")
            memory._map(layout, blocks, mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        return memory

    def _map(self, layout: KvLayout, blocks: int, protection: int) -> None:
        self.layout, self.blocks = layout, blocks
        offset, size = _bytes_of(layout, blocks)
        self._mmap = mmap.mmap(self.fd, size, mmap.MAP_SHARED, protection)
        whole: Bytes = np.frombuffer(self._mmap, np.uint8)
        self.raw = whole[: layout.block_bytes * blocks].reshape(blocks, layout.block_bytes)
        self.generations = whole[offset : offset + 8 * blocks].view(np.uint64)

    @property
    def lost(self) -> bool:
        """Never: a mapping outlives its owner."""
        return False

    def generations_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """A copy of the generation words of these blocks."""
        return self.generations[ids]

    def close(self) -> None:
        """Unmaps; views must not be used afterwards."""
        del self.raw, self.generations
        os.close(self.fd)
        self.fd = -1
        try:
            self._mmap.close()
        except BufferError:  # a tensor over the pool is still alive; the mapping goes with it
            pass


class _Rows:
    """A token range of a table: a partial head block, whole blocks, a partial tail block (each may be missing)."""

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
        self.whole = np.asarray(table[whole_first:whole_last], np.intp)
        self.whole_at = whole_first * block_size - first
        count = len(self.whole)
        start = int(self.whole[0]) if count else 0
        self.run = (
            slice(start, start + count)
            if count and int(self.whole[-1]) - start == count - 1 and bool((np.diff(self.whole) == 1).all())
            else None
        )


class _Part:
    """Keys or values of one layer in one shard: where they lie in a block."""

    def __init__(self, offset: int, row_bytes: int, block_size: int) -> None:
        self.offset, self.row_bytes, self.block_size = offset, row_bytes, block_size

    def _slab(self, raw: Bytes) -> Bytes:
        """The part in every block, [blocks, block_size, row_bytes]."""
        slab = raw[:, self.offset : self.offset + self.row_bytes * self.block_size]
        return slab.reshape(len(raw), self.block_size, self.row_bytes)

    def _whole(self, canonical: Bytes, rows: _Rows) -> Bytes:
        """The rows of whole blocks, [whole blocks, block_size, row_bytes]; a view like all the others."""
        count = len(rows.whole)
        inner = canonical[rows.whole_at : rows.whole_at + count * self.block_size]
        return inner.reshape(count, self.block_size, self.row_bytes)

    def copy_out(self, raw: Bytes, rows: _Rows, out: Bytes) -> None:
        slab = self._slab(raw)
        if len(rows.whole):
            self._whole(out, rows)[:] = slab[rows.run] if rows.run is not None else slab[rows.whole]
        for block, row, count, at_row in rows.edges:
            out[at_row : at_row + count] = slab[block, row : row + count]

    def copy_in(self, raw: Bytes, rows: _Rows, data: Bytes) -> None:
        slab = self._slab(raw)
        if len(rows.whole):
            slab[rows.run if rows.run is not None else rows.whole] = self._whole(data, rows)
        for block, row, count, at_row in rows.edges:
            slab[block, row : row + count] = data[at_row : at_row + count]


def host_id() -> str:
    """Equal for processes that can share memory: same boot, same IPC and network namespaces, same user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = ":".join(os.readlink(f"/proc/self/ns/{space}") for space in ("ipc", "net"))
    return f"{boot}/{spaces}/{os.getuid()}"
