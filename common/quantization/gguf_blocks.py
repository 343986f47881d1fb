"""Blocks of GGUF tensors as quantized weights, exactly.

A row of a tensor is a run of blocks of 32 or 256 elements. A reader takes the blocks of a matrix, uint8
[out, blocks, bytes per block], and returns its weight; the layouts are those of ggml-quants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from common.quantization.floats import FP4_VALUES, power_of_two
from common.quantization.packing import pack_nibbles
from common.quantization.weight import QuantizedWeight, concatenate, requantize

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
"""ggml types of plain numbers."""
_EXPANDED = frozenset("IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S TQ1_0 TQ2_0 NVFP4 Q1_0".split())
"""Types that are dequantized and rounded to 8 bits."""
_CHUNK = 1 << 22
"""Elements that are dequantized at a time."""


def weight_of(kind: int, data: torch.Tensor, shape: tuple[int, int]) -> QuantizedWeight:
    """Return the weight [out, in] in the blocks ``data``, uint8 [bytes], of ggml type ``kind``.

    Raises ValueError if there is no reader for the type, or if a scale is not finite.
    """
    name = type_name(kind)
    if (reader := READERS.get(name)) is None:
        if not is_expanded(kind):
            raise ValueError(f"weights of type {name} are not read")
        return _expand(kind, data, shape)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    weight = reader(data.view(shape[0], -1, size))
    scales = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in scales):
        raise ValueError("it has scales that are not finite numbers")
    return replace(weight, source=name)


def type_name(kind: int) -> str:
    """Return ggml's name of a type."""
    return GGMLQuantizationType(kind).name


def is_expanded(kind: int) -> bool:
    """Return whether :func:`weight_of` rounds weights of this type to 8 bits, instead of keeping them exactly."""
    return type_name(kind) in _EXPANDED


def numbers_of(kind: int, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of any type as plain numbers: in its own type if it is not quantized, else in float32."""
    if (dtype := FLOATS.get(kind)) is not None:
        return data.view(dtype).view(shape)
    return _dequantized(kind, data).view(shape)


def _dequantized(kind: int, data: torch.Tensor) -> torch.Tensor:
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    blocks: npt.NDArray[np.uint8] = data.view(-1, size).numpy()
    try:
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType(kind)))
    except NotImplementedError as error:
        raise ValueError(f"weights of type {type_name(kind)} are not read") from error


def _expand(kind: int, data: torch.Tensor, shape: tuple[int, int]) -> QuantizedWeight:
    """Dequantize and round to 8 bits, some rows at a time."""
    rows, bytes_of_row = max(1, _CHUNK // shape[1]), data.numel() // shape[0]
    parts = []
    for at in range(0, shape[0], rows):
        some = data[at * bytes_of_row : (at + rows) * bytes_of_row]
        parts.append(requantize(_dequantized(kind, some).view(-1, shape[1]), type_name(kind)))
    joined = concatenate(parts)
    assert joined is not None
    return joined


# -- types ------------------------------------------------------------------------------------------------------------
# b: blocks, uint8 [out, blocks, bytes]


def _half(b: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at byte ``at`` of each block, [out, blocks]."""
    return b[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def _planes(x: torch.Tensor, fields: int, width: int) -> torch.Tensor:
    """Return the ``fields`` bit fields of ``width`` bits of the bytes ``x`` [..., n] as [..., fields * n]: the lowest
    field of all bytes first."""
    mask = (1 << width) - 1
    return torch.cat([x >> at * width & mask for at in range(fields)], -1)


def _spread(b: torch.Tensor, at: int) -> torch.Tensor:
    """Return the 32 bits at byte ``at`` of each block as bytes of 0 or 1, [out, blocks, 32]."""
    bits = torch.arange(8, dtype=torch.uint8)
    return (b[:, :, at : at + 4, None] >> bits & 1).flatten(2)


def _weight(
    b: torch.Tensor, bits: Literal[4, 8], codes: torch.Tensor, scales: torch.Tensor, group: int = 32, **more: Any
) -> QuantizedWeight:
    """Return a weight of ``codes`` that are as the layout has them, [out, blocks, bytes per block]."""
    flat = codes.reshape(b.shape[0], -1)
    shape = (flat.shape[0], flat.shape[1] * 8 // bits)
    return QuantizedWeight(shape, bits, group, flat.contiguous(), scales.contiguous(), **more)


def _four(b: torch.Tensor, codes: torch.Tensor, group: int) -> torch.Tensor:
    """Pack ``codes`` [out, blocks, elements], one per byte."""
    return pack_nibbles(codes.reshape(b.shape[0], -1), group)


def _q4_0(b: torch.Tensor) -> QuantizedWeight:
    return _weight(b, 4, b[:, :, 2:], _half(b, 0), zero=8, most=15)


def _q4_1(b: torch.Tensor) -> QuantizedWeight:
    return _weight(b, 4, b[:, :, 4:], _half(b, 0), minima=_half(b, 2).contiguous(), most=15)


def _q5_0(b: torch.Tensor) -> QuantizedWeight:
    codes = _planes(b[:, :, 6:], 2, 4) | _spread(b, 2) << 4
    return _weight(b, 8, codes, _half(b, 0), zero=16, most=31)


def _q5_1(b: torch.Tensor) -> QuantizedWeight:
    codes = _planes(b[:, :, 8:], 2, 4) | _spread(b, 4) << 4
    return _weight(b, 8, codes, _half(b, 0), minima=_half(b, 2).contiguous(), most=31)


def _q8_0(b: torch.Tensor) -> QuantizedWeight:
    return _weight(b, 8, b[:, :, 2:] ^ 0x80, _half(b, 0), zero=128)


def _k_scales(b: torch.Tensor) -> dict[str, Any]:
    """Return the scales and minima of Q4_K and Q5_K, eight pairs of 6 bits in 12 bytes per block."""
    first, second, rest = b[:, :, 4:8], b[:, :, 8:12], b[:, :, 12:16]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], 2)
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], 2)
    return {
        "sub_scales": scales.view(torch.int8).flatten(1),
        "minima": -_half(b, 2),
        "sub_minima": minima.flatten(1),
        "span": 8,
    }


def _q4_k(b: torch.Tensor) -> QuantizedWeight:
    runs = b[:, :, 16:].view(*b.shape[:2], 4, 1, 2, 16)  # 32 bytes: a group in the low halves, one in the high halves
    codes = torch.cat([runs & 15, runs >> 4], 3)  # [out, blocks, 4, 2 groups, 2 halves, 16]
    return _weight(b, 4, codes[..., 0, :] | codes[..., 1, :] << 4, _half(b, 0), most=15, **_k_scales(b))


def _q5_k(b: torch.Tensor) -> QuantizedWeight:
    low = _planes(b[:, :, 48:].view(*b.shape[:2], 4, 32), 2, 4).flatten(2)
    codes = low | _planes(b[:, :, 16:48], 8, 1) << 4
    return _weight(b, 8, codes, _half(b, 0), most=31, **_k_scales(b))


def _q6_k(b: torch.Tensor) -> QuantizedWeight:
    low = _planes(b[:, :, :128].view(*b.shape[:2], 2, 64), 2, 4)
    codes = low | _planes(b[:, :, 128:192].view(*b.shape[:2], 2, 32), 4, 2) << 4
    sub = b[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    return _weight(b, 8, codes, _half(b, 208), 16, sub_scales=sub, span=16, zero=32, most=63)


def _q2_k(b: torch.Tensor) -> QuantizedWeight:
    codes = _planes(b[:, :, 16:80].view(*b.shape[:2], 2, 32), 4, 2)
    return _weight(
        b, 4, _four(b, codes, 16), _half(b, 80), 16, minima=-_half(b, 82), span=16, most=3,
        sub_scales=(b[:, :, :16] & 15).view(torch.int8).flatten(1), sub_minima=(b[:, :, :16] >> 4).flatten(1),
    )  # fmt: skip


def _q3_k(b: torch.Tensor) -> QuantizedWeight:
    low = _planes(b[:, :, 32:96].view(*b.shape[:2], 2, 32), 4, 2).flatten(2)
    codes = low | _planes(b[:, :, :32], 8, 1) << 2
    sub = _planes(b[:, :, 96:104], 2, 4) | _planes(b[:, :, 104:108], 4, 2) << 4
    signed = (sub.view(torch.int8) - 32).flatten(1)
    return _weight(b, 4, _four(b, codes, 16), _half(b, 108), 16, sub_scales=signed, span=16, zero=4, most=7)


def _table(values: tuple[int, ...]) -> dict[str, Any]:
    return {"coding": "table", "table": torch.tensor(values, dtype=torch.float32), "most": 15}


def _iq4_nl(b: torch.Tensor) -> QuantizedWeight:
    return _weight(b, 4, b[:, :, 2:], _half(b, 0), **_table(IQ4_VALUES))


def _iq4_xs(b: torch.Tensor) -> QuantizedWeight:
    low = torch.stack([b[:, :, 4:8] & 15, b[:, :, 4:8] >> 4], 3).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = (b[:, :, 2:4, None] >> shifts & 3).flatten(2)
    sub = ((low | high << 4).view(torch.int8) - 32).flatten(1)
    return _weight(b, 4, b[:, :, 8:], _half(b, 0), sub_scales=sub, span=8, **_table(IQ4_VALUES))


def _mxfp4(b: torch.Tensor) -> QuantizedWeight:
    return _weight(b, 4, b[:, :, 1:], power_of_two(b[:, :, 0]), **_table(FP4_VALUES))


READERS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
"""Readers of the types that are kept exactly."""


def size_of(kind: int, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor in a file."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return math.prod(shape) // block * size
