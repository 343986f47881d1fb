"""Tests of the reference itself: it accepts correct outputs and rejects wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.core.request import SamplingParams
from tests import reference
from tests.reference import Reference, cdf_interval, greedy, keep_masks, log_softmax, process

PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[[str], Path]) -> Reference:
    return Reference(checkpoint("llama"))


def run(oracle: Reference, choose: Callable[[np.ndarray, list[int]], int], count: int = 6) -> list[int]:
    output: list[int] = []
    while len(output) < count:
        output.append(choose(oracle.logits([*PROMPT, *output], last=1)[0], output))
    return output


def test_greedy_output_is_accepted_and_any_other_token_is_not(oracle: Reference) -> None:
    output = run(oracle, lambda row, _: int(row.argmax()))
    oracle.check(PROMPT, output, greedy(6))
    for position in range(len(output)):
        wrong = output.copy()
        wrong[position] = (wrong[position] + 1) % oracle.vocab_size
        with pytest.raises(AssertionError, match="below the best"):
            oracle.check(PROMPT, wrong, greedy(6))


def test_sampled_output_must_be_the_inverse_of_the_distribution(
    oracle: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.3, 4: 0.7, 5: 0.999}
    monkeypatch.setattr(reference, "uniform_for", lambda seed, choice, position: noise[position])
    sampling = SamplingParams(
        max_tokens=6, seed=1, temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, presence_penalty=0.5, ignore_eos=True
    )

    def choose(row: np.ndarray, output: list[int]) -> int:
        processed = process(row, PROMPT, output, sampling)
        mask = next(keep_masks(processed, sampling, 0.0))
        u = noise[len(output)]
        intervals = [
            (cdf_interval(processed / sampling.temperature, mask, token), token) for token in np.flatnonzero(mask)
        ]
        return next(int(token) for (low, high), token in intervals if low <= u < high)

    output = run(oracle, choose)
    oracle.check(PROMPT, output, sampling)
    wrong = [*output[:-1], int(oracle.logits([*PROMPT, *output[:-1]], last=1)[0].argmin())]
    with pytest.raises(AssertionError, match="masked out"):
        oracle.check(PROMPT, wrong, sampling)
    noise[2] = 0.2
    with pytest.raises(AssertionError, match="misses its interval"):
        oracle.check(PROMPT, output, sampling)


def test_logprobs_are_those_of_the_model(oracle: Reference) -> None:
    output = run(oracle, lambda row, _: int(row.argmax()), count=2)
    rows = oracle.logits([*PROMPT, output[0]], last=2)
    right = [float(log_softmax(row)[token]) for row, token in zip(rows, output, strict=True)]
    oracle.check(PROMPT, output, greedy(2), logprobs=right)
    with pytest.raises(AssertionError, match="logprob"):
        oracle.check(PROMPT, output, greedy(2), logprobs=[right[0], right[1] + 1e-3])
    top = [sorted((float(value) for value in log_softmax(row)), reverse=True)[:3] for row in rows]
    oracle.check(PROMPT, output, greedy(2), logprobs=right, top_logprobs=top)
    top[0] = top[0][:1] + top[0][2:]
    with pytest.raises(AssertionError, match="top logprobs"):
        oracle.check(PROMPT, output, greedy(2), logprobs=right, top_logprobs=top)


def test_processors_by_hand() -> None:
    row = np.array([1.0, 2.0, -1.0, 0.5])
    sampling = SamplingParams(
        max_tokens=9,
        seed=0,
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        logit_bias={3: 1.5},
        min_tokens=3,
        eos_token_ids=(0,),
    )
    processed = process(row, prompt=[2], output=[3, 3], sampling=sampling)
    # 0 is masked; 1 is untouched; 2 was in the prompt; 3 is biased to 2, halved, and pays 2 x 0.25 + 0.5
    assert processed.tolist() == [-math.inf, 2.0, -2.0, 0.0]


def test_cuts_by_hand() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))

    def kept(**fields: float) -> list[int]:
        sampling = SamplingParams(max_tokens=1, seed=0, **fields)  # type: ignore[arg-type]
        return np.flatnonzero(next(keep_masks(logits, sampling, 0.0))).tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [1, 3]
    assert kept(min_p=0.6) == [1, 3]
    assert kept(top_p=0.69) == [1, 3]
    assert kept(top_p=0.71) == [1, 2, 3]
    assert kept(top_p=0.01) == [1]
    assert kept(top_k=2, top_p=0.58) == [1, 3]  # top_k leaves 4/7 and 3/7
    assert kept(top_k=2, top_p=0.56) == [1]
    masks = list(keep_masks(logits, SamplingParams(max_tokens=1, seed=0, top_p=0.7), 1e-4))
    assert {tuple(np.flatnonzero(mask)) for mask in masks} == {(1, 3), (1, 2, 3)}  # 0.4 + 0.3 ties with the cut
    assert cdf_interval(logits, np.array([True, False, True, True]), 2) == pytest.approx((0.1 / 0.6, 0.3 / 0.6))


def test_rotary_is_frozen_for_the_longest_sequence(checkpoint: Callable[[str], Path]) -> None:
    for kind in ("phi3-longrope", "llama-dynamic"):
        frozen, plain = Reference(checkpoint(kind), 2048), Reference(checkpoint(kind))
        short, long = list(range(10, 40)), [(7 * i) % 500 + 8 for i in range(700)]
        before = frozen.logits(short)
        assert np.abs(before - plain.logits(short)).max() > 1e-2, kind  # the frequencies for short sequences differ
        frozen.logits(long)
        assert np.array_equal(frozen.logits(short), before), kind
