"""Numerics: rotary variants beside a long neighbour, bf16, and positions beyond the original context."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.system import SMALL, RunningSystem, sampling_of
from tests.e2e.test_tokens import COLOCATED, ONE_ONE, check, prompt_of
from tests.reference import BFLOAT16, Reference

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "flags", [pytest.param(COLOCATED, id="colocated", marks=pytest.mark.whole), pytest.param(ONE_ONE, id="1P1D")]
)
@pytest.mark.parametrize("kind", ["phi3-longrope", "llama-dynamic"])
async def test_a_long_neighbour_changes_nothing(
    kind: str,
    flags: tuple[str, ...],
    checkpoint: Callable[[str], Path],
    oracle: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    """In transformers these rotary variants depend on the longest position of a batch; here a neighbour changes
    nothing."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    short, long = prompt_of(20, 70), prompt_of(1400, 71)
    with RunningSystem.up(tmp_path, checkpoint(kind), *flags, "--local-prefill", "never") as system:
        async with system.client() as client:
            alone = await client.complete(short, **greedy, max_tokens=40)
            beside, neighbour, other = await asyncio.gather(
                client.complete(short, **greedy, max_tokens=40, cache_salt="beside"),
                client.complete(long, **greedy, max_tokens=60),
                client.complete(prompt_of(100, 72), **greedy, max_tokens=60),
            )
    for answer, count in ((alone, 40), (beside, 40), (neighbour, 60), (other, 60)):
        check(oracle(kind), answer, {**greedy, "max_tokens": count}, f"{len(answer.prompt)} tokens")


async def test_bf16_runs_and_stays_close(
    checkpoint: Callable[[str], Path], oracle: Callable[[str], Reference], tmp_path: Path
) -> None:
    """With bfloat16 each token is near the reference's best one, and at least 90 % are the best."""
    small = [word if word != "float32" else "bfloat16" for word in SMALL]
    reference = oracle("llama-untied")
    chooser = random.Random(8)
    with RunningSystem.up(tmp_path, checkpoint("llama-untied"), *ONE_ONE, small=small) as system:
        async with system.client() as client:
            fields = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
            prompts = [prompt_of(chooser.choice([3, 16, 40, 300]), 80 + index) for index in range(12)]
            answers = await asyncio.gather(*(client.complete(prompt, **fields) for prompt in prompts))
            assert {worker["dtype"] for worker in (await client.workers()).values()} == {"bfloat16"}
    best = 0
    for answer in answers:
        reference.check(answer.prompt, answer.ids, sampling_of(fields), tolerance=BFLOAT16)
        rows = reference.logits([*answer.prompt, *answer.ids[:-1]], last=16)
        best += sum(int(row.argmax()) == token for row, token in zip(rows, answer.ids, strict=True))
    assert best >= 0.9 * 16 * len(answers)
