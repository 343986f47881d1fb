"""The KV pool as one tensor on any device, with writes and copies in plain torch.

It is what every device can do; tests run it on the CPU and on torch's meta device. Must not know the holders of blocks,
nor how KV gets to other workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout
from common.kv.storage.tensors import DTYPES, layer_views


class SlabStore:
    """``blocks`` zeroed blocks of ``layout`` on ``device``, block-major as :mod:`common.kv.layout` says."""

    def __init__(self, layout: KvLayout, blocks: int, device: torch.device) -> None:
        self.layout, self.blocks, self.device = layout, blocks, device
        self.dtype = DTYPES[layout.dtype]
        self.memory: Any = None  # no hand-off reads or writes it
        self.slab = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self._k, self._v = layer_views(self.slab.view(-1).view(self.dtype), layout, blocks, 0)

    def k(self, layer: int) -> torch.Tensor:
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._v[layer]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self._k[layer].index_put_(slots, key)
        self._v[layer].index_put_(slots, value)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self._k[layer].index_select(0, blocks).flatten(0, 1),
            self._v[layer].index_select(0, blocks).flatten(0, 1),
        )

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for source, target in copies:
            self.slab[target].copy_(self.slab[source])

    def clear(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.slab[block].zero_()

    def close(self) -> None:
        self._k, self._v = [], []
        del self.slab
