"""How many bytes a checkpoint's weights take in memory, from the tables of its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.checkpoint.formats import WeightFormat, bits_of

if TYPE_CHECKING:
    from common.checkpoint.gguf import GgufTensor

_FLOATS = {"F64", "F32", "F16", "BF16"}
GGUF_BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 8.5, "Q5_1": 9.0, "Q8_0": 8.5, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5,
    "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625, "Q5_K": 8.625, "Q6_K": 8.5625,
}  # fmt: skip
"""Bits per weight of types that are kept as they are, with their scales; codes of 5 and 6 bits take 8."""
EXPANDED_BITS = 8.5
"""Bits per weight of all other types."""
_ROUNDED_BITS = {4: 4 + 24 / 64, 8: 8 + 16 / 64}
"""Bits per weight of matrices that are rounded at load, in groups of 64."""
_WIDENED = {2: 2.0, 3: 4 / 3, 5: 8 / 5, 6: 8 / 6, 7: 8 / 7}
"""By how much codes grow that take 4 or 8 bits in memory."""


@dataclass(frozen=True)
class Sizes:
    """Weights in memory: bytes of ``quantized`` matrices, and the number of ``floats``, which take the type of the
    computation."""

    quantized: int
    floats: int

    def bytes_in(self, element_bytes: int) -> int:
        """Return the bytes with elements of ``element_bytes``."""
        return self.quantized + self.floats * element_bytes


def sizes_of_gguf(tensors: Iterable[GgufTensor]) -> Sizes:
    """Return the sizes of the tensors of a GGUF file."""
    from gguf.constants import GGMLQuantizationType

    bits, floats = 0.0, 0
    for tensor in tensors:
        count, kind = math.prod(tensor.shape), GGMLQuantizationType(tensor.type).name
        if kind in _FLOATS:
            floats += count
        else:
            bits += count * GGUF_BITS.get(kind, EXPANDED_BITS)
    return Sizes(round(bits / 8), floats)


def sizes_of_safetensors(headers: Iterable[Mapping[str, Mapping[str, Any]]], weights: WeightFormat) -> Sizes:
    """Return the sizes of the tensors of safetensors files with these headers: what is no float is quantized."""
    quantized, floats = 0.0, 0
    for header in headers:
        for name, entry in header.items():
            if entry["dtype"] in _FLOATS:
                floats += math.prod(entry["shape"])
            else:
                first, last = entry["data_offsets"]
                is_packed = not name.endswith(".weight")
                quantized += (last - first) * (_WIDENED.get(bits_of(weights.settings, name), 1) if is_packed else 1)
    return Sizes(round(quantized), floats)


def rounded(headers: Iterable[Mapping[str, Mapping[str, Any]]], bits: int, tied: bool) -> Sizes:
    """Return the sizes of an unquantized checkpoint whose matrices are rounded to ``bits`` at load; an embedding is not
    unless it is the output layer, too."""
    quantized, floats = 0.0, 0
    for header in headers:
        for name, entry in header.items():
            count = math.prod(entry["shape"])
            if len(entry["shape"]) < 2 or ("embed" in name and not tied):
                floats += count
            else:
                quantized += count * _ROUNDED_BITS[bits] / 8
    return Sizes(round(quantized), floats)
