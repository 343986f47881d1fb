"""Canonical KV bytes from one element type to another, as a receiver places what another type's owner computed.

Pure numpy, which has no bfloat16: it is the upper half of a float32, so that 16 bits are moved. Into a wider range and
precision conversion is exact; else it rounds to nearest, ties to even (IEEE 754), and what is too large for the target
becomes an infinity. A NaN stays one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.kv.layout import KvDtype

Bytes = npt.NDArray[np.uint8]
_INFINITY = np.uint32(0x7F80_0000)
_QUIET = np.uint32(0x0040)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_BELOW_HALF = np.uint32(0x7FFF)


def converted(data: Bytes, source: KvDtype, target: KvDtype) -> Bytes:
    """``data``, uint8 [elements of ``source``], as uint8 [the same elements in ``target``]; itself if they are one."""
    return data if source == target else _from_float32(_to_float32(data, source), target)


def _to_float32(data: Bytes, source: KvDtype) -> npt.NDArray[np.float32]:
    if source == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(source).astype(np.float32, copy=False)


def _from_float32(values: npt.NDArray[np.float32], target: KvDtype) -> Bytes:
    if target == "bfloat16":
        return _upper_halves(values.view(np.uint32)).view(np.uint8)
    if target == "float32":
        return values.view(np.uint8)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # what they warn of is what is meant
        return values.astype(target, copy=False).view(np.uint8)


def _upper_halves(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Float32 bit patterns rounded to bfloat16 ones. A carry out of the mantissa raises the exponent, as it should; for
    a NaN it must not, and the bits that make it one may lie in the lower half, so it gets a bit in the upper."""
    upper = bits >> 16
    rounded = (bits + _BELOW_HALF + (upper & 1)) >> 16
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    if is_nan.any():
        rounded = np.where(is_nan, upper | _QUIET, rounded)
    return rounded.astype(np.uint16)
