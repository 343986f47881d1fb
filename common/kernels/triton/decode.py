"""Attention of single new tokens over block tables, split along the sequence ("flash decoding").

A program takes one sequence, one KV head and one split of the positions; the query heads of the KV head's group are the
rows of its tile, so each key and value is read once for all of them. With several splits a second kernel adds them up
in their order, so that the result is the same every time. How a sequence is split depends on its own length and on the
number of splits, never on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import (
    FUSED,
    LOG2E,
    Scales,
    Scoring,
    decode_tile,
    finish,
    fold,
    load_rows,
    power_of_two,
    scores,
)
from common.kernels.triton.spans import DecodeRows

LEAST_SPLIT = 128
"""Fewest positions of a split; a multiple of every tile."""


@triton.jit
def split_range(length, splits, WINDOW: tl.constexpr, N: tl.constexpr, LEAST: tl.constexpr):
    """Return the first visible position, the position at which the first split begins, and the positions per split."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    origin = first // N * N
    each = tl.cdiv(tl.cdiv(length - origin, splits), N) * N
    return first, origin, tl.maximum(each, LEAST)


@triton.jit
def decode_split(
    Q, K, V, Out, Mid, Lse, Sinks, KScales, VScales, RowAt, Lengths, Tables,
    q_row, q_head, k_block, k_token, k_head, v_block, v_token, v_head, out_row, out_head, table_block, splits,
    scale, softcap,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, LEAST: tl.constexpr,
    KD: tl.constexpr, KP: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Each program computes one split of one row and KV head. ``DIRECT``: there is one split, and its output is final;
    else it goes to ``Mid`` [rows, heads, splits, VD] with its logarithm of the sum of weights in ``Lse`` [rows, heads,
    splits]. ``SCALED``: keys and values are in units of their head's scale."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at_row = tl.load(RowAt + row).to(tl.int64)
    length = tl.load(Lengths + row)
    first, origin, each = split_range(length, splits, WINDOW, N, LEAST)
    low = origin + split * each
    high = tl.minimum(low + each, length)
    idle = at_row < 0
    if not DIRECT:
        idle = idle | (low >= high)
    if idle:
        return
    m, n, kd, vd = tl.arange(0, M), tl.arange(0, N), tl.arange(0, KP), tl.arange(0, VP)
    heads, real = kv_head * GROUP + m, m < GROUP
    q = load_rows(Q, at_row * q_row, heads * q_head, kd, real, KD)
    if SCALED:
        scale *= tl.load(KScales + kv_head)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VP], tl.float32)
    for start in range(low, high, N):
        at = start + n
        seen = (at < high) & (at >= first)
        block = tl.load(Tables + at // SIZE * table_block + row, mask=seen, other=0).to(tl.int64)
        k = load_rows(K, kv_head * k_head, block * k_block + at % SIZE * k_token, kd, seen, KD)
        s = scores(q, tl.trans(k).to(q.dtype), scale, softcap, SOFTCAP)
        v = load_rows(V, kv_head * v_head, block * v_block + at % SIZE * v_token, vd, seen, VD)
        best, total, acc = fold(tl.where(seen[None, :], s, float("-inf")), v.to(q.dtype), best, total, acc)
    if SCALED:
        acc *= tl.load(VScales + kv_head)
    if DIRECT:
        sink = tl.load(Sinks + heads, mask=real, other=0.0).to(tl.float32) if SINKS else total
        out = finish(best, total, acc, sink, SINKS).to(Out.dtype.element_ty)
        where = at_row * out_row + heads[:, None] * out_head + vd[None, :]
        tl.store(Out + where, out, mask=real[:, None] & (vd < VD)[None, :])
    else:
        where = (row.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * splits + split
        tl.store(Lse + where, best + tl.log2(total), mask=real)
        out = acc / total[:, None]
        tl.store(Mid + where[:, None] * VD + vd[None, :], out, mask=real[:, None] & (vd < VD)[None, :])


@triton.jit
def decode_reduce(
    Mid, Lse, Out, Sinks, RowAt, Lengths, out_row, out_head, splits,
    N: tl.constexpr, LEAST: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Each program adds up the splits of one row and query head, in their order."""
    row, head = tl.program_id(0), tl.program_id(1)
    at_row = tl.load(RowAt + row).to(tl.int64)
    if at_row < 0:
        return
    length = tl.load(Lengths + row)
    _, origin, each = split_range(length, splits, WINDOW, N, LEAST)
    count = tl.cdiv(length - origin, each)
    vd = tl.arange(0, VP)
    where = (row.to(tl.int64) * tl.num_programs(1) + head) * splits
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if SINKS:
        best = total + tl.load(Sinks + head).to(tl.float32) * LOG2E
        total = total + 1.0
    acc = tl.zeros([VP], tl.float32)
    for split in range(count):
        lse = tl.load(Lse + where + split)
        part = tl.load(Mid + (where + split) * VD + vd, mask=vd < VD, other=0.0)
        highest = tl.maximum(best, lse)
        shrink, weight = tl.exp2(best - highest), tl.exp2(lse - highest)
        acc = acc * shrink + part * weight
        total = total * shrink + weight
        best = highest
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(Out + at_row * out_row + head * out_head + vd, out.to(Out.dtype.element_ty), mask=vd < VD)


def attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    rows: DecodeRows,
    splits: int,
    scratch: tuple[torch.Tensor, torch.Tensor],
    params: Scoring,
    scales: Scales | None = None,
) -> None:
    """Write the outputs of ``rows`` into ``out`` [T, heads, v_dim]. ``query`` is [T, heads, k_dim]; ``keys`` and
    ``values`` are one layer of the pool, [blocks, size, kv_heads, dim], in units of ``scales`` if given. ``splits`` is
    the most splits of a sequence; with more than one, ``scratch`` are float32 tensors of at least rows * heads * splits
    * v_dim and rows * heads * splits elements."""
    count, heads = rows.row_at.shape[0], query.shape[1]
    _, size, kv_heads, k_dim = keys.shape
    v_dim, group = values.shape[3], heads // kv_heads
    tile = decode_tile(query.dtype, group, k_dim, v_dim, scales is not None)
    mid, lse = scratch
    sinks = query if params.sinks is None else params.sinks
    shape = {
        "N": tile.n, "LEAST": LEAST_SPLIT, "VD": v_dim, "VP": power_of_two(v_dim),
        "WINDOW": params.window or 0, "SINKS": params.sinks is not None,
    }  # fmt: skip
    decode_split[(count, kv_heads, splits)](
        query, keys, values, out, mid, lse, sinks, *(scales or (query, query)),
        rows.row_at, rows.lengths, rows.tables,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2], rows.tables.stride(0), splits,
        params.scaling, params.softcap or 1.0,
        GROUP=group, M=tile.m, SIZE=size, KD=k_dim, KP=power_of_two(k_dim), SOFTCAP=params.softcap is not None,
        SCALED=scales is not None, DIRECT=splits == 1, **tile.options(), **shape,
    )  # fmt: skip
    if splits > 1:
        decode_reduce[(count, heads)](
            mid, lse, out, sinks, rows.row_at, rows.lengths, *out.stride()[:2], splits, num_warps=4, **FUSED, **shape
        )
