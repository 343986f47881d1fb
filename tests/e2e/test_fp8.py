"""Weights and KV in float8 through a whole system: tokens and log-probabilities are those of a model of transformers
whose linear layers, keys and values are rounded by a slow emulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from tests.e2e.system import MODEL_LEN, RunningSystem, sampling_of
from tests.e2e.test_tokens import prompt_of
from tests.reference import Reference, Tolerance, log_softmax

pytestmark = pytest.mark.e2e

FLAGS = ("--quantization", "fp8", "--kv-cache-dtype", "fp8", "--local-prefill", "never", "--kv-transport", "zmq")
NEARLY = Tolerance(greedy_stds=0.25, logprob=0.25)
"""A sum that rounds differently in float32 can round to the next of float8's numbers."""
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
NUMBERS = NUMBERS[~NUMBERS.isnan()].unique()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the type nearest to ``x``."""
    above = torch.searchsorted(NUMBERS, x.double().contiguous()).clamp(1, len(NUMBERS) - 1)
    low, high = NUMBERS[above - 1], NUMBERS[above]
    return torch.where(x - low <= high - x, low, high)


class SlowLinear(nn.Module):
    """A linear layer on rounded numbers, in float64."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.scale = plain.weight.abs().amax(1) / 448
        self.weight, self.bias = rounded(plain.weight / self.scale[:, None]), plain.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        out = rounded(x / scale) @ self.weight.T * scale * self.scale
        return (out if self.bias is None else out + self.bias).float()


@pytest.fixture
def emulated(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Reference:
    """The reference with rounded weights, activations, keys and values. All scales of this model's KV are 1."""
    reference = Reference(checkpoint("llama"), MODEL_LEN)
    for parent in list(reference.model.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, SlowLinear(child))
    eager: Any = modeling_llama.eager_attention_forward

    ours = set(reference.model.modules())

    def attend(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if module in ours:
            key, value = rounded(key).float(), rounded(value).float()
        return eager(module, query, key, value, *rest, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    return reference


def distance(reference: Reference, prompt: list[int], ids: list[int], logprobs: list[float]) -> float:
    """Return the mean difference between reported log-probabilities and those of ``reference``."""
    rows = reference.logits([*prompt, *ids[:-1]], last=len(ids))
    wanted = [log_softmax(row)[token] for row, token in zip(rows, ids, strict=True)]
    return float(np.abs(np.array(wanted) - np.array(logprobs)).mean())


async def test_a_pair_with_weights_and_kv_in_fp8_computes_what_the_emulation_does(
    checkpoint: Callable[[str], Path], oracle: Callable[[str], Reference], emulated: Reference, tmp_path: Path
) -> None:
    plain = oracle("llama")
    fields = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}
    prompts = [prompt_of(length, 90) for length in (3, 16, 40, 200)]
    with RunningSystem.up(tmp_path, checkpoint("llama"), "--prefill", "1", "--decode", "1", *FLAGS) as system:
        async with system.client() as client:
            answers = await asyncio.gather(*(client.complete(prompt, **fields) for prompt in prompts))
            again = await client.complete(prompts[2], **fields)
            workers = await client.workers()
        for part in ("emulated in float32, which is for tests and slow", "KV in fp8: half the memory"):
            await system.process.until_logged(part)
    assert {worker["dtype"] for worker in workers.values()} == {"fp8"}
    for answer in answers:
        assert answer.path == "disagg"
        emulated.check(answer.prompt, answer.ids, sampling_of(fields), tolerance=NEARLY)
    assert again.cached == 32 and again.ids == answers[2].ids, "KV from the prefix cache gives the same tokens"
    near, unrounded = (
        sum(distance(each, answer.prompt, answer.ids, answer.choices[0].logprobs) for answer in answers)
        for each in (emulated, plain)
    )
    assert near < unrounded / 2, "without rounding other numbers come out"
