"""The sampler equals a simple per-row implementation of vLLM's definitions, and its noise is a pure function."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from common.core.request import SamplingParams
from common.engine import sampler
from common.engine.sampler import SampleRow, sample, uniform, uniforms
from common.kernels import cpu
from tests.reference import cdf_interval, keep_masks, log_softmax, process

VOCAB = 97


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100, "seed": 1} | fields))


def row_of(index: int, sampling: SamplingParams, prompt: list[int], output: list[int], choice: int = 0) -> SampleRow:
    return SampleRow(index, sampling, choice, prompt + output, len(prompt))


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    return params(
        seed=rng.getrandbits(63),
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.8]),
        top_k=maybe(rng.randint(1, VOCAB + 3), 0),
        top_p=maybe(rng.uniform(0.05, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.001, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.7, 1.6), 1.0),
        frequency_penalty=maybe(rng.uniform(-1, 1), 0.0),
        presence_penalty=maybe(rng.uniform(-1, 1), 0.0),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-20, 5) for _ in range(4)}, {}),
        min_tokens=maybe(5, 0),
        eos_token_ids=(2, 5),
        stop_token_ids=maybe((9, 90), ()),
        logprobs=maybe(rng.randint(0, 5), None),
    )


VARIANTS = library.variants if (library := cpu.library()) else ()


@pytest.fixture(params=[*VARIANTS, None])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test with the kernels of each instruction set, and without kernels."""
    if library is None or request.param is None:
        monkeypatch.setattr(cpu, "library", lambda: None)
        yield
    else:
        library.use(request.param)
        yield
        library.use(VARIANTS[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 7, 64, 200, 8192])
def test_the_peak_is_the_first_of_the_largest(kernels: None, dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    logits = (torch.randn(9, columns) * 2).round().to(dtype)  # rounded, so that many are equal
    logits[0], logits[1] = -3.0, -torch.inf
    logits[1, columns // 2] = -5.0
    expected = [max(range(columns), key=lambda at: (float(row[at]), -at)) for row in logits]
    assert sampler.peaks(logits) == expected
    assert sampler.peaks(logits.repeat(1, 2)[:, :columns]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 64, 200])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_has_no_peak(kernels: None, dtype: torch.dtype, columns: int, bad: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(columns + 2, columns).to(dtype)
    logits[range(columns), range(columns)] = bad
    logits[columns] = -torch.inf
    found = sampler.peaks(logits)
    assert found[:-1] == [-1] * (columns + 1) and found[-1] == int(logits[-1].argmax())


@pytest.mark.parametrize("seed", range(30))
def test_rows_that_take_their_peak_would_be_given_it(seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    plain = rng.random() < 0.5
    rows = [
        row_of(index, params() if plain else random_params(rng), [1, 2], [3] * rng.randint(0, 9)) for index in range(12)
    ]
    if plain:
        rows = [SampleRow(row.row, params(temperature=0.0), 0, row.tokens, 2) for row in rows]
    takers = [row.row for row in rows if row.sampling.takes_best and row.position >= row.sampling.min_tokens]
    assert len(takers) == 12 or not plain
    peaks, (tokens, logprobs) = sampler.peaks(logits), sample(logits, rows)
    assert [(tokens[row], logprobs[row]) for row in takers] == [(peaks[row], None) for row in takers]


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_plain_reading(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, VOCAB, generator=generator) * 3
    kept = logits.clone()
    rows = []
    for index in range(12):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
        rows.append(row_of(index, random_params(rng), prompt, output, choice=rng.randrange(3)))
    tokens, logprobs = sample(logits, rows)
    assert torch.equal(logits, kept), "the raw logits were changed"
    for row, token, entry in zip(rows, tokens, logprobs, strict=True):
        raw = kept[row.row].double().numpy()
        prompt, output = list(row.tokens[: row.prompt_length]), list(row.tokens[row.prompt_length :])
        processed = process(raw, prompt, output, row.sampling)
        if row.sampling.temperature == 0:
            assert processed[token] >= processed.max() - 1e-5
        else:
            u = uniform(row.sampling.seed, row.choice, row.position)
            masks = [mask for mask in keep_masks(processed, row.sampling, 1e-6) if mask[token]]
            bounds = [cdf_interval(processed / row.sampling.temperature, mask, token) for mask in masks]
            assert any(low - 1e-6 <= u <= high + 1e-6 for low, high in bounds), (row, token, u, bounds)
        expected = log_softmax(raw)
        if row.sampling.logprobs is None:
            assert entry is None
        else:
            assert entry is not None and abs(entry.logprob - expected[token]) < 1e-5
            best = np.argsort(-expected, kind="stable")[: row.sampling.logprobs]
            assert entry.top_ids == tuple(best)
            assert np.allclose(entry.top_logprobs, expected[best], atol=1e-5)


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = random.Random(4)
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    rows = [row_of(index, random_params(rng), [1, 2, 3], [4] * rng.randrange(8)) for index in range(20)]
    together, _ = sample(logits, rows)
    for row in rows:
        alone = SampleRow(0, row.sampling, row.choice, row.tokens, row.prompt_length)
        assert sample(logits[row.row : row.row + 1], [alone])[0] == [together[row.row]]


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0, 0.0])
def test_top_p_cuts_where_sorting_would(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_HEAD", 50)
    scaled = (torch.randn(20, 700, generator=torch.Generator().manual_seed(9)) * spread).bfloat16().float()
    top_p = torch.linspace(0.01, 0.999, 20)
    cut = sampler._cut_top_p(scaled, top_p)
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(ordered.double(), dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    margin = (before - top_p[:, None].double()).abs().amin(dim=-1)
    for row in range(20):
        if margin[row] > 1e-6:
            kept = set(order[row][before[row] < top_p[row].double()].tolist()) | {int(order[row, 0])}
            assert set(cut[row].isfinite().nonzero().flatten().tolist()) == kept


def test_noise_is_pure_spread_and_in_range() -> None:
    assert uniform(7, 0, 3) == uniform(7, 0, 3)
    numbers = uniforms(list(range(-500, 500)), [0, 1] * 500, list(range(1000)))
    assert ((numbers >= 0) & (numbers < 1)).all() and len(set(numbers.tolist())) == 1000
    assert abs(numbers.mean() - 0.5) < 0.03 and abs(numbers.std() - 12**-0.5) < 0.02
    assert len({uniform(s, c, p) for s in (0, 1, 2**63, -1) for c in range(4) for p in range(4)}) == 64
    assert uniforms([1, 2], [3, 4], [5, 6]).tolist() == [uniform(1, 3, 5), uniform(2, 4, 6)]


def test_noise_never_changes() -> None:
    """A retry may run on a worker of another release: these numbers are part of the contract."""
    assert [
        f"{uniform(*key):.15f}" for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 15, 4095))
    ] == GOLDEN


GOLDEN = ["0.138709410145554", "0.693512139010229", "0.269130319590454", "0.184366674299577", "0.488254346800094"]


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    counts = np.zeros(4)
    for seed in range(4000):
        counts[sample(logits, [row_of(0, params(seed=seed), [1], [])])[0][0]] += 1
    assert np.allclose(counts / 4000, torch.softmax(logits, -1).numpy()[0], atol=0.03)


def test_several_choices_share_a_row() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(place, params(temperature=1.5), choice, [1, 2], 2) for place in (0, 1) for choice in range(8)]
    tokens, _ = sample(logits, rows)
    assert len(tokens) == 16 and len(set(tokens[:8])) > 1
    alone, _ = sample(logits[:1], [rows[3]])
    assert alone == [tokens[3]]


def test_nothing_that_ends_is_sampled_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 9], logits[0, 30] = 50, 40, 10
    sampling = params(temperature=0.0, min_tokens=2, eos_token_ids=(2,), stop_token_ids=(9, VOCAB + 1), ignore_eos=True)
    assert sample(logits, [row_of(0, sampling, [1], [4])])[0] == [30]
    assert sample(logits, [row_of(0, sampling, [1], [4, 4])])[0] == [2]


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = (torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    rows = [row_of(i, params(seed=i, top_p=0.9, top_k=20, logprobs=2), [1], [i]) for i in range(3)]
    assert sample(logits, rows) == sample(logits.float(), rows)


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 1e38},
        {"temperature": 1e-5, "logit_bias": {3: 100.0}},
        {"frequency_penalty": -2.0, "temperature": 2e-5},
        {"min_p": 1.0, "top_p": 1e-9, "top_k": 1},
    ],
)
def test_extremes_still_give_a_token_of_the_vocabulary(extreme: dict[str, Any]) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 8
    rows = [row_of(index, params(**extreme), [1, 2, 3], [4, 5, 5]) for index in range(3)]
    tokens, _ = sample(logits, rows)
    assert all(0 <= token < VOCAB for token in tokens)
