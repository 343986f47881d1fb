"""One step as flat columns: all segments' rows behind one another, built once and shared by all layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from common.attention.interface import Span
from common.core.sequence import Batch
from common.engine.sampler import SampleRow


@dataclass(slots=True)
class FlatStep:
    """T rows of one step, in columns of int64 that C reads where they are.

    ``ids`` and ``positions`` [T], the latter restarting with every sequence; ``blocks`` and ``offsets`` [T] the slot of
    each row in the pool; ``sampled`` the segments that want a token, and ``kept`` their last rows, or the first row if
    there are none.
    """

    ids: array[int]
    positions: array[int]
    blocks: array[int]
    offsets: array[int]
    kept: array[int]
    spans: list[Span]
    sampled: list[int]

    def tensor(self, column: Literal["ids", "positions", "blocks", "offsets", "kept"]) -> torch.Tensor:
        """A column as torch sees it, in the same memory."""
        return torch.frombuffer(getattr(self, column), dtype=torch.int64)


def flatten(batch: Batch, block_size: int) -> FlatStep:
    """The columns of ``batch``, which has segments.

    A decode step does this on caches that the model has just swept, so it is the memory that is touched which counts:
    arrays of Python's and few objects.
    """
    ids, positions, blocks, offsets, kept = (array("q") for _ in range(5))
    spans: list[Span] = []
    sampled: list[int] = []
    for index, (segment, table) in enumerate(zip(batch.segments, batch.tables, strict=True)):
        tokens, start, length = segment.sequence.tokens, segment.start, segment.length
        end = start + length
        spans.append(Span(len(ids), length, start, table))
        if length == 1:
            ids.append(tokens[start])
            positions.append(start)
            blocks.append(table[start // block_size])
            offsets.append(start % block_size)
        else:
            ids.extend(tokens[start:end])
            positions.extend(range(start, end))
            blocks.extend([table[position // block_size] for position in range(start, end)])
            offsets.extend([position % block_size for position in range(start, end)])
        if end == len(tokens):
            sampled.append(index)
            kept.append(len(ids) - 1)
    if not sampled:
        kept.append(0)
    return FlatStep(ids, positions, blocks, offsets, kept, spans, sampled)


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
