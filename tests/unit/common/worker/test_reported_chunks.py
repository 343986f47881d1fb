"""Each role reports the steps in which a prompt was computed, with its first token and once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from common.core.ids import pack_tokens
from common.net.messages import Abort, Generate, PromptChunk, Timing
from tests.fakes.oracle import OracleEngine, oracle_stream
from tests.unit.workers import Bench, make_request


def check(timing: Timing, tokens: int, steps: int) -> None:
    """Check that the chunks of a prompt cover it, follow each other, and end with the prompt."""
    chunks: Sequence[PromptChunk] = timing.chunks
    assert (sum(chunk.tokens for chunk in chunks), len(chunks)) == (tokens, steps)
    at_ms = 0.0
    for chunk in chunks:
        assert chunk.start_ms >= at_ms - 1e-6 and chunk.ms >= 0.0
        at_ms = chunk.start_ms + chunk.ms
    assert chunks[0].start_ms == 0.0 and at_ms == pytest.approx(timing.values["prefill_ms"])


@pytest.mark.parametrize(("prompt", "steps"), [(1, 1), (64, 1), (65, 2), (200, 4)])
def test_a_prefill_worker_reports_its_steps(pair: Bench, prompt: int, steps: int) -> None:
    request = make_request(prompt, 5)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request))
    pair.shipped(request)
    (computed,) = [each for each in pair.timings if each.chunks]
    check(computed, prompt, steps)
    assert "kv_bytes" not in computed.values and "decode_wait_ms" not in computed.values


@pytest.mark.parametrize("role", ["decode", "colocated"])
def test_a_worker_that_computes_prompts_beside_streams_reports_their_steps_only(bench: Bench, role: str) -> None:
    worker = bench.add(role, OracleEngine(64), max_num_batched_tokens=32)
    first, second, third = make_request(100, 40, n=2), make_request(90, 4), make_request(1, 4)
    bench.send(f"{role}-0", Generate(first, 1))
    bench.until(lambda: bench.streams[first.id, 1, 0])
    for request in (second, third):
        bench.send(f"{role}-0", Generate(request, 1))
    bench.until(lambda: bench.done(first, second, third))
    reports = {
        request.id: [each for each in bench.timings if each.request == request.id] for request in (first, second)
    }
    check(*reports[first.id], tokens=100, steps=4)
    (computed,) = reports[second.id]
    check(computed, 90, len(computed.chunks))
    assert len(computed.chunks) >= 3
    assert not worker._computing  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", ["decode", "colocated"])
@pytest.mark.parametrize(("choices", "budget", "steps"), [(1, 32, 5), (2, 512, 1)])
def test_a_worker_that_goes_on_with_an_answer_reports_its_steps_up_to_the_first_token(
    bench: Bench, role: str, choices: int, budget: int, steps: int
) -> None:
    """The output of the earlier attempt is computed again with the prompt. A step in which several choices are is one
    chunk."""
    worker = bench.add(role, OracleEngine(64), max_num_batched_tokens=budget)
    request = make_request(100, 60, n=choices)
    streams = [oracle_stream(request.prompt_tokens(), request.sampling.seed, each, 60) for each in range(choices)]
    moved = msgspec.structs.replace(request, emitted=tuple(pack_tokens(stream[:50]) for stream in streams))
    for choice in range(choices):
        bench.streams[moved.id, 1, choice] = moved.emitted_tokens(choice)
    bench.send(f"{role}-0", Generate(moved, 1))
    bench.until(lambda: bench.done(moved))
    bench.check(moved)
    (computed,) = bench.timings
    check(computed, 150 * choices, steps)
    assert computed.values["cached_tokens"] == 0.0 and not worker._computing  # type: ignore[attr-defined]


def test_an_aborted_prompt_leaves_nothing(bench: Bench) -> None:
    worker = bench.add("decode", OracleEngine(64), max_num_batched_tokens=16)
    request = make_request(960, 5)  # 60 steps: some are left when the abort arrives
    bench.send("decode-0", Generate(request, 1))
    bench.until(lambda: worker._computing)  # type: ignore[attr-defined]
    bench.send("decode-0", Abort(request.id, 1))
    bench.until(bench.quiet)
    assert not worker._computing and not bench.timings  # type: ignore[attr-defined]
