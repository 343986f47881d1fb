"""Products with weights in groups of 4-bit or 8-bit codes (:mod:`common.quantization.weight`).

Codes are read as they are stored and become numbers of the activations' type in registers, so that a product reads a
quarter or half of the bytes of 16-bit weights.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import FUSED, PAD_M, dot
from common.kernels.triton.float8 import widened

CODINGS = {"int": 0, "e4m3": 1, "table": 2}
"""What a code stands for; the kernel has the numbers."""
COLUMNS = 64
"""Columns of the result per program."""
MOST_ROWS = 64
"""Most rows of the result per program."""
STEP = 32
"""Bytes of codes per row and step: 32 columns of 8 bits, or 64 of 4 bits."""
WARPS = {16: 4, 32: 4, 64: 8}
"""Warps of a program by its rows."""


class Weight(Protocol):
    """The fields of :class:`common.quantization.weight.QuantizedWeight` that a product reads."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def codes(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def coding(self) -> str: ...
    @property
    def zero(self) -> int: ...
    @property
    def zeros(self) -> torch.Tensor | None: ...
    @property
    def minima(self) -> torch.Tensor | None: ...
    @property
    def sub_scales(self) -> torch.Tensor | None: ...
    @property
    def sub_minima(self) -> torch.Tensor | None: ...
    @property
    def span(self) -> int: ...
    @property
    def table(self) -> torch.Tensor | None: ...
    @property
    def order(self) -> torch.Tensor | None: ...


@triton.jit
def numbers(code, scale, minimum, zero, Table, CODING: tl.constexpr, HAS_MINIMA: tl.constexpr):
    """Return the float32 tile of weights of the uint8 tile ``code``; the other tiles have the same shape."""
    if CODING == 1:
        value = widened(code)
    elif CODING == 2:
        value = tl.load(Table + code.to(tl.int32))
    else:
        value = code.to(tl.float32) - zero
    value *= scale
    if HAS_MINIMA:
        value += minimum
    return value


@triton.jit
def inputs(X, Order, row, x_row, column, width, known, HAS_ORDER: tl.constexpr):
    """Return the tile of ``X`` at the rows ``row`` and at the columns that the codes' columns ``column`` multiply."""
    if HAS_ORDER:
        column = tl.load(Order + column, mask=known, other=0)
    mask = known & (column < width)
    return tl.load(X + row[:, None] * x_row + column[None, :], mask=mask[None, :], other=0.0)


@triton.jit
def multiply_groups(
    X, Codes, Scales, Minima, SubScales, SubMinima, Zeros, Table, Order, Bias, Out,
    x_row, code_row, coarse_row, fine_row, out_row, rows, columns, width, size, zero,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, CODING: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_SUBS: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Each program computes M rows and N columns of ``X @ weight.T + Bias``, in steps of K bytes of each weight's
    ``size`` bytes of codes. A byte of 4-bit codes has column j of its group in its low half, and column j + GROUP / 2
    in its high one. Rows beyond the last are computed from it again, and not stored."""
    n = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    weight = tl.minimum(n, columns - 1)
    row = tl.minimum(m, rows - 1).to(tl.int64)
    out = tl.zeros((M, N), tl.float32)
    per_byte: tl.constexpr = 8 // BITS
    half: tl.constexpr = GROUP // per_byte
    for start in range(0, size, K):
        byte = start + tl.arange(0, K)
        known = byte < size
        group = byte // half
        low = group * GROUP + byte % half
        code = tl.load(Codes + weight[:, None] * code_row + byte[None, :], mask=known[None, :], other=0)
        coarse = weight[:, None] * coarse_row + (group // SPAN)[None, :]
        fine = weight[:, None] * fine_row + group[None, :]
        scale = tl.load(Scales + coarse, mask=known[None, :], other=0.0).to(tl.float32)
        minimum = scale
        if HAS_MINIMA:
            minimum = tl.load(Minima + coarse, mask=known[None, :], other=0.0).to(tl.float32)
        if HAS_SUBS:
            scale *= tl.load(SubScales + fine, mask=known[None, :], other=0).to(tl.float32)
            if HAS_MINIMA:
                minimum *= tl.load(SubMinima + fine, mask=known[None, :], other=0).to(tl.float32)
        off = tl.zeros((N, K), tl.float32) + zero
        if HAS_ZEROS:
            off = tl.load(Zeros + fine, mask=known[None, :], other=0).to(tl.float32)
        first = code & 15 if BITS == 4 else code
        values = numbers(first, scale, minimum, off, Table, CODING, HAS_MINIMA)
        x = inputs(X, Order, row, x_row, low, width, known, HAS_ORDER)
        out += dot(x, tl.trans(values.to(x.dtype)))
        if BITS == 4:
            values = numbers(code >> 4, scale, minimum, off, Table, CODING, HAS_MINIMA)
            x = inputs(X, Order, row, x_row, low + half, width, known, HAS_ORDER)
            out += dot(x, tl.trans(values.to(x.dtype)))
    if HAS_BIAS:
        out += tl.load(Bias + weight).to(tl.float32)[None, :]
    place = Out + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(place, out.to(Out.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def multiply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` [rows, out] in the type of ``x`` [rows, in], whose rows are contiguous. The weight
    is rounded to that type, sums are float32."""
    rows, columns = x.shape[0], weight.shape[0]
    out = x.new_empty(rows, columns)
    tile = min(MOST_ROWS, max(PAD_M, triton.next_power_of_2(rows)))
    fine = next((each for each in (weight.zeros, weight.sub_scales) if each is not None), weight.scales)
    absent = weight.scales
    grid = triton.cdiv(columns, COLUMNS), triton.cdiv(rows, tile)
    if rows:
        multiply_groups[grid](
            x, weight.codes, weight.scales, _or(weight.minima, absent), _or(weight.sub_scales, absent),
            _or(weight.sub_minima, absent), _or(weight.zeros, absent), _or(weight.table, absent),
            _or(weight.order, absent), _or(bias, absent), out,
            x.stride(0), weight.codes.stride(0), weight.scales.stride(0), fine.stride(0), out.stride(0),
            rows, columns, x.shape[1], weight.codes.shape[1], weight.zero,
            BITS=weight.bits, GROUP=weight.group, SPAN=weight.span, CODING=CODINGS[weight.coding],
            HAS_ZEROS=weight.zeros is not None, HAS_MINIMA=weight.minima is not None,
            HAS_SUBS=weight.sub_scales is not None, HAS_ORDER=weight.order is not None, HAS_BIAS=bias is not None,
            M=tile, N=COLUMNS, K=STEP, num_warps=WARPS[tile], **FUSED,
        )  # fmt: skip
    return out


def _or(tensor: torch.Tensor | None, absent: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or what a kernel gets in the place of one that it does not read."""
    return absent if tensor is None else tensor
