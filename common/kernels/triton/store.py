"""Writes of new keys and values into the pool.

In a pool in float8 they are divided by the scale of their head and rounded. Scales are powers of two, so multiplying by
the inverse of one is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import FUSED, Scales, power_of_two
from common.kernels.triton.float8 import narrowed

ROWS = 16
"""Rows of one program."""


@triton.jit
def slots_of(Blocks, Offsets, row, rows, block_step, token_step):
    """Return where the slots of ``row`` begin in the pool, and which rows have one: padding has block -1."""
    block = tl.load(Blocks + row, mask=row < rows, other=-1).to(tl.int64)
    inside = tl.load(Offsets + row, mask=row < rows, other=0).to(tl.int64)
    return block * block_step + inside * token_step, block >= 0


@triton.jit
def as_stored(x, To, inverse, SCALED: tl.constexpr):
    """Return ``x`` in the element type of ``To``; if ``SCALED``, times ``inverse`` and rounded to float8."""
    if SCALED:
        y = narrowed(x.to(tl.float32) * inverse)
    else:
        y = x.to(To.dtype.element_ty)
    return y


@triton.jit
def copy_rows(From, source, To, target, real, inverse, D: tl.constexpr, P: tl.constexpr, SCALED: tl.constexpr):
    """Copy ``D`` elements of each real row, as :func:`as_stored`."""
    column = tl.arange(0, P)
    mask = real[:, None] & (column < D)[None, :]
    x = tl.load(From + source[:, None] + column[None, :], mask=mask)
    tl.store(To + target[:, None] + column[None, :], as_stored(x, To, inverse, SCALED), mask=mask)


@triton.jit
def write_kv(
    Key, Value, K, V, KInverse, VInverse, Blocks, Offsets, rows,
    key_row, key_head, value_row, value_head, k_block, k_token, k_head, v_block, v_token, v_head,
    KD: tl.constexpr, KP: tl.constexpr, VD: tl.constexpr, VP: tl.constexpr, R: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Each program writes R rows of one KV head."""
    row, head = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    keys, real = slots_of(Blocks, Offsets, row, rows, k_block, k_token)
    values, real = slots_of(Blocks, Offsets, row, rows, v_block, v_token)
    at = row.to(tl.int64)
    k_inverse = tl.load(KInverse + head) if SCALED else 1.0
    v_inverse = tl.load(VInverse + head) if SCALED else 1.0
    copy_rows(Key, at * key_row + head * key_head, K, keys + head * k_head, real, k_inverse, KD, KP, SCALED)
    copy_rows(Value, at * value_row + head * value_head, V, values + head * v_head, real, v_inverse, VD, VP, SCALED)


Slots = tuple[torch.Tensor, torch.Tensor]
"""Block id (-1: the row is padding and not stored) and offset in the block of each row, integers [T] both."""


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Slots,
    inverses: Scales | None = None,
) -> None:
    """Store ``key`` [T, kv_heads, k_dim] and ``value`` [T, kv_heads, v_dim] in one layer of the pool (``keys`` and
    ``values``, [blocks, size, kv_heads, dim]). ``inverses``: 1 / scale of each head, for a pool in float8."""
    rows, kv_heads, k_dim = key.shape
    v_dim = value.shape[2]
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    write_kv[(triton.cdiv(rows, ROWS), kv_heads)](
        key, value, keys, values, *(inverses or (key, value)), *slots, rows,
        *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        KD=k_dim, KP=power_of_two(k_dim), VD=v_dim, VP=power_of_two(v_dim), R=ROWS,
        SCALED=inverses is not None, **FUSED,
    )  # fmt: skip
