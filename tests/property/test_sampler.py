"""The engine's sampler against the plain loops of tests.reference: any logits, any parameters, any batch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from common.core.request import SamplingParams
from common.engine.sampler import SampleRow, sample, uniform
from tests.reference import Tolerance, log_softmax, misfit

VOCABULARY = 40
tokens = st.integers(0, VOCABULARY - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.one_of(st.just(0.0), st.sampled_from([1e-310, 1e-40, 1e-6, 0.1, 2.0]), st.floats(0.1, 2)),
    top_k=st.sampled_from([0, 0, 1, 3, 39, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 1.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -2.0, 3.0, 100.0]), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    eos_token_ids=st.just((1,)),
    logprobs=st.sampled_from([None, 0, 3]),
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[SamplingParams, int, list[int], int]:
    """Generate parameters, choice, all tokens so far, and how many of them are the prompt."""
    prompt, output = draw(st.lists(tokens, min_size=1, max_size=6)), draw(st.lists(tokens, max_size=6))
    return draw(params), draw(st.integers(0, 15)), prompt + output, len(prompt)


@settings(max_examples=300)
@given(st.lists(rows(), min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 8.0]))
def test_every_row_of_a_batch_is_sampled_as_if_alone(
    batch: list[tuple[SamplingParams, int, list[int], int]], seed: int, spread: float
) -> None:
    logits = torch.randn(len(batch), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread
    before = logits.clone()
    chosen, logprobs = sample(
        logits, [SampleRow(index, *row[:3], prompt_length=row[3]) for index, row in enumerate(batch)]
    )
    assert torch.equal(logits, before), "the model's logits are left alone"
    for index, (sampling, choice, known, prompt) in enumerate(batch):
        row, token = before[index].double().numpy(), chosen[index]
        assert 0 <= token < VOCABULARY
        problem = misfit(row, known[:prompt], known[prompt:], token, sampling, choice, Tolerance())
        assert problem is None, f"row {index}, {sampling}: {problem}"
        reported = logprobs[index]
        assert (reported is None) == (sampling.logprobs is None)
        if reported is not None:
            expected = log_softmax(row)
            assert abs(reported.logprob - expected[token]) < 1e-4
            best = np.sort(expected)[::-1][: sampling.logprobs]
            assert np.allclose(reported.top_logprobs, best, atol=1e-4)
            assert np.allclose(expected[list(reported.top_ids)], best, atol=1e-4)
    event(f"random rows: {sum(row[0].temperature >= 1e-5 for row in batch)}")


@given(st.integers(0, 2**63 - 1), st.integers(0, 15), st.integers(0, 1 << 20))
def test_noise_is_a_function_of_seed_choice_and_position(seed: int, choice: int, position: int) -> None:
    u = uniform(seed, choice, position)
    assert 0 <= u < 1
    assert u == uniform(seed, choice, position)
    others = [uniform(seed ^ 1, choice, position), uniform(seed, choice + 1, position)]
    assert u not in [*others, uniform(seed, choice, position + 1)]


def test_noise_is_uniform() -> None:
    """The noise is uniform over seeds, choices and positions: chi-square over 64 cells, one false alarm in a
    million."""
    for numbers in (
        [uniform(seed, 0, 0) for seed in range(6400)],
        [uniform(0, 0, position) for position in range(6400)],
        [uniform(seed, choice, 5) for seed in range(400) for choice in range(16)],
    ):
        counts = np.bincount((np.array(numbers) * 64).astype(int), minlength=64)
        assert ((counts - 100) ** 2 / 100).sum() < 135
