"""When KV blocks are scarce, sequences are parked and recomputed, and their tokens stay the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import ApiClient, RunningSystem
from tests.e2e.test_tokens import COLOCATED, ONE_ONE, SAMPLED, check, metrics, prompt_of
from tests.pace import scaled
from tests.reference import Reference

pytestmark = pytest.mark.e2e

TIGHT = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "80", "--max-model-len", "1024")


async def preemptions(client: ApiClient) -> float:
    samples = await metrics(client)
    return sum(value for name, value in samples.items() if name.startswith("vllm:num_preemptions_total"))


@pytest.mark.parametrize("flags", [COLOCATED, ONE_ONE], ids=["colocated", "1P1D"])
async def test_a_pool_that_is_too_small_for_all_serves_all(
    flags: tuple[str, ...], checkpoint: Callable[[str], Path], oracle: Callable[[str], Reference], tmp_path: Path
) -> None:
    """The pool has room for 1,280 tokens. Two requests are admitted together, because only part of their output is
    reserved in advance. They outgrow the pool, and the newer one is parked. Then twelve short requests wait for their
    turn."""

    def sampled(index: int, max_tokens: int) -> dict[str, Any]:
        return {**SAMPLED[index % 3], "seed": index, "max_tokens": max_tokens, "ignore_eos": True}

    long = [(prompt_of(20 + index, 89), sampled(index, 800)) for index in range(2)]
    short = [(prompt_of(20 + 5 * index, 90), sampled(index, 100)) for index in range(12)]
    with RunningSystem.up(tmp_path, checkpoint("llama"), *flags, small=TIGHT) as system:
        async with system.client() as client:
            answers = [await asyncio.gather(*(client.complete(p, **f) for p, f in part)) for part in (long, short)]
            await client.until_idle(within_s=10)
            parked_by = time.monotonic() + scaled(5.0)  # the next heartbeat reports it
            while not await preemptions(client):
                assert time.monotonic() < parked_by, "no sequence was parked"
                await asyncio.sleep(0.05)
            async with await client.post("/v1/completions", prompt=prompt_of(1000, 91), max_tokens=100) as refused:
                assert refused.status == 400
                assert (await refused.json())["error"]["code"] == "context_length_exceeded"
    for (prompt, fields), answer in zip([*long, *short], [*answers[0], *answers[1]], strict=True):
        assert answer.prompt == prompt
        check(oracle("llama"), answer, fields, f"{len(prompt)} tokens")
