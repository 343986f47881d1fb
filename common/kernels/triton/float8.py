"""Conversions between float8 e4m3 and float32 within a kernel.

GPUs of compute capability 8.9 and later convert in hardware, where rounding to float8 saturates. Triton's interpreter
holds float8 as bytes and rounds it wrongly, so there the conversions are made of integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.kernels.triton import INTERPRETED

BY_BITS = tl.constexpr(INTERPRETED)
NAN, LARGEST = tl.constexpr(0x7F), tl.constexpr(0x7E)
"""Codes without their sign; the largest number is 448."""
_REBIAS = tl.constexpr(2.0**120)
"""Moves an exponent with float32's bias of 127 to float8's bias of 7."""
_ULP_IS_LEAST = tl.constexpr(2.0**14)
"""A float32 whose last bit is worth 2**-9, the smallest number of float8."""


@triton.jit
def widened(x):
    """Return the tile ``x`` of float8 as float32, by its bits."""
    code = x.to(tl.uint8, bitcast=True).to(tl.int32)
    size = code & 0x7F
    number = (size << 20).to(tl.float32, bitcast=True) * _REBIAS
    number = tl.where(size == NAN, float("nan"), number)
    return tl.where(code == size, number, -number)


@triton.jit
def narrowed(x):
    """Return the float32 tile ``x`` rounded to the nearest float8, ties to even. What is larger than 448 in magnitude
    becomes 448; NaN stays NaN."""
    if BY_BITS:
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
        normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3)
        subnormal = (tl.abs(x) + _ULP_IS_LEAST).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < 121 << 23, subnormal, normal), LARGEST)
        code = tl.where(bits & 0x7FFFFFFF > 0x7F800000, NAN, code) | (bits >> 24 & 0x80)
        narrow = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        narrow = x.to(tl.float8e4nv)
    return narrow
