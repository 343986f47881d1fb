"""One step as flat columns: the rows of all segments one after another, built once and shared by all layers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from common.attention.interface import Span
from common.core.sequence import Batch, Segment
from common.engine.restrictions import restricted
from common.engine.sampler import SampleRow
from common.grammar.masks import SequenceGrammar


class Scores(NamedTuple):
    """``rows`` of a step's ``scored`` rows belong to the segment of index ``segment``. The first of them is at
    ``position`` of its sequence."""

    segment: int
    position: int
    rows: int


ColumnName = Literal["ids", "positions", "blocks", "offsets", "kept", "scored", "targets"]


def _empty() -> array[int]:
    return array("q")


@dataclass(slots=True)
class FlatStep:
    """The T rows of one step, as int64 columns that C reads in place.

    ``ids`` [T]: token ids. ``positions`` [T]: counted within each sequence. ``blocks`` and ``offsets`` [T]: the slot of
    each row in the pool. ``spans``: one per segment. ``sampled``: indices of the segments that want a token. ``kept``:
    the last row of each of these, or row 0 if there are none. ``scored``: the rows whose logits give log-probabilities
    of prompt tokens, and ``targets`` these tokens, both [S]; ``scores`` tells to which segments they belong.
    """

    ids: array[int]
    positions: array[int]
    blocks: array[int]
    offsets: array[int]
    kept: array[int]
    spans: list[Span]
    sampled: list[int]
    scored: array[int] = field(default_factory=_empty)
    targets: array[int] = field(default_factory=_empty)
    scores: list[Scores] = field(default_factory=list)

    def tensor(self, column: ColumnName) -> torch.Tensor:
        """Return a column as an int64 tensor [T] (``kept``: [n], ``scored`` and ``targets``: [S]) over the same
        memory."""
        return torch.frombuffer(getattr(self, column), dtype=torch.int64)


@dataclass(slots=True)
class DeviceStep(FlatStep):
    """A step whose columns were ``uploaded`` to a device."""

    uploaded: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, step: FlatStep, uploaded: Mapping[str, torch.Tensor]) -> DeviceStep:
        """Return ``step`` with ``uploaded``: each column by name, int64 [T] (``kept``: [n]) on the device."""
        return cls(
            step.ids, step.positions, step.blocks, step.offsets, step.kept, step.spans, step.sampled, step.scored,
            step.targets, step.scores, uploaded,
        )  # fmt: skip

    def tensor(self, column: ColumnName) -> torch.Tensor:
        """Return a column as an int64 tensor on the device, of the same length."""
        return self.uploaded[column]


def flatten(batch: Batch, block_size: int) -> FlatStep:
    """Return the columns of ``batch``, which has at least one segment.

    In a decode step this runs just after the model's weights have displaced everything else from the CPU's caches. Its
    cost is therefore the memory that it touches, which is why it uses arrays and creates few objects.
    """
    ids, positions, blocks, offsets, kept = (array("q") for _ in range(5))
    spans: list[Span] = []
    sampled: list[int] = []
    scoring: list[tuple[int, int, Segment]] = []
    for index, (segment, table) in enumerate(zip(batch.segments, batch.tables, strict=True)):
        tokens, start, length = segment.sequence.tokens, segment.start, segment.length
        end = start + length
        if segment.sequence.to_score > start:
            scoring.append((index, len(ids) - start, segment))
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
    step = FlatStep(ids, positions, blocks, offsets, kept, spans, sampled)
    for index, offset, segment in scoring:
        _add_scores(step, index, offset, segment)
    return step


def _add_scores(step: FlatStep, index: int, offset: int, segment: Segment) -> None:
    """Add the rows of segment ``index`` that give log-probabilities. ``offset``: the row of position p is p plus it."""
    if positions := segment.rows_to_score:
        step.scored.extend(range(positions.start + offset, positions.stop + offset))
        step.targets.extend(segment.sequence.tokens[positions.start + 1 : positions.stop + 1])
        step.scores.append(Scores(index, positions.start, len(positions)))


def rows_to_sample(
    batch: Batch, sampled: Sequence[int], vocab_size: int, masks: Mapping[int, SequenceGrammar] | None = None
) -> list[SampleRow]:
    """Return the tokens to sample: for each segment in ``sampled``, one per choice of its sequence. ``row`` is the
    segment's index in ``sampled``. ``masks``: the grammars of those segments that have one."""
    rows: list[SampleRow] = []
    for place, index in enumerate(sampled):
        sequence = batch.segments[index].sequence
        sampling, grammar = sequence.request.sampling, (masks or {}).get(index)
        mask, forced = (None, False) if grammar is None else (grammar.mask, grammar.certain)
        limits = restricted(sequence, mask, vocab_size), forced
        rows += [
            SampleRow(place, sampling, choice, sequence.tokens, sequence.prompt_length, *limits)
            for choice in sequence.choices
        ]
    return rows
