"""Writes of new keys and values into the pool, alone or together with the rotary embedding of queries and keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import FUSED, power_of_two

ROWS = 16
"""Rows of one program."""


@triton.jit
def slots_of(Blocks, Offsets, row, rows, block_step, token_step):
    """Return where the slots of ``row`` begin in the pool, and which rows have one: padding has block -1."""
    block = tl.load(Blocks + row, mask=row < rows, other=-1).to(tl.int64)
    inside = tl.load(Offsets + row, mask=row < rows, other=0).to(tl.int64)
    return block * block_step + inside * token_step, block >= 0


@triton.jit
def copy_rows(From, source, To, target, real, D: tl.constexpr, P: tl.constexpr):
    """Copy ``D`` elements of each real row, converted to the element type of ``To``."""
    column = tl.arange(0, P)
    mask = real[:, None] & (column < D)[None, :]
    x = tl.load(From + source[:, None] + column[None, :], mask=mask)
    tl.store(To + target[:, None] + column[None, :], x.to(To.dtype.element_ty), mask=mask)


@triton.jit
def rotate_half(From, source, To, target, Cos, Sin, angle, real, step, gap, HALF: tl.constexpr, HP: tl.constexpr):
    """Rotate ``HALF`` pairs of elements of each real row: pair i is elements i * step and i * step + gap. ``Cos`` and
    ``Sin`` have the angle of pair i in column i * step."""
    pair = tl.arange(0, HP)
    mask = real[:, None] & (pair < HALF)[None, :]
    at = (pair * step)[None, :]
    cos = tl.load(Cos + angle[:, None] + at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(Sin + angle[:, None] + at, mask=mask, other=0.0).to(tl.float32)
    one = tl.load(From + source[:, None] + at, mask=mask, other=0.0).to(tl.float32)
    two = tl.load(From + source[:, None] + at + gap, mask=mask, other=0.0).to(tl.float32)
    tl.store(To + target[:, None] + at, (one * cos - two * sin).to(To.dtype.element_ty), mask=mask)
    tl.store(To + target[:, None] + at + gap, (two * cos + one * sin).to(To.dtype.element_ty), mask=mask)


@triton.jit
def write_kv(
    Key, Value, K, V, Blocks, Offsets, rows,
    key_row, key_head, value_row, value_head, k_block, k_token, k_head, v_block, v_token, v_head,
    KD: tl.constexpr, KP: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program: R rows of one KV head."""
    row, head = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    keys, real = slots_of(Blocks, Offsets, row, rows, k_block, k_token)
    values, real = slots_of(Blocks, Offsets, row, rows, v_block, v_token)
    at = row.to(tl.int64)
    copy_rows(Key, at * key_row + head * key_head, K, keys + head * k_head, real, KD, KP)
    copy_rows(Value, at * value_row + head * value_head, V, values + head * v_head, real, VD, VP)


@triton.jit
def rotate_and_write(
    Query, Key, Value, Cos, Sin, K, V, Blocks, Offsets, rows,
    query_row, query_head, key_row, key_head, value_row, value_head, angle_row,
    k_block, k_token, k_head, v_block, v_token, v_head, query_heads, step, gap,
    HALF: tl.constexpr, HP: tl.constexpr, REST: tl.constexpr, RP: tl.constexpr,
    VD: tl.constexpr, VP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program: R rows of one query head, which is rotated in place, or of one KV head, whose rotated keys and whose
    values go into the pool."""
    row, head = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    at = row.to(tl.int64)
    angle = at * angle_row
    if head < query_heads:
        here = at * query_row + head * query_head
        rotate_half(Query, here, Query, here, Cos, Sin, angle, row < rows, step, gap, HALF, HP)
    else:
        head = head - query_heads
        keys, real = slots_of(Blocks, Offsets, row, rows, k_block, k_token)
        values, real = slots_of(Blocks, Offsets, row, rows, v_block, v_token)
        source, target = at * key_row + head * key_head, keys + head * k_head
        rotate_half(Key, source, K, target, Cos, Sin, angle, real, step, gap, HALF, HP)
        if REST > 0:
            copy_rows(Key, source + 2 * HALF, K, target + 2 * HALF, real, REST, RP)
        copy_rows(Value, at * value_row + head * value_head, V, values + head * v_head, real, VD, VP)


Slots = tuple[torch.Tensor, torch.Tensor]
"""Block id (-1: the row is padding and not stored) and offset in the block of each row, integers [T] both."""


def write(key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: Slots) -> None:
    """Store ``key`` [T, kv_heads, k_dim] and ``value`` [T, kv_heads, v_dim] in one layer of the pool (``keys`` and
    ``values``, [blocks, size, kv_heads, dim])."""
    rows, kv_heads, k_dim = key.shape
    v_dim = value.shape[2]
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    write_kv[(triton.cdiv(rows, ROWS), kv_heads)](
        key, value, keys, values, *slots, rows,
        *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        KD=k_dim, KP=power_of_two(k_dim), VD=v_dim, VP=power_of_two(v_dim), R=ROWS, **FUSED,
    )  # fmt: skip


def rotate_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Slots,
    interleaved: bool = False,
) -> None:
    """Rotate ``query`` [T, heads, k_dim] in place, and store the rotated ``key`` and the ``value`` as :func:`write`
    does, rounded once.

    ``angles`` are cosines and sines [T, rotated], as transformers' rotary modules return them: each angle twice, in
    both halves, or side by side if ``interleaved``. Elements of a head from ``rotated`` on are not rotated.
    """
    cos, sin = angles
    rows, query_heads, k_dim = query.shape
    kv_heads, v_dim, half = key.shape[1], value.shape[2], cos.shape[-1] // 2
    rest = k_dim - 2 * half
    rotate_and_write[(triton.cdiv(rows, ROWS), query_heads + kv_heads)](
        query, key, value, cos, sin, keys, values, *slots, rows,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], cos.stride(0),
        *keys.stride()[:3], *values.stride()[:3], query_heads, 2 if interleaved else 1, 1 if interleaved else half,
        HALF=half, HP=power_of_two(half), REST=rest, RP=power_of_two(max(rest, 1)),
        VD=v_dim, VP=power_of_two(v_dim), R=ROWS, **FUSED,
    )  # fmt: skip
