"""The spans of a step as the attention kernels read them. Does not import triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of a step that attend alone, as int32 tensors on the device.

    ``row_at`` [rows]: index of each row in the step, -1 for a row that is left out. ``lengths`` [rows]: positions that
    it attends to, 0 for padding, whose output is zero. ``tables`` [blocks, stride]: the block ids of row i in column i.
    """

    row_at: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpans:
    """The spans of several rows of a step, as int32 tensors on the device.

    ``first`` [spans + 1]: rows of all spans before each one, and of all. ``row_at`` [spans]: index of each one's first
    row in the step. ``starts`` [spans]: the position of that row in its sequence. ``tables`` [blocks, stride]: the
    block ids of span i in column i. ``rows``: rows of all spans; ``longest``: of the longest one.
    """

    first: torch.Tensor
    row_at: torch.Tensor
    starts: torch.Tensor
    tables: torch.Tensor
    rows: int
    longest: int
