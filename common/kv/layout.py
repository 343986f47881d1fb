"""The byte layout of keys and values in a block.

Pure. A pool is block-major: ``[block][shard][layer][k, then v]``, each part ``[token in block][kv head][head dim]``. A
shard holds an equal, contiguous share of each layer's heads, that of one tensor-parallel rank; most pools have one
shard. Layers may differ in heads and head sizes, and k and v may differ in head size (DeepSeek V3). The canonical form
on the wire has neither blocks nor shards: ``[layer][k, then v][token][kv head][head dim]``, in the sender's element
type.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

KvDtype = Literal["float32", "bfloat16", "float16", "fp8"]
"""Element types of KV. fp8 is float8 e4m3 in units of its head's scale (:mod:`common.kv.scales`); models do not compute
in it."""
ELEMENT_BYTES: dict[KvDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
CHAIN_STEP = 16
"""Tokens per link of the prefix hash chain; every block size is a multiple of it."""


def converts(source: KvDtype, target: KvDtype) -> bool:
    """Return whether KV of element type ``source`` can be stored as ``target``: fp8 means nothing without the scales of
    its heads, which only pools in fp8 have."""
    return source == target or "fp8" not in (source, target)


@dataclass(frozen=True)
class LayerLayout:
    """The KV shape of one layer: ``kv_heads`` heads with ``k_dim`` key and ``v_dim`` value elements each."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def elements(self) -> int:
        """Elements per token, k and v together."""
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True)
class KvLayout:
    """The KV layout of a whole model: its layers, element type, tokens per block, and shards per block. Raises
    ValueError for a combination that is impossible."""

    layers: tuple[LayerLayout, ...]
    dtype: KvDtype
    block_size: int
    head_shards: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
        if self.block_size <= 0 or self.block_size % CHAIN_STEP:
            raise ValueError(f"block size {self.block_size} is not a positive multiple of {CHAIN_STEP}")
        if self.head_shards <= 0 or any(layer.kv_heads % self.head_shards for layer in self.layers):
            heads = sorted({layer.kv_heads for layer in self.layers})
            raise ValueError(f"{heads} KV heads cannot be split into {self.head_shards} equal shards")

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token, over all layers."""
        return self.element_bytes * sum(layer.elements for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers and shards."""
        return self.token_bytes * self.block_size

    @property
    def shard_bytes(self) -> int:
        """Bytes of one shard of a block."""
        return self.block_bytes // self.head_shards

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Byte offset of each layer in a shard."""
        offsets, total = [], 0
        for layer in self.layers:
            offsets.append(total)
            total += layer.elements * self.element_bytes * self.block_size // self.head_shards
        return tuple(offsets)

    def one_shard(self) -> KvLayout:
        """Return the layout of a pool that holds a single shard of these blocks."""
        layers = tuple(replace(layer, kv_heads=layer.kv_heads // self.head_shards) for layer in self.layers)
        return replace(self, layers=layers, head_shards=1)

    def range_bytes(self, first_layer: int, last_layer: int, tokens: int) -> int:
        """Return the canonical size in bytes of ``tokens`` tokens in layers ``[first_layer, last_layer)``."""
        return tokens * self.element_bytes * sum(layer.elements for layer in self.layers[first_layer:last_layer])

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the layer shapes, 16 hexadecimal digits. Two layouts with equal hashes have the same canonical form
        but for the element type, whatever their block sizes and shards."""
        text = "".join(f"|{x.kv_heads},{x.k_dim},{x.v_dim}" for x in self.layers)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
