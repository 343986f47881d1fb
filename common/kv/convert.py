"""Converts canonical KV bytes between element types, for hand-offs between workers with different KV dtypes.

Uses numpy alone, which has no bfloat16: a bfloat16 is the upper half of a float32. Conversion to a type with at least
the same range and precision is exact; else values are rounded to nearest, ties to even (IEEE 754), and values too large
for the target become infinite. A NaN stays a NaN. fp8 is not converted, since its bytes mean nothing without the scales
of their heads: workers that share a model either all store it or none does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.kv.layout import KvDtype, converts

Bytes = npt.NDArray[np.uint8]
_INFINITY = np.uint32(0x7F80_0000)
_QUIET = np.uint32(0x0040)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_BELOW_HALF = np.uint32(0x7FFF)


def converted(data: Bytes, source: KvDtype, target: KvDtype) -> Bytes:
    """Convert elements of type ``source`` to ``target``; both as flat uint8. Returns ``data`` itself if the types are
    the same. Raises ValueError unless :func:`common.kv.layout.converts`."""
    if not converts(source, target):
        raise ValueError(f"KV in {source} cannot be stored as {target}: fp8 has scales that others do not know")
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
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # overflow to infinity is intended
        return values.astype(target, copy=False).view(np.uint8)


def _upper_halves(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Round float32 bit patterns to bfloat16 ones.

    A carry out of the mantissa correctly raises the exponent, except for a NaN. A NaN is truncated instead, with its
    quiet bit set, since its nonzero mantissa bits may all lie in the lower half.
    """
    upper = bits >> 16
    rounded = (bits + _BELOW_HALF + (upper & 1)) >> 16
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    if is_nan.any():
        rounded = np.where(is_nan, upper | _QUIET, rounded)
    return rounded.astype(np.uint16)
