"""Groups of a checkpoint, of any size and with the columns in any order, as groups of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from common.quantization.packing import pack_nibbles
from common.quantization.weight import GROUPS, Coding, QuantizedWeight, group_for, requantize


@dataclass(frozen=True, eq=False)
class Grouped:
    """A weight as checkpoints have it: codes uint8 [out, in], one per byte, scales [out, groups] of ``size`` columns
    each (the last group may have fewer). ``zeros`` integers [out, groups], None for one ``zero``. ``group_of`` [in]:
    the group of each column, None for ``column // size``."""

    codes: torch.Tensor
    scales: torch.Tensor
    size: int
    bits: int
    source: str
    zeros: torch.Tensor | None = None
    zero: int = 0
    coding: Coding = "int"
    group_of: torch.Tensor | None = None

    def __post_init__(self) -> None:
        out, columns = self.codes.shape
        wanted = (out, -(-columns // self.size))
        for name, tensor in (("scales", self.scales), ("zero points", self.zeros)):
            if tensor is not None and tuple(tensor.shape) != wanted:
                raise ValueError(f"it has {list(tensor.shape)} {name}, not {list(wanted)}")
        if not bool(torch.isfinite(self.scales).all()):
            raise ValueError("it has scales that are not finite numbers")

    def dequantize(self) -> torch.Tensor:
        """Return the weight in float32."""
        columns = self.codes.shape[1]
        group_of = torch.arange(columns) // self.size if self.group_of is None else self.group_of
        values = self.codes.view(torch.float8_e4m3fn).float() if self.coding == "e4m3" else self.codes.float()
        if self.zeros is not None:
            values -= self.zeros[:, group_of]
        elif self.coding == "int":
            values -= self.zero
        return values * self.scales.float()[:, group_of]


def regroup(weight: Grouped) -> QuantizedWeight:
    """Return ``weight`` in groups of ours: exactly if its groups are multiples of 16 columns, which may be in any
    order; else rounded to 8 bits."""
    codes, (out, columns) = weight.codes, weight.codes.shape
    order = None
    if weight.group_of is not None:
        order = weight.group_of.argsort(stable=True)
        if not torch.equal(weight.group_of[order], torch.arange(columns) // weight.size):
            return _rounded(weight)
        if torch.equal(order, torch.arange(columns)):
            order = None
        else:
            codes = codes[:, order]
    group = _group(columns, weight.size, weight.scales.shape[1])
    zeros, zero, bits = weight.zeros, weight.zero, 4 if weight.bits <= 4 else 8
    if group is None:
        return _rounded(weight)
    if zeros is not None and bool((zeros == zeros[0, 0]).all()):
        zero = int(zeros[0, 0])
        zeros = None
    filler = torch.full((out,), zero) if zeros is None else zeros[:, -1]
    padding = -columns % group
    if (padding and int(filler.max()) >= 1 << bits) or (zeros is not None and int(zeros.max()) > 255):
        return _rounded(weight)
    if padding:
        codes = torch.cat([codes, filler.to(torch.uint8)[:, None].expand(out, padding)], 1)
    index = torch.arange(codes.shape[1] // group) * group // weight.size
    if order is not None:
        order = torch.cat([order, torch.arange(columns, columns + padding)]).int()
    packed = pack_nibbles(codes.contiguous(), group) if bits == 4 else codes.contiguous()
    return QuantizedWeight(
        (out, columns), _bits(bits), group, packed, weight.scales[:, index].contiguous(), coding=weight.coding,
        zero=zero, zeros=None if zeros is None else zeros[:, index].to(torch.uint8), order=order,
        most=(1 << weight.bits) - 1, source=weight.source,
    )  # fmt: skip


def _bits(bits: int) -> Literal[4, 8]:
    return 4 if bits == 4 else 8


def _group(columns: int, size: int, groups: int) -> int | None:
    """Return the columns of a group of ours inside groups of ``size`` columns, None if there is none."""
    if groups == 1:
        return group_for(columns)
    inside = [group for group in GROUPS if size % group == 0]
    return next((group for group in inside if columns % group == 0), inside[0] if inside else None)


def _rounded(weight: Grouped) -> QuantizedWeight:
    return requantize(weight.dequantize(), f"{weight.source} with irregular groups")
