"""The budget of a decode worker for prompt tokens beside its streams."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from common.core.ids import new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence
from decode.chunk_budget import BETWEEN_STREAMS, FIRST_TOKENS, MULTIPLE, STALE_STEPS, TIMES, ChunkBudget

Seconds = Callable[[int, int], float]
"""Seconds of a step, given its numbers of streams and of prompt tokens."""


def step(streams: int, tokens: int) -> Batch:
    length = max(2, tokens)
    sequence = Sequence(Request(new_request_id(), pack_tokens([1] * length), SamplingParams(1, 0)), 0)
    chunk = [Segment(sequence, 0, tokens)] if tokens else []
    return Batch((*[Segment(sequence, 0, 1)] * streams, *chunk), ([],) * (streams + len(chunk)))


def taught(seconds: Seconds, *steps: tuple[int, int]) -> ChunkBudget:
    chunks = ChunkBudget()
    for streams, tokens in steps:
        chunks.took(step(streams, tokens), seconds(streams, tokens))
    return chunks


def linear(streams: int, tokens: int) -> float:
    return 0.01 + 0.001 * streams + 0.0001 * tokens


def test_a_step_with_a_chunk_takes_as_many_times_as_long_as_it_may() -> None:
    chunks = taught(linear, (10, 0), (20, 0), (30, 0), (10, 64))
    for streams, alone in ((10, 0.02), (20, 0.03), (30, 0.04)):
        most = chunks.most(streams, more_come=True)
        assert most is not None and most % MULTIPLE == 0
        room = (TIMES - 1) * alone / 0.0001
        assert room - MULTIPLE <= most <= room


def test_chunk_budget_measures_step_without_chunk_first() -> None:
    """An estimate from fewer streams would be too low and a token's cost would seem too high. Chunks would then stay
    small for as long as there are prompts, since no step would be without one."""
    chunks = taught(linear, (8, 0), (8, 64))
    assert chunks.most(64, more_come=True) == 0
    chunks.took(step(64, 0), linear(64, 0))
    assert chunks.most(64, more_come=True) == 1472
    assert chunks.most(63, more_come=True) == 1472, "about as many"


def test_it_is_looked_at_again_after_a_while() -> None:
    chunks = taught(linear, (8, 0))
    for _ in range(STALE_STEPS):
        assert chunks.most(8, more_come=True)
        chunks.took(step(8, 64), linear(8, 64))
    assert chunks.most(8, more_come=True) == 0
    chunks.took(step(8, 0), 2 * linear(8, 0))
    assert chunks.most(8, more_come=True) == 720, "what was known does not count any more"


def test_as_long_as_nothing_is_known_chunks_are_small() -> None:
    assert ChunkBudget().most(3, more_come=True) == 0, "not even what streams take"
    assert taught(linear, (3, 0)).most(3, more_come=True) == FIRST_TOKENS
    assert taught(linear, (3, FIRST_TOKENS), (3, 0)).most(3, more_come=True) == FIRST_TOKENS


def test_chunk_budget_learns_nothing_from_small_chunks() -> None:
    """The last tokens of a prompt take no more time than the streams' steps vary by."""
    chunks = taught(linear, (10, 0), (10, 64))
    before = chunks.most(10, more_come=True)
    for _ in range(STALE_STEPS - 2):
        chunks.took(step(10, 2), linear(10, 2) + 0.005)
    assert chunks.most(10, more_come=True) == before


def test_a_first_chunk_that_took_too_long_is_forgotten() -> None:
    chunks = taught(linear, (10, 0))
    chunks.took(step(10, 64), linear(10, 64) + 0.5)
    for _ in range(1000):
        most = chunks.most(10, more_come=True)
        assert most is not None
        chunks.took(step(10, most), linear(10, most))
    chunks.took(step(10, 0), linear(10, 0))
    assert chunks.most(10, more_come=True) in (384, 400)


def test_tokens_that_add_nothing_for_long_are_no_error() -> None:
    chunks = taught(linear, (10, 0), (10, 64))
    for _ in range(20_000):  # the average halves every seven steps
        chunks.took(step(10, 0), 0.1)
        chunks.took(step(10, 512), 0.09)
    most = chunks.most(10, more_come=True)
    assert most is not None and most > 10_000


def test_chunk_budget_follows_recent_step_times() -> None:
    chunks = taught(linear, (10, 0), (10, 64))
    for _ in range(60):
        chunks.took(step(10, 0), 0.1)
        chunks.took(step(10, 96), 0.1 + 96 * 0.0005)
    assert chunks.most(10, more_come=True) == 384


def test_without_streams_a_prompt_gets_the_worker_unless_some_may_come() -> None:
    assert ChunkBudget().most(0, more_come=False) is None
    assert ChunkBudget().most(0, more_come=True) == BETWEEN_STREAMS


steps = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 512), st.floats(0.0, 5.0)), max_size=40)


@given(steps, st.integers(1, 64))
@example([(0, 16, 2.2e-313)], 1)
def test_whatever_steps_take_a_prompt_gets_on(seen: list[tuple[int, int, float]], streams: int) -> None:
    chunks = ChunkBudget()
    for count, tokens, seconds in seen:
        if count or tokens > 1:
            chunks.took(step(count, 0 if tokens == 1 else tokens), seconds)
    if chunks.most(streams, more_come=True) == 0:
        chunks.took(step(streams, 0), 0.01)
    most = chunks.most(streams, more_come=True)
    assert most is not None and most >= MULTIPLE
