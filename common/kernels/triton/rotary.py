"""The rotary embedding of queries and keys in one launch with the norms of their heads before it and the write into the
pool behind it. Rounding follows transformers' modelling code, except that the embedding is rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import FUSED, Scales, power_of_two
from common.kernels.triton.store import Slots, as_stored

Norms = tuple[torch.Tensor, torch.Tensor, float]
"""Weights [dim] of the RMS norms of query heads and of key heads, and their epsilon."""


@triton.jit
def turned_head(X, at, Weight, Cos, Sin, angle, epsilon, HALF: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr):
    """Return the halves of one head of 2 * ``HALF`` elements, normed if ``NORM`` and rotated, in the element type."""
    kind = X.dtype.element_ty
    column = tl.arange(0, P)
    mask = column < HALF
    one = tl.load(X + at + column, mask=mask, other=0.0).to(tl.float32)
    two = tl.load(X + at + HALF + column, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(one * one, 0) + tl.sum(two * two, 0)) / (2 * HALF)
        scale = 1.0 / tl.sqrt(mean + epsilon)
        left = tl.load(Weight + column, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(Weight + HALF + column, mask=mask, other=0.0).to(tl.float32)
        one, two = (one * scale).to(kind).to(tl.float32) * left, (two * scale).to(kind).to(tl.float32) * right
        one, two = one.to(kind).to(tl.float32), two.to(kind).to(tl.float32)
    cos = tl.load(Cos + angle + column, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(Sin + angle + column, mask=mask, other=0.0).to(tl.float32)
    return (one * cos - two * sin).to(kind), (two * cos + one * sin).to(kind)


@triton.jit
def rotate_and_write(
    Query, Key, Value, QueryNorm, KeyNorm, Cos, Sin, K, V, KInverse, VInverse, Blocks, Offsets,
    query_row, query_head, key_row, key_head, value_row, value_head, angle_row,
    k_block, k_token, k_head, v_block, v_token, v_head, query_heads, epsilon,
    HALF: tl.constexpr, P: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Each program handles one head of one row. A query head is rotated in place; of a KV head the rotated keys and the
    values are written to the row's slot, if it has one. ``SCALED``: in units of their head's scale, in float8."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, P)
    mask = column < HALF
    if head < query_heads:
        at = row * query_row + head * query_head
        one, two = turned_head(Query, at, QueryNorm, Cos, Sin, row * angle_row, epsilon, HALF, P, NORM)
        tl.store(Query + at + column, one, mask=mask)
        tl.store(Query + at + HALF + column, two, mask=mask)
    else:
        head = head - query_heads
        block, inside = tl.load(Blocks + row).to(tl.int64), tl.load(Offsets + row).to(tl.int64)
        if block >= 0:
            at = row * key_row + head * key_head
            one, two = turned_head(Key, at, KeyNorm, Cos, Sin, row * angle_row, epsilon, HALF, P, NORM)
            keys = K + block * k_block + inside * k_token + head * k_head
            k_inverse = tl.load(KInverse + head) if SCALED else 1.0
            v_inverse = tl.load(VInverse + head) if SCALED else 1.0
            tl.store(keys + column, as_stored(one, K, k_inverse, SCALED), mask=mask)
            tl.store(keys + HALF + column, as_stored(two, K, k_inverse, SCALED), mask=mask)
            wide = tl.arange(0, VP)
            value = tl.load(Value + row * value_row + head * value_head + wide, mask=wide < VD)
            values = V + block * v_block + inside * v_token + head * v_head
            tl.store(values + wide, as_stored(value, V, v_inverse, SCALED), mask=wide < VD)


def rotate_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: Norms | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Slots,
    inverses: Scales | None = None,
) -> None:
    """Norm and rotate ``query`` [T, heads, dim] in place, and store the normed and rotated ``key`` [T, kv_heads, dim]
    and the ``value`` [T, kv_heads, v_dim] as :func:`common.kernels.triton.store.write` does. ``angles``: cosines and
    sines [T, dim], each angle in both halves."""
    cos, sin = angles
    rows, query_heads, dim = query.shape
    v_dim, half = value.shape[2], dim // 2
    query_norm, key_norm, epsilon = norms or (query, key, 0.0)
    rotate_and_write[(rows, query_heads + key.shape[1])](
        query, key, value, query_norm, key_norm, cos, sin, keys, values, *(inverses or (key, value)), *slots,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], cos.stride(0),
        *keys.stride()[:3], *values.stride()[:3], query_heads, epsilon,
        HALF=half, P=power_of_two(half), VD=v_dim, VP=power_of_two(v_dim), NORM=norms is not None,
        SCALED=inverses is not None, **FUSED,
    )  # fmt: skip


def rotate(
    query: torch.Tensor, key: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], norms: Norms | None
) -> torch.Tensor:
    """Norm and rotate ``query`` in place, and return the normed and rotated ``key``, as :func:`rotate_write`."""
    keys, values = (key.new_empty(1, *key.shape) for _ in range(2))
    offsets = torch.arange(key.shape[0], device=key.device)
    rotate_write(query, key, key, angles, norms, keys, values, (torch.zeros_like(offsets), offsets))
    return keys[0]
