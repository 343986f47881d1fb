"""Rounds keys and values to float8 e4m3 with the scale of their head when a pool stores them, and back."""

from __future__ import annotations

import torch

from common.kernels.e4m3 import to_e4m3
from common.kv.scales import KvScales


class Fp8Codec:
    """The conversion of one pool on ``device``. ``computed`` is the dtype in which the model computes: numbers are
    returned in it exactly, as it has more bits than e4m3 and scales are powers of two."""

    def __init__(self, scales: KvScales, computed: torch.dtype, device: torch.device) -> None:
        self.scales, self.computed = scales, computed
        self.k, self.v = (
            [torch.tensor(each, device=device)[:, None] for each in column]
            for column in ([layer.k for layer in scales.layers], [layer.v for layer in scales.layers])
        )
        """Scales of each layer, float32 [kv_heads, 1]."""
        self._inverses = [(1 / k, 1 / v) for k, v in zip(self.k, self.v, strict=True)]

    def scales_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of a layer's keys and of its values, float32 [kv_heads, 1]."""
        return self.k[layer], self.v[layer]

    def inverses_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 1 / scale of a layer's keys and of its values, float32 [kv_heads, 1]."""
        return self._inverses[layer]

    def encode(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``key`` and ``value`` [..., kv_heads, dim] as float8."""
        return to_e4m3(key.float() / self.k[layer]), to_e4m3(value.float() / self.v[layer])

    def decode(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Invert :meth:`encode`: return both, [..., kv_heads, dim], in the dtype ``computed``."""
        k, v = key.float() * self.k[layer], value.float() * self.v[layer]
        return k.to(self.computed), v.to(self.computed)
