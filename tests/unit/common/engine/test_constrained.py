"""Constrained sampling by real engines: with a CPU's sampler and with that of a GPU, beside all other parameters."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import pytest
import torch

from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import FinishReason, Request, SamplingParams
from common.core.sequence import Batch, Segment, Sequence, StepResult
from common.engine.runner import ModelEngine
from common.grammar import limits, masks
from common.grammar.masks import Grammars, SequenceGrammar
from common.grammar.matcher import Matcher
from tests.fakes.constrained import allowed
from tests.models import EOS, VOCAB
from tests.reference import greedy
from tests.schemas import random_schema, schema_grammar
from tests.seeds import seeds
from tests.unit.common.engine.test_device_steps import make_engine

pytestmark = pytest.mark.usefixtures("patient_masks")
MOST, ROWS, TABLE = 120, 8, 9
"""Most output tokens, sequences of a step, and blocks of each."""


@pytest.fixture(scope="module")
def engines(checkpoint: Callable[[str], Path]) -> Iterator[tuple[ModelEngine, ModelEngine]]:
    """The same model with a CPU's steps and with those of a GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = checkpoint("llama")
    both = tuple(make_engine(path, "cpu", as_on_gpu=each, blocks=ROWS * TABLE) for each in (False, True))
    yield both[0], both[1]
    for engine in both:
        engine.close()
    torch.set_num_threads(threads)


@pytest.fixture(params=[0, 1], ids=["cpu", "as on a GPU"])
def engine(engines: tuple[ModelEngine, ModelEngine], checkpoint: Callable[[str], Path], request: Any) -> Iterator[Any]:
    chosen = engines[request.param]
    with_grammars(chosen, checkpoint("llama"))
    yield chosen
    chosen.grammars.close()


def with_grammars(engine: ModelEngine, path: Path) -> None:
    engine.grammars = Grammars(path / "tokenizer.json", VOCAB, (EOS,))


def make(sampling: SamplingParams, prompt: int = 5, n: int = 1) -> Sequence:
    tokens = random.Random(sampling.seed).choices(range(10, VOCAB), k=prompt)
    return Sequence(Request(new_request_id(), pack_tokens(tokens), sampling, n=n), 0)


def constrained(grammar: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MOST, "seed": 7, "eos_token_ids": (EOS,), "grammar": grammar, **fields})


def step(engine: ModelEngine, sequences: list[Sequence]) -> tuple[list[Sequence], StepResult]:
    """Run a step of the unfinished of ``sequences``, each in blocks of its own."""
    going = [(at, one) for at, one in enumerate(sequences) if one.finish is FinishReason.RUNNING]
    tables = [[BlockId(TABLE * at + block) for block in range(TABLE)] for at, _ in going]
    segments = [Segment(one, one.computed, one.missing) for _, one in going]
    return [one for _, one in going], engine.step(Batch(tuple(segments), tuple(tables)))


def run(engine: ModelEngine, sequences: list[Sequence], *, forces: bool = True) -> None:
    """Run all sequences to their ends, as a decode worker does; ``forces``: with forced tokens taken at once."""
    grammars = engine.grammars
    assert grammars is not None and len(sequences) <= ROWS
    while any(one.finish is FinishReason.RUNNING for one in sequences):
        going, result = step(engine, sequences)
        assert not result.errors and not result.refusals
        for at, one in enumerate(going):
            one.computed = len(one.tokens) - (at in result.late)
            if at in result.late:
                assert not result.tokens[at]
                continue
            one.append(result.tokens[at][0], next(iter(result.logprobs[at]), None))
            if forces and one.constrained and one.finish is FinishReason.RUNNING:
                for token in grammars.force(one):
                    if one.force(token) is not FinishReason.RUNNING:
                        break


def text(engine: ModelEngine, ids: list[int]) -> str:
    assert engine.grammars is not None
    return engine.grammars._compiled.tokenizer().decode_str([token for token in ids if token != EOS])


# -- whole outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(25, few=4))
def test_outputs_are_valid_documents_of_random_schemas(engine: ModelEngine, seed: int) -> None:
    """Of a model with random weights, greedy and at high temperatures, with penalties: whenever the end is a stop."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(ROWS)]
    others = [
        {"temperature": rng.choice([0.0, 1.0, 3.0])},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 30},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {40: 100.0, EOS: -100.0}},
    ]
    sequences = [
        make(constrained(schema_grammar(schema, spaces=at % 2 == 1), seed=seed * 100 + at, **others[at % 4]))
        for at, schema in enumerate(schemas)
    ]
    run(engine, sequences)
    for schema, one in zip(schemas, sequences, strict=True):
        if one.finish is FinishReason.STOP:
            assert one.output[-1] == EOS
            jsonschema.validate(json.loads(text(engine, one.output)), schema)
    assert sum(one.finish is FinishReason.STOP for one in sequences) > ROWS // 2


def test_forced_tokens_are_those_that_masks_leave(engines: Any, checkpoint: Callable[[str], Path]) -> None:
    """Taken at once or sampled one by one, with a CPU's sampler or a GPU's: the same tokens and log-probabilities."""
    rng, outputs = random.Random(3), []
    schemas = [random_schema(rng) for _ in range(ROWS)]
    for engine in engines:
        with_grammars(engine, checkpoint("llama"))
        for forces in (True, False):
            sequences = [
                make(constrained(schema_grammar(schema), seed=at, temperature=0.8, logprobs=at % 3))
                for at, schema in enumerate(schemas)
            ]
            run(engine, sequences, forces=forces)
            outputs.append([(one.output, one.logprobs, one.finish) for one in sequences])
        engine.grammars.close()
    first = outputs[0]
    for other in outputs[1:]:
        for (ids, logprobs, finish), (ids2, logprobs2, finish2) in zip(first, other, strict=True):
            assert (ids, finish) == (ids2, finish2)
            for one, two in zip(logprobs, logprobs2, strict=True):
                assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
                assert (one.logprob == 0.0) == (two.logprob == 0.0) and one.top_ids == two.top_ids
    assert any(entry.logprob == 0.0 for _, logprobs, _ in first for entry in logprobs)


# -- single steps -----------------------------------------------------------------------------------------------------


def test_every_choice_takes_an_allowed_token_and_the_models_own_log_probability(engine: ModelEngine) -> None:
    grammar = "start: /[0-9]+/"
    free = make(SamplingParams(5, 7, logprobs=20))
    one = make(constrained(grammar, temperature=2.0, logprobs=1), n=6)
    result = step_until_ready(engine, [one, free])
    matcher = one.matcher
    assert isinstance(matcher, SequenceGrammar)
    assert set(result.tokens[0]) <= set(allowed(matcher.mask)) and len(result.tokens[0]) == 6
    plain = engine.step(Batch((Segment(make(SamplingParams(5, 7, logprobs=0)), 0, 5),), ([BlockId(0)],)))
    assert plain.tokens[0] == result.tokens[1], "rows without a grammar are not touched"
    best = result.logprobs[1][0]
    for entry in result.logprobs[0]:
        assert entry.top_ids == best.top_ids[:1] and entry.top_logprobs == pytest.approx(best.top_logprobs[:1])
        assert entry.logprob < 0


def step_until_ready(engine: ModelEngine, sequences: list[Sequence]) -> StepResult:
    for _ in range(200):
        _, result = step(engine, sequences)
        if not result.late:
            return result
        for one in sequences:
            one.computed = 0
    raise AssertionError("the mask never comes")


@pytest.mark.parametrize("other", [{"min_tokens": 5}, {"logit_bias": {}}])
def test_a_row_with_nothing_left_fails_alone_in_words(engine: ModelEngine, other: dict[str, Any]) -> None:
    """The only thing that may follow is an end, which ``min_tokens`` forbids."""
    one, two = make(constrained('start: ""', **other)), make(greedy(5))
    result = step_until_ready(engine, [one, two])
    assert len(result.tokens[1]) == 1 and not result.errors
    if "min_tokens" in other:
        assert result.refusals.keys() == {0} and "no token is left" in result.refusals[0].words
        assert not result.tokens[0]
    else:
        assert result.tokens[0] == [EOS]


def test_an_engine_without_grammars_refuses_them(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine, "grammars", None)
        _, result = step(engine, [make(constrained('start: "a"')), make(greedy(5))])
    assert result.refusals.keys() == {0} and not result.tokens[0] and result.tokens[1]


# -- late and slow masks ----------------------------------------------------------------------------------------------


def test_a_late_row_is_left_out_and_gets_the_same_token_later(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step does not wait for the mask of a suspect, and samples the other rows."""
    gate = Event()
    fill = Matcher.fill
    monkeypatch.setattr(Matcher, "fill", lambda self, mask: (gate.wait(30), fill(self, mask))[1])
    sampling = constrained("start: /[a-z ]{9,}/", temperature=1.0)
    one, two = make(sampling), make(greedy(5))
    _, result = step(engine, [one, two])
    assert result.late == {0} and not result.tokens[0] and result.tokens[1]
    gate.set()
    one.computed = len(one.tokens) - 1
    result = step_until_ready(engine, [one])
    again = make(sampling)
    assert step_until_ready(engine, [again]).tokens == result.tokens


def test_slow_masks_fail_their_request_after_two(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LIMIT_S", 0.0)
    one = make(constrained("start: /[a-z ]{9,}/"))
    results = [step(engine, [one])[1]]
    one.computed = len(one.tokens)
    assert not results[0].refusals
    one.append(results[0].tokens[0][0])
    _, last = step(engine, [one])
    assert last.refusals[0].code == "grammar_too_complex" and not last.tokens[0]


def test_a_mask_that_never_comes_fails_its_request(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Event()
    monkeypatch.setattr(masks, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(Grammars, "wait_s", 0.1)
    monkeypatch.setattr(Matcher, "fill", lambda self, mask: gate.wait(30))
    one = make(constrained('start: "a"'))
    _, result = step(engine, [one])
    gate.set()
    assert result.refusals[0].code == "grammar_too_complex"
