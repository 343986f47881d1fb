"""One step as flat tensors: all segments' rows behind one another, built once and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.attention.interface import Span
from common.engine.sampler import SampleRow
from common.sequence import Batch


@dataclass(frozen=True, slots=True)
class FlatStep:
    """T rows of one step.

    ``input_ids`` and ``position_ids`` int64 [1, T], positions restarting with every sequence; ``slots`` block id and
    offset in the block of each row, int64 [T] each; ``sampled`` the segments that want a token, and ``sample_rows``
    int64 [len(sampled)] their last rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: tuple[torch.Tensor, torch.Tensor]
    spans: tuple[Span, ...]
    sampled: tuple[int, ...]
    sample_rows: torch.Tensor


def flatten(batch: Batch, block_size: int) -> FlatStep:
    """The tensors of ``batch``."""
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    spans: list[Span] = []
    for segment, table in zip(batch.segments, batch.tables, strict=True):
        spans.append(Span(len(ids), segment.length, segment.start, table))
        positions += range(segment.start, segment.end)
        if segment.length == 1:
            ids.append(segment.sequence.tokens[segment.start])
            blocks.append(table[segment.start // block_size])
        else:
            ids += segment.sequence.tokens[segment.start : segment.end]
            blocks += _block_of_rows(table, segment.start, segment.end, block_size)
    position = torch.tensor(positions)
    sampled = tuple(index for index, segment in enumerate(batch.segments) if segment.wants_token)
    return FlatStep(
        torch.tensor(ids)[None],
        position[None],
        (torch.tensor(blocks), position % block_size),
        tuple(spans),
        sampled,
        torch.tensor([spans[index].row + spans[index].length - 1 for index in sampled], dtype=torch.int64),
    )


def _block_of_rows(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """The block of each position in ``[start, end)``."""
    first = start // block_size
    covering = torch.tensor(table[first : -(-end // block_size)])
    return covering.repeat_interleave(block_size)[start - first * block_size : end - first * block_size].tolist()


def rows_to_sample(batch: Batch, sampled: Sequence[int]) -> list[SampleRow]:
    """The tokens to choose, segment by segment, one per choice of its sequence; ``row`` counts sampled segments."""
    rows: list[SampleRow] = []
    for place, index in enumerate(sampled):
        sequence = batch.segments[index].sequence
        sampling = sequence.request.sampling
        rows += [
            SampleRow(place, sampling, choice, sequence.tokens, sequence.prompt_length) for choice in sequence.choices
        ]
    return rows
