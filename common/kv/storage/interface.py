"""What the engine needs of the KV pool's memory, wherever it lies.

:class:`common.kv.storage.tensors.KvStore` is the one in shared host memory. Must not know the holders of blocks, nor
how KV gets to other workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout
from common.kv.storage.fp8 import Fp8Codec


class KvStorage(Protocol):
    """Keys and values of every layer in ``blocks`` blocks of ``layout``, as tensors of ``dtype`` on ``device``.

    A pool in fp8 has a ``codec``: :meth:`write` takes and :meth:`gather` returns the model's own dtype, while :meth:`k`
    and :meth:`v` are float8 in units of the codec's scales.

    On a GPU every method only enqueues work on the current stream.
    """

    layout: KvLayout
    dtype: torch.dtype
    device: torch.device
    blocks: int
    codec: Fp8Codec | None
    memory: Any
    """What hand-offs need of the pool; the engine does not look at it."""

    def k(self, layer: int) -> torch.Tensor:
        """Return the keys of ``layer``, [blocks, block_size, kv_heads, k_dim]."""

    def v(self, layer: int) -> torch.Tensor:
        """Return the values of ``layer``, [blocks, block_size, kv_heads, v_dim]."""

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Store the rows of one step: ``key`` [T, kv_heads, k_dim] and ``value`` [T, kv_heads, v_dim]. ``slots`` are
        the block id and the offset in the block of each row, int64 [T] both, on ``device``."""

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of whole ``blocks`` (int64 [n], on ``device``), [n * block_size,
        kv_heads, dim] each."""

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, all layers, in the order given."""

    def clear(self, blocks: Iterable[int]) -> None:
        """Zero whole blocks."""

    def close(self) -> None:
        """Free the memory; the tensors must not be used afterwards."""


def computed_dtype(store: KvStorage) -> torch.dtype:
    """Return the type in which the model computes over ``store``: that of queries and of the outputs of attention."""
    return store.dtype if store.codec is None else store.codec.computed
