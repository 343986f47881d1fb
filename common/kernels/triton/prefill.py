"""Attention of prompt chunks over block tables.

A program takes one KV head and a run of rows of one span, as many as fit into a tile with the query heads of the head's
group folded into rows. It finds its span by a binary search, so that the host uploads only where spans begin, whatever
the number of heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import (
    Scales,
    Scoring,
    capability_of,
    finish,
    fold,
    load_rows,
    power_of_two,
    prefill_tile,
    scores,
)
from common.kernels.triton.spans import PrefillSpans


@triton.jit
def find_span(First, spans, tile, ROWS: tl.constexpr):
    """Return the span of a tile of ``ROWS`` rows. The tiles of span i begin at tile First[i] // ROWS + i, which leaves
    room for all of them; a tile that is left over begins behind its span's last row."""
    low, high = tile * 0, tile * 0 + spans
    while low < high:
        middle = (low + high) // 2
        before = tl.load(First + middle) // ROWS + middle <= tile
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low - 1


@triton.jit
def prefill(
    Q, K, V, Out, Sinks, KScales, VScales, First, RowAt, Starts, Tables,
    q_row, q_head, k_block, k_token, k_head, v_block, v_token, v_head, out_row, out_head, table_block, spans,
    scale, softcap,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    KD: tl.constexpr, KP: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Each program computes up to M // GROUP rows of one span for one KV head. The last tiles, which attend to most, go
    first.
    ``SCALED``: keys and values are in units of their head's scale."""
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    span = find_span(First, spans, tile, M // GROUP)
    first = tl.load(First + span)
    done = (tile - (first // (M // GROUP) + span)) * (M // GROUP)
    rows = tl.minimum(tl.load(First + span + 1) - first - done, M // GROUP)
    if rows <= 0:
        return
    position = tl.load(Starts + span) + done
    m, n, kd, vd = tl.arange(0, M), tl.arange(0, N), tl.arange(0, KP), tl.arange(0, VP)
    heads, real = kv_head * GROUP + m % GROUP, m < rows * GROUP
    at_row = (tl.load(RowAt + span) + done + m // GROUP).to(tl.int64)
    q = load_rows(Q, 0, at_row * q_row + heads * q_head, kd, real, KD)
    if SCALED:
        scale *= tl.load(KScales + kv_head)
    own = position + m // GROUP
    end = position + rows
    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0) // N * N
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VP], tl.float32)
    for start in range(low, end, N):
        at = start + n
        known = at < end
        block = tl.load(Tables + at // SIZE * table_block + span, mask=known, other=0).to(tl.int64)
        k = load_rows(K, kv_head * k_head, block * k_block + at % SIZE * k_token, kd, known, KD)
        s = scores(q, tl.trans(k).to(q.dtype), scale, softcap, SOFTCAP)
        seen = at[None, :] <= own[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > own[:, None] - WINDOW)
        v = load_rows(V, kv_head * v_head, block * v_block + at % SIZE * v_token, vd, known, VD)
        best, total, acc = fold(tl.where(seen, s, float("-inf")), v.to(q.dtype), best, total, acc)
    if SCALED:
        acc *= tl.load(VScales + kv_head)
    sink = tl.load(Sinks + heads, mask=real, other=0.0).to(tl.float32) if SINKS else total
    out = finish(best, total, acc, sink, SINKS).to(Out.dtype.element_ty)
    where = (at_row * out_row + heads * out_head)[:, None] + vd[None, :]
    tl.store(Out + where, out, mask=real[:, None] & (vd < VD)[None, :])


def attend_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    spans: PrefillSpans,
    params: Scoring,
    scales: Scales | None = None,
) -> None:
    """Write the outputs of ``spans`` into ``out`` [T, heads, v_dim]. ``query`` is [T, heads, k_dim]; ``keys`` and
    ``values`` are one layer of the pool, [blocks, size, kv_heads, dim], in units of ``scales`` if given."""
    count, heads = spans.row_at.shape[0], query.shape[1]
    _, size, kv_heads, k_dim = keys.shape
    v_dim, group = values.shape[3], heads // kv_heads
    capability = capability_of(query.device)
    tile = prefill_tile(query.dtype, group, k_dim, v_dim, spans.longest, capability, scales is not None)
    prefill[(spans.rows // (tile.m // group) + count, kv_heads)](
        query, keys, values, out, query if params.sinks is None else params.sinks, *(scales or (query, query)),
        spans.first, spans.row_at, spans.starts, spans.tables,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2], spans.tables.stride(0), count,
        params.scaling, params.softcap or 1.0,
        GROUP=group, M=tile.m, N=tile.n, SIZE=size, KD=k_dim, KP=power_of_two(k_dim), VD=v_dim, VP=power_of_two(v_dim),
        WINDOW=params.window or 0, SOFTCAP=params.softcap is not None, SINKS=params.sinks is not None,
        SCALED=scales is not None, **tile.options(),
    )  # fmt: skip
