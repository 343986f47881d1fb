"""Copies between blocks of the pool and the canonical form of :mod:`common.kv.layout`, all parts in one launch.

A *part* is the keys or the values of one layer in one shard of a block: rows of equal width, one per token. Elements
are moved as integers of the widest type that divides all widths and offsets, whatever they mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import FUSED

UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer types by their bytes."""
ROWS, COLUMNS = 16, 128
"""Tokens and units of one step of a program."""


@triton.jit
def copy_parts(
    Pool, Canonical, Table, Parts, first, tokens, block_units,
    SIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """One program: R tokens of one part. ``Parts`` int64 [parts, 5], in units: where the part begins in a block; its
    row's width; where its rows begin in the canonical form of one token; the width of the whole canonical row; and the
    part's first column in it."""
    part, token = tl.program_id(1), tl.program_id(0) * R + tl.arange(0, R)
    inside, width = tl.load(Parts + part * 5), tl.load(Parts + part * 5 + 1)
    before, row_width = tl.load(Parts + part * 5 + 2), tl.load(Parts + part * 5 + 3)
    column0 = tl.load(Parts + part * 5 + 4)
    real, at = token < tokens, first + token
    block = tl.load(Table + at // SIZE, mask=real, other=0).to(tl.int64)
    in_pool = block * block_units + inside + at % SIZE * width
    outside = before * tokens + token * row_width + column0
    for start in range(0, width, C):
        column = start + tl.arange(0, C)
        mask = real[:, None] & (column < width)[None, :]
        pool = Pool + in_pool[:, None] + column[None, :]
        canonical = Canonical + outside[:, None] + column[None, :]
        if GATHER:
            tl.store(canonical, tl.load(pool, mask=mask), mask=mask)
        else:
            tl.store(pool, tl.load(canonical, mask=mask), mask=mask)


def copy(
    pool: torch.Tensor, canonical: torch.Tensor, table: torch.Tensor, parts: torch.Tensor, tokens: range, size: int,
    gather: bool,
) -> None:  # fmt: skip
    """Copy the rows of token positions ``tokens`` from the pool into ``canonical`` if ``gather``, else from there into
    the pool. ``pool`` [blocks, units] and ``canonical`` [units] have the same integer type, in units of which ``parts``
    (int64 [parts, 5]) are; ``table`` (int32) has the block ids of the sequence, ``size`` tokens each."""
    copy_parts[(triton.cdiv(len(tokens), ROWS), parts.shape[0])](
        pool, canonical, table, parts, tokens.start, len(tokens), pool.stride(0),
        SIZE=size, R=ROWS, C=COLUMNS, GATHER=gather, **FUSED,
    )  # fmt: skip
