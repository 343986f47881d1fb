"""Copies of many pieces of memory in one launch: between blocks of a pool and the landing buffers of hand-offs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.triton.blocks import FUSED

WORD_BYTES = 8
WORDS = 1024
"""Words of one program."""


@triton.jit(do_not_specialize=["count"])
def copy_words(Pieces, count, W: tl.constexpr):
    """Each program copies W words of one piece. ``Pieces`` int64 [3, count] holds source addresses, target addresses
    and sizes in bytes."""
    piece = tl.program_id(0)
    source = tl.load(Pieces + piece).to(tl.pointer_type(tl.int64))
    target = tl.load(Pieces + count + piece).to(tl.pointer_type(tl.int64))
    source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    words = tl.multiple_of(tl.load(Pieces + 2 * count + piece) // 8, 2)
    word = tl.program_id(1) * W + tl.arange(0, W)
    mask = word < words
    tl.store(target + word, tl.load(source + word, mask=mask), mask=mask)


def copy(pieces: torch.Tensor, longest: int) -> None:
    """Copy n ``pieces``, int64 [3, n] on the device: source and target addresses, which the device can access, and
    sizes in bytes, of which ``longest`` is the largest; all are multiples of 16."""
    count = pieces.shape[1]
    copy_words[(count, triton.cdiv(longest, WORDS * WORD_BYTES))](pieces, count, W=WORDS, **FUSED)
