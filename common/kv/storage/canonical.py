"""Copies between a pool on a GPU and canonical KV on the same GPU, for hand-offs.

:class:`common.kv.storage.host.BlockArray` does the same for host memory; the bytes are equal.
"""

from __future__ import annotations

import math

import torch

from common.kernels.triton import canonical as kernels
from common.kv.layout import KvLayout
from common.kv.storage.base import Table


class CanonicalCopies:
    """Copies for the pool ``raw`` (uint8 [blocks, block_bytes], on the device), whose blocks have ``layout``."""

    def __init__(self, layout: KvLayout, raw: torch.Tensor) -> None:
        self.layout, self._raw = layout, raw
        self._parts: dict[range, torch.Tensor] = {}
        widths = [byte for layer in range(len(layout.layers)) for part in self._rows(layer) for byte in part]
        self._unit = math.gcd(8, *widths)
        self._units = raw.view(kernels.UNITS[self._unit])

    def read(self, table: Table, tokens: range, layers: range, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the canonical bytes of token positions ``tokens`` (not empty) and ``layers`` of the sequence in
        ``table``, uint8 on the device, written by the current stream. With ``out`` (uint8 of exactly that size) they
        are written there."""
        size = self.layout.range_bytes(layers.start, layers.stop, len(tokens))
        buffer = torch.empty(size, dtype=torch.uint8, device=self._raw.device) if out is None else out
        self._copy(table, tokens, layers, buffer, gather=True)
        return buffer

    def write(self, table: Table, tokens: range, layers: range, data: torch.Tensor) -> None:
        """Invert :meth:`read`: write canonical bytes ``data`` (uint8 on the device, elements of the pool's type) into
        the blocks of ``table``."""
        self._copy(table, tokens, layers, data, gather=False)

    def _copy(self, table: Table, tokens: range, layers: range, data: torch.Tensor, gather: bool) -> None:
        first = tokens.start // self.layout.block_size
        blocks = torch.tensor(
            [int(block) for block in table[first : self.layout.blocks_for(tokens.stop)]], dtype=torch.int32
        ).to(self._raw.device)
        inside = range(tokens.start - first * self.layout.block_size, tokens.stop - first * self.layout.block_size)
        units = data.view(kernels.UNITS[self._unit])
        kernels.copy(self._units, units, blocks, self._parts_of(layers), inside, self.layout.block_size, gather)

    def _rows(self, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return, for the keys and the values of a layer, the offset of its part in a shard and the bytes of its row in
        that shard."""
        layout, layer, at = self.layout, self.layout.layers[index], self.layout.layer_offsets[index]
        keys, values = (
            layer.kv_heads // layout.head_shards * width * layout.element_bytes for width in (layer.k_dim, layer.v_dim)
        )
        return (at, keys), (at + keys * layout.block_size, values)

    def _parts_of(self, layers: range) -> torch.Tensor:
        """Return the parts of ``layers`` as :func:`common.kernels.triton.canonical.copy` takes them."""
        if (found := self._parts.get(layers)) is None:
            shards, rows, before = self.layout.head_shards, [], 0
            for layer in layers:
                for at, width in self._rows(layer):
                    for shard in range(shards):
                        inside = shard * self.layout.shard_bytes + at
                        rows.append((inside, width, before, width * shards, shard * width))
                    before += width * shards
            found = torch.tensor(rows, dtype=torch.int64).div(self._unit, rounding_mode="floor").to(self._raw.device)
            self._parts[layers] = found
        return found
