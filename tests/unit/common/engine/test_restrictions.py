"""Allowed token ids and bad words, sampled by real engines with a CPU's sampler and with that of a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.core.ids import pack_tokens, unpack_tokens
from common.core.request import SamplingParams
from common.engine.restrictions import restricted
from common.engine.runner import ModelEngine
from tests.fakes.constrained import allowed
from tests.models import EOS, VOCAB
from tests.reference import Reference, greedy
from tests.seeds import seeds
from tests.unit.common.engine.test_constrained import ROWS, TABLE, make, run, step, with_grammars
from tests.unit.common.engine.test_device_steps import make_engine


@pytest.fixture(scope="module", params=[False, True], ids=["cpu", "as on a GPU"])
def made(checkpoint: Callable[[str], Path], request: Any) -> Iterator[ModelEngine]:
    made = make_engine(checkpoint("llama"), "cpu", as_on_gpu=request.param, blocks=ROWS * TABLE)
    yield made
    made.close()


@pytest.fixture
def engine(made: ModelEngine, checkpoint: Callable[[str], Path]) -> Iterator[ModelEngine]:
    with_grammars(made, checkpoint("llama"))
    yield made
    assert made.grammars is not None
    made.grammars.close()


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> Reference:
    return Reference(checkpoint("llama"))


def params(**fields: Any) -> SamplingParams:
    if allowed := fields.pop("allowed_token_ids", ()):
        fields["allowed_token_ids"] = pack_tokens(allowed)
    return SamplingParams(**{"max_tokens": 20, "seed": 3, "ignore_eos": True, "eos_token_ids": (EOS,), **fields})


@pytest.mark.parametrize("seed", seeds(4, few=1))
def test_outputs_are_right_beside_rows_without_restrictions(
    engine: ModelEngine, reference: Reference, seed: int
) -> None:
    rng = random.Random(seed)
    some = tuple(rng.sample(range(VOCAB), 40))
    words = tuple((last,) for last in some[:20])
    samplings = [
        params(allowed_token_ids=some, temperature=0.0),
        params(allowed_token_ids=some, bad_words=words, temperature=1.2, seed=seed, logprobs=2),
        params(allowed_token_ids=(*some, VOCAB + 5), bad_words=((some[30], some[31]), (some[30], some[30]))),
        params(allowed_token_ids=some[:3], bad_words=(some[:2], some[1:3], some[:1] * 2), frequency_penalty=-1.5),
        params(bad_words=words, temperature=0.0),
        greedy(20),
    ]
    sequences = [make(sampling, prompt=5 + at) for at, sampling in enumerate(samplings)]
    run(engine, sequences)
    for one in sequences:
        sampling = one.request.sampling
        known = [entry.logprob for entry in one.logprobs if entry is not None]
        reference.check(one.tokens[: one.prompt_length], one.output, sampling, logprobs=known or None)
        if sampling.allowed_token_ids:
            assert set(one.output) <= {*unpack_tokens(sampling.allowed_token_ids)}


def test_a_word_that_greedy_decoding_writes_is_not_written(engine: ModelEngine) -> None:
    """Neither as a whole nor where a repeated prompt begins again in its middle; its beginning alone may be."""
    (free,) = sequences = [make(greedy(12))]
    run(engine, sequences)
    word = tuple(free.output[3:6])
    (banned,) = sequences = [make(greedy(12, bad_words=(word,)))]
    run(engine, sequences)
    assert banned.output[:5] == free.output[:5] and banned.output[5] != word[2]
    again = make(greedy(12, bad_words=(word,)))
    again.tokens += banned.output[:5]  # as after a hand-off
    run(engine, [again])
    assert again.output == banned.output
    prompt = make(greedy(12, bad_words=(tuple(free.tokens[free.prompt_length - 1 : free.prompt_length + 1]),)))
    run(engine, [prompt])
    assert prompt.output == free.output, "tokens of the prompt do not count"


def test_all_choices_of_a_prompt_obey(engine: ModelEngine) -> None:
    sampling = params(allowed_token_ids=tuple(range(50, 60)), bad_words=((50,), (51,)), temperature=2.0)
    _, result = step(engine, [make(sampling, n=8)])
    assert len(result.tokens[0]) == 8 and {*result.tokens[0]} <= set(range(52, 60)) and len({*result.tokens[0]}) > 1


@pytest.mark.parametrize("fields", [{"bad_words": ((50,), (51,))}, {"min_tokens": 2, "stop_token_ids": (50, 51)}])
def test_a_row_with_nothing_left_fails_alone(engine: ModelEngine, fields: dict[str, Any]) -> None:
    _, result = step(engine, [make(params(allowed_token_ids=(50, 51), **fields)), make(greedy(5))])
    assert "no token is left" in result.refusals[0].words and not result.tokens[0] and result.tokens[1]


def test_a_grammar_and_restrictions_apply_together(engine: ModelEngine) -> None:
    digits = make(params(grammar="start: /[0-9]{20}/", max_tokens=40, ignore_eos=False))
    run(engine, [digits])
    banned = tuple((token,) for token in {*digits.output} - {EOS})
    others = make(params(grammar="start: /[0-9]{20}/", max_tokens=40, ignore_eos=False, bad_words=banned))
    run(engine, [others])
    assert {*others.output}.isdisjoint({*digits.output} - {EOS}) and others.output[-1] == EOS


def test_forced_tokens_are_not_taken_past_a_bad_word(engine: ModelEngine) -> None:
    text = 'start: "abcdefghijklmnop"'
    free = make(params(grammar=text, max_tokens=40, ignore_eos=False))
    run(engine, [free])
    word = tuple(free.output[2:4])
    one = make(params(grammar=text, max_tokens=40, ignore_eos=False, bad_words=(word,)))
    while True:
        _, result = step(engine, [one])
        if 0 in result.refusals:
            break
        one.computed = len(one.tokens) - bool(result.late)
        for token in result.tokens[0]:
            one.append(token)
            assert engine.grammars is not None and engine.grammars.force(one) == []
    assert tuple(one.output[-2:]) != word and len(one.output) < len(free.output)


def test_masks_cover_the_vocabulary_exactly() -> None:
    for size in (31, 32, 33, 97):
        sequence = make(params(allowed_token_ids=(0, size - 1, size, 500)))
        mask = restricted(sequence, None, size)
        assert mask is not None and mask.dtype == np.int32 and list(allowed(mask)) == [0, size - 1]
        sequence = make(params(bad_words=((0,), (size - 1,), (size + 1,), (3, 4))))
        mask = restricted(sequence, None, size)
        assert mask is not None and list(allowed(mask)) == list(range(1, size - 1))
