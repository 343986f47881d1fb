"""What the attention kernels share: the softmax that is updated tile by tile, and the shapes of tiles.

Scores are kept in base 2, so that the hardware's ``exp2`` serves. Offsets into a pool are 64-bit: a pool has more than
2**31 elements.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from common.kernels.triton import INTERPRETED
from common.kernels.triton.float8 import BY_BITS, widened

LOG2E = tl.constexpr(1.4426950408889634)
WIDEN = tl.constexpr(INTERPRETED)
"""The interpreter holds bfloat16 as 16-bit integers, which its ``tl.dot`` would multiply: it gets float32."""
SHARED_BYTES = 160 << 10
"""Shared memory of a program, in bytes: what an A100 has, the smallest of the data-centre GPUs."""
FUSED = {"enable_fp_fusion": True}
"""Option of every launch: products and sums are fused, as they were by default before Triton 3.10."""
few_tiles = INTERPRETED
"""Whether all tiles are large: the interpreter takes as long for a small one. Tests of real tiles set it to False."""
PAD_M = 16
"""Fewest rows of a matrix instruction."""


@triton.jit
def dot(a, b):
    """Return the product of two tiles, accumulated in float32; float32 tiles are not rounded to TF32."""
    if WIDEN:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def scores(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """Return the scores of q [M, D] and k [D, N], in base 2. The tanh is made of exp, since libdevice's has no
    interpreter."""
    s = dot(q, k) * scale
    if SOFTCAP:
        e = tl.exp2(tl.abs(s) * (2.0 * LOG2E / softcap))
        t = 1.0 - 2.0 / (e + 1.0)
        s = softcap * tl.where(s < 0, -t, t)
    return s * LOG2E


@triton.jit
def fold(s, v, best, total, acc):
    """Fold the scores s [M, N] (-inf where a row does not look) and values v [N, D] of one tile into the rows' running
    softmax: their highest score ``best``, the sum ``total`` of their weights relative to it, and their weighted sum of
    values ``acc``."""
    highest = tl.maximum(best, tl.max(s, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(s - base[:, None])
    shrink = tl.exp2(best - base)
    acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v)
    total = total * shrink + tl.sum(weights, 1)
    return highest, total, acc


@triton.jit
def finish(best, total, acc, sink, SINKS: tl.constexpr):
    """Return the rows' outputs [M, D]: their sums of values over their sums of weights, which include that of ``sink``
    [M] (natural logarithm). A row that looked at nothing is zero."""
    if SINKS:
        logit = sink * LOG2E
        highest = tl.maximum(best, logit)
        shrink = tl.exp2(best - highest)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(logit - highest)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def load_rows(X, base, row_step, column, real, D: tl.constexpr):
    """Return the tile X[base + row_step + column] with zeros where ``real`` [rows] is false and in columns from D on.
    ``base`` and ``row_step`` are 64-bit where the tensor may be that large. In the interpreter, float8 is returned as
    float32."""
    x = tl.load(X + base + row_step[:, None] + column[None, :], mask=real[:, None] & (column < D)[None, :], other=0.0)
    if BY_BITS and X.dtype.element_ty == tl.float8e4nv:
        x = widened(x)
    return x


def power_of_two(count: int, least: int = PAD_M) -> int:
    """Return the smallest power of two that is at least ``count`` and ``least``."""
    return max(least, 1 << (count - 1).bit_length())


Scales = tuple[torch.Tensor, torch.Tensor]
"""Scales of one layer in a pool in float8: of the keys and of the values of each KV head, float32 [kv_heads] both."""


class Scoring(Protocol):
    """Parameters of one layer's scores: their factor, a row's sliding window (itself included), the softcap, and one
    more logit per head."""

    @property
    def scaling(self) -> float:
        """Factor of the scores."""
        ...

    @property
    def window(self) -> int | None:
        """Number of positions that a row sees, itself included; None for all."""
        ...

    @property
    def softcap(self) -> float | None:
        """``c``, if scores become ``c * tanh(score / c)``; None if they do not."""
        ...

    @property
    def sinks(self) -> torch.Tensor | None:
        """The attention sinks: a logit per query head, float [heads], that takes part in the softmax without a value.
        None if the layer has no sinks."""
        ...


class TileShape(NamedTuple):
    """Shape of a program's tiles: ``m`` rows of queries against ``n`` positions, and how it is compiled."""

    m: int
    n: int
    warps: int
    stages: int

    def options(self) -> dict[str, int | bool]:
        """Return the options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, **FUSED}


def decode_tile(dtype: torch.dtype, group: int, k_dim: int, v_dim: int, is_fp8: bool = False) -> TileShape:
    """Return the tile of a decode program: the ``group`` query heads of one KV head, padded to a matrix instruction.
    Widening KV from fp8 and many heads take registers: then more warps share the tile, or it has fewer positions."""
    m, wide = power_of_two(group), max(power_of_two(k_dim), power_of_two(v_dim))
    if few_tiles:
        return TileShape(m, 64, 4, 1)
    if dtype == torch.float32:
        return _fitted(TileShape(m, 16, 8 if m > 16 or is_fp8 else 4, 3), dtype, k_dim, v_dim)
    if m > 64:
        return _fitted(TileShape(m, 32, 8, 3), dtype, k_dim, v_dim)
    many = 16 if is_fp8 and wide > 128 else 4
    return _fitted(TileShape(m, 64 if wide <= 256 else 32, many, 3), dtype, k_dim, v_dim)


def prefill_tile(
    dtype: torch.dtype, group: int, k_dim: int, v_dim: int, rows: int, capability: int, is_fp8: bool = False
) -> TileShape:
    """Return the tile of a prefill program for spans of at most ``rows`` rows, on a GPU of this compute capability
    (major). Larger tiles would not fit into the registers: before Hopper, operands of matrix instructions lie there,
    and float32 has no fast ones."""
    wide, least = max(power_of_two(k_dim), power_of_two(v_dim)), power_of_two(group)
    if few_tiles:
        return TileShape(max(64, least), 64, 4, 1)
    if dtype == torch.float32:
        n = 32 if wide <= 128 and not is_fp8 else 16
        return _fitted(TileShape(least, n, 4 if least <= 16 else 8, 1), dtype, k_dim, v_dim)
    small, many = max(64, least), 4 if wide <= 128 else 8
    if capability < 9:
        return _fitted(TileShape(small, 32, many, 3), dtype, k_dim, v_dim)
    if capability == 9 and (rows * group <= small or wide > 128):
        return _fitted(TileShape(small, 64, many, 3), dtype, k_dim, v_dim)
    return _fitted(TileShape(max(128, least), 64, 8, 3), dtype, k_dim, v_dim)


@cache
def capability_of(device: torch.device) -> int:
    """Return the compute capability (major) of a GPU; that of Hopper for a CPU, where the interpreter runs."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def _fitted(tile: TileShape, dtype: torch.dtype, k_dim: int, v_dim: int) -> TileShape:
    """Return ``tile`` with so few stages that queries and all stages of keys and values fit into shared memory."""
    k, v = power_of_two(k_dim), power_of_two(v_dim)
    stages = tile.stages
    while stages > 1 and (tile.m * k + stages * tile.n * (k + v)) * dtype.itemsize > SHARED_BYTES:
        stages -= 1
    return tile._replace(stages=stages)
