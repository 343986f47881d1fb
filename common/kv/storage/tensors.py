"""Torch tensors over the shared bytes of a KV pool.

They are views of the block-major layout of :mod:`common.kv.layout`: nothing is copied or touched at start, so pages of
blocks that were never used cost no memory. Must not know the holders of blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from common.kernels import cpu
from common.kernels.e4m3 import E4M3
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.host import KvMemory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types in which models compute, by name."""
KV_DTYPES = {**DTYPES, "fp8": E4M3}
"""Types in which pools store KV, by name."""


class KvStore:
    """Keys and values of every layer as strided views [blocks, block_size, kv_heads, dim], in the pool's element type.
    In a pool with several shards they cover shard ``shard``, and ``kv_heads`` counts the heads in it. ``codec``: for a
    pool in fp8, how numbers become bytes and back."""

    def __init__(self, memory: KvMemory, shard: int = 0, codec: Fp8Codec | None = None) -> None:
        self.memory, self.codec = memory, codec
        self.layout: KvLayout = memory.layout
        self.dtype = KV_DTYPES[self.layout.dtype]
        self.device, self.blocks = torch.device("cpu"), memory.blocks
        self._bytes = torch.from_numpy(memory.raw)
        flat = self._bytes.view(-1).view(self.dtype)
        self._k, self._v = layer_views(flat, self.layout, memory.blocks, shard)
        assert (codec is None) == (self.dtype is not E4M3), "fp8, and only fp8, needs scales"
        self._native = [] if codec else [native_layer(k, v) for k, v in zip(self._k, self._v, strict=True)]

    def k(self, layer: int) -> torch.Tensor:
        """Return the keys of ``layer``, [blocks, block_size, kv_heads, k_dim]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Return the values of ``layer``, [blocks, block_size, kv_heads, v_dim]."""
        return self._v[layer]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Store the rows of one step: ``key`` [T, kv_heads, k_dim] and ``value`` [T, kv_heads, v_dim].

        ``slots`` are the block id and the offset in the block of each row, int64 [T] both.
        """
        if self.codec is not None:
            key, value = self.codec.encode(layer, key, value)
        library = cpu.library()
        if library is None or not (
            self._native and self._lies_as_here(key, self._k[layer]) and self._lies_as_here(value, self._v[layer])
        ):
            self._k[layer].index_put_(slots, key)
            self._v[layer].index_put_(slots, value)
            return
        library.store(
            ctypes.addressof(self._native[layer]), key.data_ptr(), value.data_ptr(), key.shape[0],
            key.stride(0), value.stride(0), slots[0].data_ptr(), slots[1].data_ptr(),
        )  # fmt: skip

    def _lies_as_here(self, rows: torch.Tensor, part: torch.Tensor) -> bool:
        """Return whether each row of ``rows`` [T, kv_heads, dim] has the memory layout and type of a row of ``part``,
        as the native store requires."""
        return rows.dtype == self.dtype and rows.stride()[1:] == part.stride()[2:]

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of whole ``blocks`` (int64 [n]), [n * block_size, kv_heads, dim]
        each, those in fp8 in the dtype in which the model computes."""
        key = self._k[layer].index_select(0, blocks).flatten(0, 1)
        value = self._v[layer].index_select(0, blocks).flatten(0, 1)
        return (key, value) if self.codec is None else self.codec.decode(layer, key, value)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, all layers, in the order given."""
        for source, target in copies:
            self._bytes[target].copy_(self._bytes[source])

    def close(self) -> None:
        """Drop the views, so that the memory can be unmapped, and close it."""
        self._k, self._v = [], []
        del self._bytes
        self.memory.close()

    def clear(self, blocks: Iterable[int]) -> None:
        """Zero whole blocks."""
        for block in blocks:
            self._bytes[block].zero_()


def native_layer(keys: torch.Tensor, values: torch.Tensor) -> cpu.Layer:
    """Describe one layer's ``keys`` and ``values`` ([blocks, block_size, kv_heads, dim]) for the native kernels."""
    return cpu.Layer(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        block_bytes=keys.stride(0) * keys.element_size(),
        block_size=keys.shape[1],
        kv_heads=keys.shape[2],
        k_dim=keys.shape[3],
        v_dim=values.shape[3],
        type=cpu.TYPES[keys.dtype],
        element_bytes=keys.element_size(),
    )


def layer_views(
    flat: torch.Tensor, layout: KvLayout, blocks: int, shard: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the key views and the value views of each layer of ``shard``, [blocks, block_size, heads, dim] each, over
    ``flat``, which has all elements of the pool."""
    stride = layout.block_bytes // layout.element_bytes
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for layer, offset in zip(layout.layers, layout.layer_offsets, strict=True):
        at, heads = (shard * layout.shard_bytes + offset) // layout.element_bytes, layer.kv_heads // layout.head_shards
        for dim, views in ((layer.k_dim, keys), (layer.v_dim, values)):
            shape = (blocks, layout.block_size, heads, dim)
            views.append(flat.as_strided(shape, (stride, heads * dim, dim, 1), at))
            at += layout.block_size * heads * dim
    return keys, values
