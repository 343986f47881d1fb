"""The sampler that never waits for its device gives what the CPU's sampler gives, and does not wait."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.core.ids import new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Sequence, TokenLogprobs
from common.engine.device_sampler import DeviceSampler
from common.engine.device_steps import DeviceSteps
from common.engine.sample_plan import PLAIN
from common.engine.sampler import NOTHING_LEFT, SampleRow, peaks, sample
from common.engine.staging import UploadStaging
from common.engine.token_counts import TokenCounts
from tests.device_watch import DeviceWatch

VOCAB = 97
CPU = torch.device("cpu")
Entry = tuple[int, TokenLogprobs | None]
Masks = Seq[npt.NDArray[np.int32] | None]


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        max_tokens=100,
        seed=rng.getrandbits(63),
        temperature=rng.choice([0.0, 1e-5, 0.3, 0.7, 1.0, 1.8]),
        top_k=maybe(rng.choice([1, 3, 20, VOCAB - 1, VOCAB, VOCAB + 3]), 0),
        top_p=maybe(rng.choice([1e-9, 0.3, 0.9, 0.999, 1 - 1e-9]), 1.0),
        min_p=maybe(rng.choice([0.001, 0.05, 0.5, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.7, 1.3, 1e-45, 1e38]), 1.0),
        frequency_penalty=maybe(rng.uniform(-1, 1), 0.0),
        presence_penalty=maybe(rng.uniform(-1, 1), 0.0),
        logit_bias=maybe({rng.randrange(VOCAB + 2): rng.choice([-100.0, -2.0, 3.0]) for _ in range(4)}, {}),
        min_tokens=maybe(rng.randint(1, 3), 0),
        eos_token_ids=(2, 5),
        stop_token_ids=maybe((9, VOCAB + 5), ()),
        logprobs=maybe(rng.randint(0, 5), None),
    )


def new_sequence(rng: random.Random, sampling: SamplingParams, n: int = 1) -> Sequence:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
    emitted = tuple(
        pack_tokens([rng.randrange(VOCAB) for _ in range(3)]) for _ in range(n if rng.random() < 0.3 else 0)
    )
    return Sequence(Request(new_request_id(), pack_tokens(prompt), sampling, n=n, emitted=emitted), 0)


def random_logits(rng: random.Random, rows: int) -> torch.Tensor:
    """Return logits of random spread: some with many ties, some with tokens that are impossible, some rows spoiled."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    logits *= rng.choice([0.1, 1.0, 8.0])
    for row in logits:
        if rng.random() < 0.3:
            row.mul_(2).round_()
        if rng.random() < 0.2:
            row[rng.sample(range(VOCAB), 20)] = -torch.inf
        if rng.random() < 0.15:
            row[rng.randrange(VOCAB)] = rng.choice([torch.nan, torch.inf])
    return logits.to(rng.choice([torch.float32, torch.bfloat16]))


def on_device(
    sampler: DeviceSampler,
    staging: UploadStaging,
    logits: torch.Tensor,
    sequences: list[Sequence],
    masks: Masks = (),
) -> list[list[Entry]]:
    plan = sampler.plan(sequences)
    last = array("q", [each.tokens[-1] for each in sequences])
    uploaded = staging.upload({"last": last, **plan.columns})
    mask = DeviceSteps(CPU, VOCAB, VOCAB)._uploaded(masks, plan.choices)
    packed = sampler.sample(logits, plan, uploaded, uploaded["last"], mask)
    return plan.read(packed.numpy())


def on_cpu(logits: torch.Tensor, sequences: list[Sequence], masks: Masks = ()) -> list[list[Entry]]:
    """Return what the CPU's sampler gives for the rows that are finite, and (-1, None) for the others."""
    best = peaks(logits)
    good = [index for index, token in enumerate(best) if token >= 0]
    rows = [
        SampleRow(
            place,
            sequences[index].request.sampling,
            choice,
            sequences[index].tokens,
            sequences[index].prompt_length,
            masks[index] if masks else None,
        )
        for place, index in enumerate(good)
        for choice in sequences[index].choices
    ]
    entries = iter(zip(*sample(logits[good], rows), strict=True)) if good else iter(())
    return [
        [next(entries) if token >= 0 else (-1, None) for _ in each.choices]
        for token, each in zip(best, sequences, strict=True)
    ]


def same(found: list[list[Entry]], expected: list[list[Entry]]) -> bool:
    """Compare entries; the log-probabilities of spoiled rows mean nothing."""
    return [list(map(without_ties, each)) for each in found] == [list(map(without_ties, each)) for each in expected]


def without_ties(entry: Entry) -> tuple[Any, ...]:
    """Return ``entry`` without the ids that are as likely as the last of the top: which of several equally likely ids
    ``torch.topk`` takes, and in what order, depends on how many it is asked for."""
    token, logprobs = entry
    if token < 0 or logprobs is None:
        return (token,)
    ranked = zip(logprobs.top_logprobs, logprobs.top_ids, strict=True)
    return (
        token,
        logprobs.logprob,
        logprobs.top_logprobs,
        {each for each in ranked if each[0] > logprobs.top_logprobs[-1]},
    )


@pytest.mark.parametrize("words", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_masks_of_any_size_give_the_same_as_the_cpus_sampler(seed: int, words: int) -> None:
    """Beside rows without one; tokens behind the mask's last bit are not allowed. Some rows are left with nothing."""
    rng = random.Random(seed)
    sampler, staging, nothing = DeviceSampler(VOCAB, CPU), UploadStaging(CPU), 0
    for _ in range(8):
        batch = [new_sequence(rng, constrained(random_params(rng)), rng.choice([1, 1, 3])) for _ in range(7)]
        masks = [random_mask(rng, words) if rng.random() < 0.8 else None for _ in batch]
        logits = random_logits(rng, len(batch))
        found = on_device(sampler, staging, logits, batch, masks)
        assert same(found, on_cpu(logits, batch, masks))
        for mask, entries in zip(masks, found, strict=True):
            for token, _entry in entries:
                nothing += token == NOTHING_LEFT
                if mask is not None and token >= 0:
                    assert token < 32 * words and mask[token // 32] >> token % 32 & 1
    assert nothing


def constrained(sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, grammar="start: any")


def random_mask(rng: random.Random, words: int) -> npt.NDArray[np.int32]:
    share = rng.choice([0.0, 0.05, 0.5])
    bits = np.array([rng.random() < share for _ in range(32 * words)])
    return np.packbits(bits, bitorder="little").view(np.int32)


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(8, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_rows_give_the_same_as_the_cpus_sampler(seed: int) -> None:
    """Sequences come, fork, rest and end as in a worker; the counts follow them."""
    rng = random.Random(seed)
    sampler, staging = DeviceSampler(VOCAB, CPU), UploadStaging(CPU)
    everybody: list[Sequence] = []
    for _ in range(12):
        while len(everybody) < rng.choice([1, 4, 30]):
            everybody.append(new_sequence(rng, random_params(rng), rng.choice([1, 1, 3])))
        batch = rng.sample(everybody, rng.randint(1, min(len(everybody), 14)))
        logits = random_logits(rng, len(batch))
        before = logits.clone()
        found = on_device(sampler, staging, logits, batch)
        assert same(found, on_cpu(logits, batch))
        assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7)), "the model's logits are left alone"
        for sequence, entries in zip(batch, found, strict=True):
            if min(token for token, _ in entries) < 0:
                everybody.remove(sequence)
                continue
            siblings, sequence.siblings = sequence.siblings, 0
            others = [sequence.fork(choice) for choice in range(1, siblings + 1)]
            for each, (token, logprobs) in zip([sequence, *others], entries, strict=True):
                each.append(token, logprobs)
            everybody += others
        if rng.random() < 0.2:
            sampler.forget()  # as after a step that failed
        everybody = [each for each in everybody if rng.random() < 0.9]


def test_counts_grow_by_one_token_without_another_upload_of_the_history() -> None:
    rng = random.Random(1)
    sampler, staging = DeviceSampler(VOCAB, CPU), UploadStaging(CPU)
    sampling = SamplingParams(100, 1, temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2)
    sequence = new_sequence(rng, sampling)
    for step in range(6):
        plan = sampler.plan([sequence])
        assert len(plan.rebuilds) == (step == 0), "only the first step uploads the history"
        uploaded = staging.upload({"last": array("q", sequence.tokens[-1:]), **plan.columns})
        sampler.sample(torch.zeros(1, VOCAB), plan, uploaded, uploaded["last"])
        (slot,) = plan.columns["slots"]
        expected = np.bincount(sequence.output, minlength=VOCAB)
        assert np.array_equal(sampler.counts.output[int(slot)].numpy(), expected)
        sequence.append(rng.randrange(VOCAB))


def test_a_step_that_is_repeated_counts_its_token_once() -> None:
    sampling = SamplingParams(100, 1, temperature=0.0, frequency_penalty=0.5)
    sequence = new_sequence(random.Random(2), sampling)
    sequence.append(3)
    sampler, staging = DeviceSampler(VOCAB, CPU), UploadStaging(CPU)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    first = on_device(sampler, staging, logits, [sequence])
    assert on_device(sampler, staging, logits, [sequence]) == first == on_cpu(logits, [sequence])


def test_slots_are_taken_from_those_that_rest_and_never_from_the_same_step() -> None:
    rng, counts = random.Random(3), TokenCounts(VOCAB, CPU)
    sampling = SamplingParams(100, 1, frequency_penalty=0.5)
    sequences = [new_sequence(rng, sampling) for _ in range(20)]
    first = counts.place(sequences[:8])
    assert sorted(first.slots) == list(range(1, 9)) and len(first.rebuilds) == 8
    second = counts.place([*sequences[4:8], *sequences[8:12]])
    assert [rebuild.slot for rebuild in second.rebuilds] == second.slots[4:]
    assert second.slots[:4] == first.slots[4:] and set(second.slots[4:]) == set(first.slots[:4])
    third = counts.place(sequences)
    assert len(set(third.slots)) == 20 and 0 not in third.slots
    assert third.slots[4:12] == second.slots


def test_plain_rows_upload_nothing() -> None:
    greedy = SamplingParams(9, 1, temperature=0.0)
    sequence = Sequence(Request(new_request_id(), pack_tokens([1, 2]), greedy, n=3), 0)
    plan = DeviceSampler(VOCAB, CPU).plan([sequence])
    assert plan.features == PLAIN and not plan.columns
    assert plan.read(np.array([[7]], np.int32)) == [[(7, None)] * 3]


@pytest.mark.parametrize("seed", range(6))
def test_nothing_leaves_the_device_and_nothing_is_waited_for(seed: int) -> None:
    """Everything runs on meta tensors, which have no values to wait for."""
    rng, meta = random.Random(seed), torch.device("meta")
    sampler, staging = DeviceSampler(VOCAB, meta), UploadStaging(meta)
    batch = [new_sequence(rng, random_params(rng), rng.choice([1, 3])) for _ in range(8)]
    for step in range(3):
        plan = sampler.plan(batch)
        uploaded = staging.upload({"last": array("q", [each.tokens[-1] for each in batch]), **plan.columns})
        with DeviceWatch(meta):
            packed = sampler.sample(torch.empty(len(batch), VOCAB, device=meta), plan, uploaded, uploaded["last"])
        most = plan.features.logprobs
        assert packed.device == meta and packed.dtype == torch.int32
        assert packed.shape == (sum(plan.choices), 1 if most is None else 2 + 2 * most)
        for each in batch:
            each.siblings = 0
            each.append(step)


SYNCHRONISING: list[Callable[[torch.Tensor], object]] = [
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: x + torch.ones(3),
    lambda x: torch.arange(3),
    lambda x: x.unique(),
    lambda x: torch.tensor([1, 2]),
]


@pytest.mark.parametrize("operation", SYNCHRONISING)
def test_device_watch_detects_synchronising_operation(operation: Callable[[torch.Tensor], object]) -> None:
    x = torch.empty(3, device="meta")
    with DeviceWatch(torch.device("meta")), pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
        operation(x)
