"""The KV pool as one tensor on any device, with writes and copies in plain torch.

It is what every device can do; tests run it on the CPU and on torch's meta device. Must not know the holders of blocks,
nor how KV gets to other workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from common.kernels import triton as triton_kernels
from common.kernels.e4m3 import E4M3, lacks_units
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.tensors import KV_DTYPES, layer_views


class SlabStore:
    """``blocks`` blocks of ``layout`` on ``device``, block-major as :mod:`common.kv.layout` says, and zeroed: what is
    not yet written must be finite.

    They lie in ``slab`` (uint8 [blocks * block_bytes]) if it is given, else in memory of torch. ``memory``, which owns
    the slab and is closed with the store, is what hand-offs need. ``codec``: for a pool in fp8, how numbers become
    bytes and back.
    """

    def __init__(
        self,
        layout: KvLayout,
        blocks: int,
        device: torch.device,
        slab: torch.Tensor | None = None,
        memory: Any = None,
        codec: Fp8Codec | None = None,
    ) -> None:
        self.layout, self.blocks, self.device, self.memory, self.codec = layout, blocks, device, memory, codec
        self.dtype = KV_DTYPES[layout.dtype]
        assert (codec is None) == (layout.dtype != "fp8"), "fp8, and only fp8, needs scales"
        if slab is None:
            slab = torch.empty(blocks * layout.block_bytes, dtype=torch.uint8, device=device)
        self.slab = slab.zero_().view(blocks, layout.block_bytes)
        self._k, self._v = layer_views(self.slab.view(-1).view(self.dtype), layout, blocks, 0)
        self._kernels = _writing_kernels(self.device, layout)
        self.skips_padding = self._kernels is not None
        """Whether :meth:`write` stores nothing for rows of block -1."""

    def k(self, layer: int) -> torch.Tensor:
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._v[layer]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Store the rows of one step. Triton's kernel, which runs on GPUs, stores nothing for rows of block -1, the
        padding of a CUDA graph."""
        codec, keys, values = self.codec, self._k[layer], self._v[layer]
        if self._kernels is not None:
            inverses = None if codec is None else codec.inverses_of(layer)
            self._kernels.write(key, value, keys, values, slots, inverses)
            return
        if codec is not None:
            key, value = codec.encode(layer, key, value)
        _movable(keys).index_put_(slots, _movable(key))
        _movable(values).index_put_(slots, _movable(value))

    def write_rotated(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Norm and rotate ``query`` in place, and store ``value`` and the rotated ``key``, as
        :func:`common.kernels.triton.rotary.rotate_write`. Needs Triton."""
        from common.kernels.triton import rotary

        if self._kernels is None:  # a GPU whose kernels cannot convert fp8
            self.write(layer, rotary.rotate(query, key, angles, norms), value, slots)
            return
        inverses = None if self.codec is None else self.codec.inverses_of(layer)
        rotary.rotate_write(query, key, value, angles, norms, self._k[layer], self._v[layer], slots, inverses)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (
            _movable(part[layer]).index_select(0, blocks).flatten(0, 1).view(self.dtype) for part in (self._k, self._v)
        )
        return (key, value) if self.codec is None else self.codec.decode(layer, key, value)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for source, target in copies:
            self.slab[target].copy_(self.slab[source])

    def clear(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.slab[block].zero_()

    def close(self) -> None:
        self._k, self._v = [], []
        del self.slab
        if self.memory is not None:
            self.memory.close()


def _movable(part: torch.Tensor) -> torch.Tensor:
    """Return ``part``, float8 as bytes: torch has few operators for float8 on GPUs."""
    return part.view(torch.uint8) if part.dtype == E4M3 else part


def _writing_kernels(device: torch.device, layout: KvLayout) -> Any:
    """Return the module of the kernels that write into the pool; None where they cannot run."""
    if triton_kernels.unusable(device.type) is not None or (layout.dtype == "fp8" and lacks_units(device)):
        return None
    from common.kernels.triton import store

    return store
