"""Numbers of 4 and 8 bits that several formats share: floats e2m1 and exponents e8m0."""

from __future__ import annotations

import torch

FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the float4 e2m1 numbers, by their bits."""


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return ``2 ** (exponent - 128)`` of uint8 exponents in bfloat16, which holds all of them exactly."""
    wide = exponents.int()
    bits = torch.where(wide < 2, 0x20 << wide.clamp(max=1), (wide - 1).clamp(min=0) << 7)
    return bits.to(torch.int16).view(torch.bfloat16)
