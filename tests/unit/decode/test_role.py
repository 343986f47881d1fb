"""Decode workers: prompts that they compute themselves beside streams, and choices that move."""

from __future__ import annotations

from typing import Any

import pytest

from common.core.ids import pack_tokens
from common.core.request import Request
from common.net.messages import Generate, Resend
from common.worker.output_history import KEPT_S
from decode.role import DecodeWorker
from tests.fakes.oracle import OracleEngine, oracle_stream
from tests.pace import scaled
from tests.unit.workers import DEADLINE_S, Bench, make_request


def test_whole_requests_on_one_worker(bench: Bench) -> None:
    bench.add("colocated", OracleEngine(64))
    requests = [make_request(length, 20, n=n) for length, n in ((1, 1), (200, 1), (33, 3), (90, 2))]
    for request in requests:
        bench.send("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(*requests))
    for request in requests:
        bench.check(request)


@pytest.mark.parametrize(("role", "most"), [("decode", 64), ("colocated", 255)])
def test_decode_worker_limits_prompt_chunks(bench: Bench, role: str, most: int) -> None:
    """A decode worker limits prompt chunks to protect its streams; a colocated worker fills the step."""
    worker = bench.add(role, OracleEngine(64), max_num_batched_tokens=256)
    assert isinstance(worker, DecodeWorker)
    stream, prompt = make_request(1, 60), make_request(600, 5)
    bench.send(f"{role}-0", Generate(stream, 1))
    bench.until(lambda: worker.planner.running)
    step, chunks = worker.engine.step, list[int]()

    def seen(batch: Any) -> Any:
        if (tokens := batch.length - (len(batch.segments) - 1)) > 1 and len(batch.segments) > 1:
            chunks.append(tokens)
        return step(batch)

    worker.engine.step = seen  # type: ignore[method-assign]
    bench.send(f"{role}-0", Generate(prompt, 1))
    assert worker.channels.poll(scaled(DEADLINE_S)), "the stream must not end before the prompt arrives"
    bench.until(lambda: bench.done(stream, prompt))
    assert chunks[0] == most
    bench.check(stream)
    bench.check(prompt)


def test_choices_that_move_go_on_where_each_was(bench: Bench) -> None:
    bench.add("colocated", OracleEngine(64))
    request = make_request(40, 10, n=3)
    streams = [oracle_stream(request.prompt_tokens(), request.sampling.seed, c, 10) for c in range(3)]
    emitted = tuple(pack_tokens(stream[:length]) for stream, length in zip(streams, (4, 10, 1), strict=True))
    moved = Request(request.id, request.prompt, request.sampling, n=3, emitted=emitted, ended=(1,))
    for choice in (0, 2):
        bench.streams[request.id, 1, choice] = moved.emitted_tokens(choice)
    bench.send("colocated-0", Generate(moved, 1))
    bench.until(lambda: {(request.id, 1, 0), (request.id, 1, 2)} <= bench.finished.keys())
    assert bench.streams[request.id, 1, 0] == streams[0]
    assert bench.streams[request.id, 1, 2] == streams[2]
    assert (request.id, 1, 1) not in bench.streams


def test_a_request_that_can_never_fit_is_refused_in_words(bench: Bench) -> None:
    bench.add("colocated", OracleEngine(8))
    request = make_request(100, 100)
    bench.send("colocated-0", Generate(request, 1))
    bench.until(lambda: (request.id, 1) in bench.failed)
    failed = bench.failed[request.id, 1]
    assert failed.code == "too_long" and "200 tokens" in failed.detail and not failed.retriable


@pytest.mark.parametrize("logprobs", [None, 1])
def test_output_history_resends_finished_output_without_prompt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    worker = bench.add("colocated", OracleEngine(64))
    request = make_request(90, 6, n=2, logprobs=logprobs)
    bench.send("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(request))
    reported = {key: (stream, bench.finished[key]) for key, stream in bench.streams.items()}
    bench.finished.clear()
    for choice in range(2):
        bench.streams[request.id, 1, choice] = reported[request.id, 1, choice][0][:2]
        bench.send("colocated-0", Resend(request.id, 1, choice, 2))
    bench.until(lambda: len(bench.finished) == 2)
    assert {key: (stream, bench.finished[key]) for key, stream in bench.streams.items()} == reported
    kept = worker._output_history._outputs  # type: ignore[attr-defined]
    assert [len(each.tokens) for each in kept.values()] == [4 * 6, 4 * 6]
    assert [len(each.logprobs) for each in kept.values()] == [6 if logprobs else 0] * 2
    now = worker.clock() + KEPT_S + 1
    monkeypatch.setattr(worker, "clock", lambda: now)
    bench.turn()
    assert not kept
