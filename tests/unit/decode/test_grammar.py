"""Constrained outputs on workers: the same tokens wherever they are computed, and nothing but what the grammar
allows."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from common.core.ids import RequestId, pack_tokens
from common.core.request import FinishReason, Request, SamplingParams
from common.grammar.masks import StepMasks
from common.net.messages import Generate, Resend, Tokens
from decode.role import DecodeWorker
from tests.fakes.constrained import EOS, ConstrainedOracle, text_of
from tests.fakes.oracle import VOCABULARY
from tests.fakes.overlapped import OverlappedOracle
from tests.schemas import Schema, random_schema, schema_grammar
from tests.seeds import seeds
from tests.unit.workers import Bench

pytestmark = pytest.mark.usefixtures("patient_masks")
_numbers = itertools.count(1 << 32)
SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 12},
        "identifier": {"enum": ["the first of the two", "the second of the two"]},
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["description", "identifier", "items"],
    "additionalProperties": False,
}


def make(seed: int, schema: Schema = SCHEMA, prompt: int = 40, n: int = 1, **fields: Any) -> Request:
    sampling = SamplingParams(
        **{"max_tokens": 150, "seed": seed, "eos_token_ids": (EOS,), "grammar": schema_grammar(schema), **fields}
    )
    tokens = random.Random(seed).choices(range(1000), k=prompt)
    return Request(RequestId(next(_numbers).to_bytes(16, "big")), pack_tokens(tokens), sampling, n=n)


def again(request: Request, *emitted: list[int]) -> Request:
    """Return the same request as another one, of which the client already has ``emitted``."""
    number = RequestId(next(_numbers).to_bytes(16, "big"))
    return Request(number, request.prompt, request.sampling, request.n, tuple(pack_tokens(each) for each in emitted))


def outputs(bench: Bench, request: Request) -> list[list[int]]:
    return [bench.streams[request.id, 1, choice] for choice in range(request.n)]


def run_alone(bench: Bench, requests: list[Request], worker: str) -> list[list[list[int]]]:
    for request in requests:
        bench.send(worker, Generate(request, 1))
    bench.until(lambda: bench.done(*requests) or bench.failed)
    assert not bench.failed
    return [outputs(bench, request) for request in requests]


def check(ids: list[int], schema: Schema = SCHEMA) -> None:
    assert ids[-1] == EOS and EOS not in ids[:-1]
    jsonschema.validate(json.loads(text_of(ids[:-1])), schema)


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_same_tokens_on_one_worker_and_after_a_hand_off(bench: Bench, logprobs: int | None) -> None:
    for role in ("colocated", "prefill", "decode"):
        bench.add(role, ConstrainedOracle(256))
    requests = [make(seed, n=1 + seed % 3, logprobs=logprobs, prompt=30 + 9 * seed) for seed in range(8)]
    expected = run_alone(bench, requests, "colocated-0")
    moved = [again(request) for request in requests]
    for request in moved:
        bench.place(request, "prefill-1", "decode-2")
    bench.until(lambda: bench.done(*moved) or bench.failed)
    assert [outputs(bench, request) for request in moved] == expected
    for ids in itertools.chain(*expected):
        check(ids)


def test_forced_tokens_are_computed_and_sent_together(bench: Bench) -> None:
    worker = bench.add("colocated", ConstrainedOracle(64))
    request = make(3, {"const": "one long text that is the only one of this schema, word by word"})
    spans = list[int]()
    take = bench._spans
    bench._spans = lambda message: (spans.extend(message.counts), take(message))[1]  # type: ignore[method-assign]
    (ids,) = run_alone(bench, [request], "colocated-0")[0]
    check(ids, {"const": "one long text that is the only one of this schema, word by word"})
    assert len(ids) > 8 and sum(spans) == len(ids)
    assert len(spans) <= 4, "a first token, perhaps a forced one that its mask shows, and the rest"
    assert worker.engine.steps <= 8  # type: ignore[attr-defined]


def test_log_probabilities_of_forced_tokens_are_zero(bench: Bench) -> None:
    """With the token itself as the most likely one; the others keep the model's own."""
    bench.add("colocated", ConstrainedOracle(64))
    seen: list[Any] = []
    take = bench._spans

    def noted(message: Tokens) -> None:
        seen.extend(message.logprobs)
        take(message)

    bench._spans = noted  # type: ignore[method-assign]
    request = make(5, logprobs=1)
    (ids,) = run_alone(bench, [request], "colocated-0")[0]
    assert len(seen) == len(ids)
    forced = [entry.logprob == 0.0 for entry in seen]
    assert forced[-1] and not forced[0] and sum(forced) > 8 and not all(forced[1:])
    for token, entry in zip(ids, seen, strict=True):
        assert entry.top_ids == pack_tokens([token]) and entry.top == (entry.logprob,)
        assert entry.logprob in (0.0, -token / VOCABULARY)


@pytest.mark.parametrize("cut", [1, 3, 8, *(pytest.param(cut, marks=pytest.mark.whole) for cut in (2, 5, 13, 21))])
@pytest.mark.parametrize("path", ["generate", "hand-off"])
def test_same_tokens_after_a_migration_at_any_token(bench: Bench, cut: int, path: str) -> None:
    """Also in the middle of forced tokens."""
    for role in ("colocated", "prefill", "decode"):
        bench.add(role, ConstrainedOracle(256))
    requests = [make(seed, logprobs=0) for seed in range(6)]
    expected = run_alone(bench, requests, "colocated-0")
    moved = []
    for request, (ids,) in zip(requests, expected, strict=True):
        moved.append(again(request, ids[: min(cut, len(ids) - 1)]))
        bench.streams[moved[-1].id, 1, 0] = moved[-1].emitted_tokens(0)
        if path == "generate":
            bench.send("colocated-0", Generate(moved[-1], 1))
        else:
            bench.place(moved[-1], "prefill-1", "decode-2")
    bench.until(lambda: bench.done(*moved) or bench.failed)
    assert not bench.failed
    assert [outputs(bench, request) for request in moved] == expected


def test_same_tokens_after_a_preemption(bench: Bench) -> None:
    bench.add("colocated", ConstrainedOracle(256))
    small = bench.add("colocated", ConstrainedOracle(18))
    long = {"type": "array", "items": {"type": "string", "minLength": 60, "maxLength": 80}, "minItems": 3}
    requests = [make(seed, long, prompt=20, max_tokens=120) for seed in range(8)]
    expected = run_alone(bench, requests, "colocated-0")
    squeezed = [again(request) for request in requests]
    assert run_alone(bench, squeezed, "colocated-1") == expected
    assert small.planner.preemptions > 0


def test_same_tokens_if_masks_are_late(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose mask is late takes part in the next step again, on the same position."""
    worker = bench.add("colocated", ConstrainedOracle(256))
    requests = [make(seed, logprobs=0) for seed in range(6)]
    expected = run_alone(bench, requests, "colocated-0")
    steps, rng, finish = worker.engine.steps, random.Random(1), StepMasks.finish  # type: ignore[attr-defined]

    def late(masks: StepMasks) -> None:
        finish(masks)
        for index in [index for index in masks.ready if rng.random() < 0.5]:
            del masks.ready[index]
            masks.late.add(index)

    monkeypatch.setattr(StepMasks, "finish", late)
    assert run_alone(bench, [again(request) for request in requests], "colocated-0") == expected
    assert worker.engine.steps > 1.5 * steps  # type: ignore[attr-defined]


class OverlappedConstrained(ConstrainedOracle, OverlappedOracle):
    """Launches the steps of plain streams."""


def test_same_tokens_beside_streams_whose_steps_are_launched(bench: Bench) -> None:
    """A step with a constrained row is not launched before the last one is read; steps without one are."""
    engine = OverlappedConstrained(256)
    bench.add("colocated", ConstrainedOracle(256))
    bench.add("colocated", engine)
    requests = [make(seed, grammar="" if seed % 2 else schema_grammar(SCHEMA)) for seed in range(8)]
    expected = run_alone(bench, requests, "colocated-0")
    rng, moved = random.Random(1), [again(request) for request in requests]
    for request in moved:
        bench.send("colocated-1", Generate(request, 1))
        for _ in range(rng.randrange(30)):
            bench.turn()
    bench.until(lambda: bench.done(*moved) or bench.failed)
    assert [outputs(bench, request) for request in moved] == expected
    assert engine.launched > 20


def test_a_lost_span_is_sent_again_as_it_was(bench: Bench) -> None:
    bench.add("colocated", ConstrainedOracle(64))
    request = make(4, logprobs=1)
    (ids,) = run_alone(bench, [request], "colocated-0")[0]
    seen: list[Any] = []
    take = bench._spans
    bench._spans = lambda message: (seen.extend(message.logprobs), take(message))[1]  # type: ignore[method-assign]
    bench.finished.clear()
    bench.streams[request.id, 1, 0] = ids[:2]
    bench.send("colocated-0", Resend(request.id, 1, 0, 2))
    bench.until(lambda: bench.finished)
    assert bench.streams[request.id, 1, 0] == ids
    assert [entry.top_ids for entry in seen] == [pack_tokens([token]) for token in ids[2:]]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 12])
def test_max_tokens_cuts_forced_tokens(bench: Bench, most: int) -> None:
    for role in ("colocated", "prefill", "decode"):
        bench.add(role, ConstrainedOracle(64))
    (whole,) = run_alone(bench, [make(6)], "colocated-0")[0]
    local, moved = make(6, max_tokens=most), make(6, max_tokens=most)
    bench.send("colocated-0", Generate(local, 1))
    bench.place(moved, "prefill-1", "decode-2")
    bench.until(lambda: bench.done(local, moved))
    for request in (local, moved):
        assert bench.streams[request.id, 1, 0] == whole[:most]
        assert bench.finished[request.id, 1, 0] is FinishReason.LENGTH


def test_forced_tokens_do_not_count_as_a_recomputation(bench: Bench) -> None:
    worker = bench.add("decode", ConstrainedOracle(64))
    assert isinstance(worker, DecodeWorker)
    seen = list[bool]()
    plan = worker.plan

    def planned() -> Any:
        runs = [each for each in worker.planner.sequences() if each.output_length and each.missing > 1]
        if runs:
            seen.append(worker._has_recomputed_stream() or bool(worker.planner.resting()))
        batch = plan()
        if batch is not None and runs:
            assert batch.streams == len(batch.segments) and batch.prompt_tokens == 0
        return batch

    worker.plan = planned  # type: ignore[method-assign]
    run_alone(bench, [make(7)], "decode-0")
    assert seen and not any(seen)


def test_a_grammar_that_cannot_be_obeyed_fails_its_own_request(bench: Bench) -> None:
    bench.add("colocated", ConstrainedOracle(64))
    good, bad = make(1), make(2, grammar="start: /(/")
    unending = make(3, {"const": 1}, min_tokens=50)
    for request in (bad, good, unending):
        bench.send("colocated-0", Generate(request, 1))
    bench.until(lambda: bench.done(good) and len(bench.failed) == 2)
    failed = bench.failed[bad.id, 1]
    assert failed.code == "grammar_failed" and "cannot be compiled" in failed.detail and not failed.retriable
    check(outputs(bench, good)[0])


@pytest.mark.parametrize("role", ["colocated", "prefill"])
def test_a_request_without_output_is_not_failed_by_what_its_output_would_be(bench: Bench, role: str) -> None:
    worker = bench.add(role, ConstrainedOracle(64))
    impossible = make(1, max_tokens=0, allowed_token_ids=pack_tokens([5]), bad_words=((5,),))
    broken = make(2, max_tokens=0, grammar="start: /(/")
    for request in (impossible, broken):
        bench.send(f"{role}-0", Generate(request, 1))
    bench.until(lambda: bench.done(impossible, broken) or bench.failed)
    assert not bench.failed and not worker.holdings()
    assert [bench.finished[request.id, 1, 0] for request in (impossible, broken)] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("seed", seeds(12, few=4))
def test_random_schemas_give_valid_documents_on_both_paths(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    for role in ("colocated", "prefill", "decode"):
        bench.add(role, ConstrainedOracle(256))
    schemas = [random_schema(rng) for _ in range(6)]
    requests = [make(seed * 100 + at, schema, max_tokens=200) for at, schema in enumerate(schemas)]
    expected = run_alone(bench, requests, "colocated-0")
    moved = [again(request) for request in requests]
    for request in moved:
        bench.place(request, "prefill-1", "decode-2")
    bench.until(lambda: bench.done(*moved) or bench.failed)
    assert [outputs(bench, request) for request in moved] == expected
    for request, schema, (ids,) in zip(requests, schemas, expected, strict=True):
        if bench.finished[request.id, 1, 0] is FinishReason.STOP:
            check(ids, schema)
