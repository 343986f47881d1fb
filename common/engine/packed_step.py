"""Steps as the numbers that rank 0 of a tensor-parallel worker sends to the other ranks."""

from __future__ import annotations

from array import array
from itertools import pairwise

from common.attention.interface import Span
from common.engine.batch import FlatStep

_HEADER = 4
"""Numbers before the columns of a packed step: rows, kept rows, scored rows, spans."""
_SPAN = 4
"""Numbers per span: row, length, start, number of blocks."""
_WORD = 8
_REPLAY = 2 * _WORD
"""Bytes before the columns of a step that repeats a graph: its number of rows, and the index of its kind."""


def pack(step: FlatStep) -> list[array[int]]:
    """Return ``step`` as int64 columns: header, ids, positions, blocks, offsets, kept, scored, spans, block tables."""
    spans, tables = array("q"), array("q")
    for span in step.spans:
        spans.extend((span.row, span.length, span.start, len(span.blocks)))
        tables.extend(iter(span.blocks))  # they may be an array of another kind
    header = array("q", (len(step.ids), len(step.kept), len(step.scored), len(step.spans)))
    columns = [step.ids, step.positions, step.blocks, step.offsets, step.kept, step.scored]
    return [header, *columns, spans, tables]


def unpack(data: memoryview) -> FlatStep:
    """Invert :func:`pack` from the bytes of all columns; ``sampled`` stays empty, since only rank 0 samples."""
    numbers = array("q")
    numbers.frombytes(data)
    rows, kept, scored, spans = numbers[:_HEADER]
    bounds = [_HEADER]
    for size in (rows, rows, rows, rows, kept, scored, _SPAN * spans):
        bounds.append(bounds[-1] + size)
    *columns, described = (numbers[first:last] for first, last in pairwise(bounds))
    ids, positions, blocks, offsets, last_rows, scored_rows = columns
    at, found = bounds[-1], list[Span]()
    for row, length, start, count in zip(*(described[each::_SPAN] for each in range(_SPAN)), strict=True):
        found.append(Span(row, length, start, array("i", numbers[at : at + count])))
        at += count
    return FlatStep(ids, positions, blocks, offsets, last_rows, found, [], scored_rows)


def pack_replay(step: FlatStep, rows: int, kind: int) -> list[array[int]]:
    """Return ``step`` as :func:`pack`, to be computed by the graph of ``rows`` rows and of the kind with this index."""
    return [array("q", (rows, kind)), *pack(step)]


def unpack_replay(data: memoryview) -> tuple[FlatStep, int, int]:
    """Invert :func:`pack_replay` from the bytes of all columns."""
    rows, kind = data[:_REPLAY].cast("q")
    return unpack(data[_REPLAY:]), rows, kind
