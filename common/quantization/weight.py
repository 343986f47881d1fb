"""A weight in groups of 8-bit or 4-bit codes: what all readers of quantized checkpoints produce and all products take.

Groups run along the columns, so rows can be chosen, ordered and joined exactly. Scales per row, per tensor or per block
of a checkpoint are repeated for each group. Formats with two levels of scales keep both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch

from common.quantization.packing import pack_nibbles, unpack_nibbles

Coding = Literal["int", "e4m3", "table"]
GROUPS = (128, 64, 32, 16)
"""Columns that a group can have."""
EXPANDED = ", expanded to 8 bits"
"""How ``source`` ends of a weight that was dequantized and rounded again."""
_PER_ROW = ("codes", "scales", "zeros", "minima", "sub_scales", "sub_minima")
_CHUNK = 1 << 19
"""Elements that are rounded at a time: few enough that the float32 copies stay in a core's cache."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight [out, in]. Element (n, k) is ``value(code) * scale(n, k // group) + minimum(n, k // group)``, where the
    value of a code is ``code - zero`` ("int"), the float8 with these bits ("e4m3"), or ``table[code]`` ("table").

    Columns are padded with zero weights to a multiple of ``group``; a weight with minima has no padding. Raises
    ValueError if the shapes do not fit together.
    """

    shape: tuple[int, int]
    """(out, in) of the model, without padding."""
    bits: Literal[4, 8]
    group: int
    """Columns per group, one of :data:`GROUPS`."""
    codes: torch.Tensor
    """uint8 [out, padded in], of 4 bits [out, padded in / 2] in the order of :func:`pack_nibbles`."""
    scales: torch.Tensor
    """float16, bfloat16 or float32 [out, groups / span]."""
    coding: Coding = "int"
    zero: int = 0
    """Subtracted from every code, if ``zeros`` is None."""
    zeros: torch.Tensor | None = None
    """uint8 [out, groups], subtracted from the codes of each group."""
    minima: torch.Tensor | None = None
    """[out, groups / span] in the type of ``scales``."""
    sub_scales: torch.Tensor | None = None
    """int8 [out, groups]: the scale of group g is ``scales[:, g // span] * sub_scales[:, g]``."""
    sub_minima: torch.Tensor | None = None
    """uint8 [out, groups], with ``minima`` alike."""
    span: int = 1
    """Groups per entry of ``scales`` and ``minima``."""
    table: torch.Tensor | None = None
    """float32 [16], the values of codes of 4 bits."""
    order: torch.Tensor | None = None
    """int32 [padded in]: column j of the codes multiplies column ``order[j]`` of the input."""
    most: int = 255
    """Upper bound of the codes that occur."""
    source: str = ""
    """Format in which the checkpoint has the weight, for messages: "Q4_K", "GPTQ 4-bit"."""

    def __post_init__(self) -> None:
        out, padded = self.codes.shape[0], self.codes.shape[1] * 8 // self.bits
        groups = padded // self.group
        coarse, fine = (out, groups // self.span), (out, groups)
        wanted = {"scales": coarse, "minima": coarse, "zeros": fine, "sub_scales": fine, "sub_minima": fine,
                  "order": (padded,), "table": (16,)}  # fmt: skip
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}")
        padding = padded - self.shape[1]
        fits = self.group in GROUPS and padded % (self.group * self.span) == 0 and 0 <= padding < self.group
        if not fits or self.shape[0] != out or (padding and self.minima is not None):
            raise ValueError(f"{list(self.codes.shape)} codes in groups of {self.group} are no {list(self.shape)}")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.codes.shape[1] * 8 // self.bits // self.group

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of their fields, without absent ones."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [out, in] in ``dtype``, computed in float32, with the columns in the order of the input."""
        out, groups = self.codes.shape[0], self.groups
        values = self._values().view(out, groups, self.group) * self._scales()[:, :, None]
        if self.minima is not None:
            minima = self._per_group(self.minima)
            values += (minima if self.sub_minima is None else minima * self.sub_minima)[:, :, None]
        flat = values.view(out, groups * self.group)
        if self.order is not None:
            flat = torch.empty_like(flat).index_copy_(1, self.order.long(), flat)
        return flat[:, : self.shape[1]].to(dtype)

    def _values(self) -> torch.Tensor:
        """Return the values of the codes, float32 [out, padded in]."""
        codes = unpack_nibbles(self.codes, self.group) if self.bits == 4 else self.codes
        match self.coding:
            case "e4m3":
                return codes.view(torch.float8_e4m3fn).float()
            case "table":
                assert self.table is not None
                return self.table[codes.int()]
        if self.zeros is None:
            return codes.float() - self.zero
        zeros = self.zeros.float()[:, :, None]
        return codes.view(*self.zeros.shape, self.group).float() - zeros

    def _scales(self) -> torch.Tensor:
        scales = self._per_group(self.scales)
        return scales if self.sub_scales is None else scales * self.sub_scales

    def _per_group(self, coarse: torch.Tensor) -> torch.Tensor:
        return coarse.float().repeat_interleave(self.span, 1)

    def rows(self, index: slice | torch.Tensor) -> QuantizedWeight:
        """Return the rows of a slice (without a copy) or at the positions of an int64 tensor. Exact."""
        parts: dict[str, Any] = {name: self.tensors()[name][index] for name in _PER_ROW if name in self.tensors()}
        return replace(self, shape=(parts["codes"].shape[0], self.shape[1]), **parts)

    def columns(self, first: int, last: int) -> QuantizedWeight:
        """Return the columns [first, last). Raises ValueError if they are not whole groups (the last group may have
        padding), or if the columns are in an order of their own."""
        if self.order is not None:
            raise ValueError("the columns are in an order of their own")
        whole = last % self.group == 0 or last == self.shape[1]
        if first % self.group or not whole or not 0 <= first < last <= self.shape[1]:
            raise ValueError(f"columns {first} to {last} are not whole groups of {self.group}")
        start, end = first // self.group, -(-last // self.group)
        spans = slice(start // self.span, end // self.span)
        single = self
        if start % self.span or end % self.span:
            single, spans = self._without_span(), slice(start, end)
        parts: dict[str, Any] = {}
        for name, tensor in single.tensors().items():
            if name == "codes":
                parts[name] = tensor[:, start * self.group * self.bits // 8 : end * self.group * self.bits // 8]
            elif name in ("scales", "minima"):
                parts[name] = tensor[:, spans]
            elif name != "table":
                parts[name] = tensor[:, start:end]
        return replace(single, shape=(self.shape[0], last - first), **parts)

    def _without_span(self) -> QuantizedWeight:
        """Return the same weight with one entry of scales and minima per group."""
        minima = None if self.minima is None else self.minima.repeat_interleave(self.span, 1)
        return replace(self, scales=self.scales.repeat_interleave(self.span, 1), minima=minima, span=1)


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Join weights along their rows, exactly. Returns None unless they have the same columns and format."""
    first = parts[0]
    if any(not _alike(first, part) for part in parts[1:]):
        return None
    names = [name for name in _PER_ROW if name in first.tensors()]
    joined: dict[str, Any] = {name: torch.cat([part.tensors()[name] for part in parts]) for name in names}
    shape = (joined["codes"].shape[0], first.shape[1])
    source = ", ".join(dict.fromkeys(part.source for part in parts))
    return replace(first, shape=shape, most=max(part.most for part in parts), source=source, **joined)


def _alike(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    for name in ("bits", "group", "coding", "zero", "span"):
        if getattr(one, name) != getattr(other, name):
            return False
    ours, theirs = one.tensors(), other.tensors()
    if one.shape[1] != other.shape[1] or ours.keys() != theirs.keys():
        return False
    if any(ours[name].dtype != theirs[name].dtype for name in ours):
        return False
    return all(torch.equal(ours[name], theirs[name]) for name in ("table", "order") if name in ours)


def group_for(columns: int, largest: int = GROUPS[0]) -> int:
    """Return the largest group of at most ``largest`` columns that divides ``columns``, else the smallest group."""
    return next((group for group in GROUPS if group <= largest and columns % group == 0), GROUPS[-1])


def make(codes: torch.Tensor, bits: Literal[4, 8], group: int, scales: torch.Tensor, **more: Any) -> QuantizedWeight:
    """Return a weight of ``codes`` uint8 [out, in], one per byte, of which there are whole groups."""
    shape = (codes.shape[0], codes.shape[1])
    packed = pack_nibbles(codes.contiguous(), group) if bits == 4 else codes.contiguous()
    return QuantizedWeight(shape, bits, group, packed, scales.contiguous(), **more)


# -- rounding ---------------------------------------------------------------------------------------------------------


def quantize(
    weight: torch.Tensor, bits: Literal[4, 8], group: int = 64, scales: torch.dtype = torch.float16,
    symmetric: bool = False,
) -> QuantizedWeight:  # fmt: skip
    """Round ``weight`` [out, in] to the nearest codes, in groups of ``group`` columns.

    8 bits: symmetric, zero 128, codes 1 to 255. 4 bits: an integer zero per group, or, if ``symmetric``, the zero 8.
    Scales are of type ``scales``, float16 or bfloat16, and are rounded before the codes are chosen. Raises ValueError
    if a value is not finite or beyond the scales' type.
    """
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    round_some = partial(_round_symmetric if bits == 8 or symmetric else _round_affine, bits, group, scales)
    parts = [round_some(weight[at : at + rows]) for at in range(0, weight.shape[0], rows)]
    joined = concatenate(parts)
    assert joined is not None
    return joined


def _round_symmetric(bits: Literal[4, 8], group: int, dtype: torch.dtype, weight: torch.Tensor) -> QuantizedWeight:
    """The largest magnitude becomes 127, or of 4 bits 7.5, between the codes of -8 and 7."""
    values = _in_groups(weight, group)
    zero, largest = (128, 127.0) if bits == 8 else (8, 7.5)
    scales = _round_up(values.abs().amax(2) / largest, dtype)
    codes = (values / _divisor(scales)).round_().clamp_(-127 if bits == 8 else -8, zero - 1) + zero
    return _rounded(weight, bits, group, codes, scales, zero=zero)


def _round_affine(bits: Literal[4, 8], group: int, dtype: torch.dtype, weight: torch.Tensor) -> QuantizedWeight:
    """Smallest and largest value of a group, of which one is 0 at least, become 0 and 15."""
    values = _in_groups(weight, group)
    low, high = values.amin(2).clamp_(max=0), values.amax(2).clamp_(min=0)
    scales = _round_up((high - low) / 15, dtype)
    zeros = (-low / _divisor(scales)[:, :, 0]).round_().clamp_(0, 15)
    codes = ((values / _divisor(scales)).round_() + zeros[:, :, None]).clamp_(0, 15)
    return _rounded(weight, bits, group, codes, scales, zeros=zeros.to(torch.uint8))


def _in_groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return float32 [out, groups, group], padded with zeros."""
    padded = torch.nn.functional.pad(weight.detach().float(), (0, -weight.shape[1] % group))
    return padded.view(weight.shape[0], -1, group)


def _rounded(
    weight: torch.Tensor, bits: Literal[4, 8], group: int, codes: torch.Tensor, scales: torch.Tensor, **zero: Any
) -> QuantizedWeight:
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("the weight has values that are not finite or too large")
    flat = codes.to(torch.uint8).view(weight.shape[0], -1)
    packed = pack_nibbles(flat, group) if bits == 4 else flat
    shape = (weight.shape[0], weight.shape[1])
    return QuantizedWeight(shape, bits, group, packed, scales, most=(1 << bits) - 1, **zero)


def _round_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round scales of at least 0 to a type of 16 bits: to the nearest, but up where the largest code would then fall
    short by more than 1/4 of a step."""
    rounded = scales.to(dtype)
    short = rounded.float() * 1.002 < scales
    return torch.where(short, (rounded.view(torch.int16) + 1).view(dtype), rounded)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [out, groups, 1] to divide by: 1 where the scale is 0 and so all values are."""
    return torch.where(scales == 0, 1.0, scales.float())[:, :, None]


def requantize(values: torch.Tensor, source: str) -> QuantizedWeight:
    """Round a dequantized weight [out, in] to 8 bits in groups of 32, for formats that are not kept as they are."""
    return replace(quantize(values, 8, 32), source=source + EXPANDED)
