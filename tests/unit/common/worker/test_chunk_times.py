"""The parts of a prompt that a worker reports."""

from __future__ import annotations

from itertools import pairwise

import pytest

from common.net.messages import MAX_CHUNKS, PromptChunk
from common.worker.chunk_times import ChunkTimes


def test_each_step_is_a_chunk() -> None:
    times = ChunkTimes()
    times.add(0.0, 0.01, 64)
    times.add(0.02, 0.005, 32)
    assert times.reported() == (PromptChunk(0.0, 10.0, 64), PromptChunk(20.0, 5.0, 32))


@pytest.mark.parametrize("steps", [MAX_CHUNKS, MAX_CHUNKS + 1, 3 * MAX_CHUNKS, 1000])
def test_neighbours_are_merged_when_there_are_many(steps: int) -> None:
    times = ChunkTimes()
    for number in range(steps):
        times.add(0.01 * number, 0.008, 7)
    chunks = times.reported()
    assert len(chunks) <= MAX_CHUNKS
    assert sum(chunk.tokens for chunk in chunks) == 7 * steps and sum(chunk.steps for chunk in chunks) == steps
    assert chunks[0].start_ms == 0.0
    assert chunks[-1].start_ms + chunks[-1].ms == pytest.approx(10 * (steps - 1) + 8)
    for before, chunk in pairwise(chunks):
        assert before.start_ms + before.ms <= chunk.start_ms
