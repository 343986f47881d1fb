"""Log-probabilities of prompts over the whole system are transformers' own, in every topology and after a crash."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common import builtin
from tests.e2e.system import ApiClient, RunningSystem, events
from tests.e2e.test_tokens import COLOCATED, ONE_ONE, TWO_TWO, prompt_of
from tests.reference import Reference

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-4
LENGTHS = (1, 2, 17, 512, 513, 1500)
"""At and next to the chunk of a prefill step, and several chunks."""
TOPOLOGIES = {"colocated": COLOCATED, "1P1D": ONE_ONE, "2P2D": TWO_TWO}
Fields = dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.whole if name == "2P2D" else ()) for name in TOPOLOGIES],
)
def system(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSystem]:
    flags = (*TOPOLOGIES[request.param], "--local-prefill", "never")
    with RunningSystem.up(tmp_path_factory.mktemp(request.param), checkpoint("llama"), *flags) as running:
        yield running


@functools.lru_cache(maxsize=len(LENGTHS))
def _expected_of(reference: Reference, prompt: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(reference.logits(prompt)).log_softmax(dim=-1)


def expected_of(reference: Reference, prompt: list[int]) -> torch.Tensor:
    """Return transformers' log-probabilities after each token of ``prompt``, [len(prompt), vocab]. Those of the last
    prompts are kept, since each is echoed by several choices."""
    return _expected_of(reference, tuple(prompt))


def check_echo(reference: Reference, prompt: list[int], choice: Fields) -> None:
    expected, shown = expected_of(reference, prompt), choice["logprobs"]
    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
    following = torch.tensor(prompt[1:], dtype=torch.int64)[:, None]
    chosen, largest = expected[:-1].gather(1, following)[:, 0].tolist(), expected.amax(dim=-1).tolist()
    for at in range(1, len(prompt)):
        assert abs(shown["token_logprobs"][at] - chosen[at - 1]) < TOLERANCE
        assert abs(max(shown["top_logprobs"][at].values()) - largest[at - 1]) < TOLERANCE


def check_field(reference: Reference, prompt: list[int], field: list[Fields | None], tops: int) -> None:
    expected = expected_of(reference, prompt)
    assert len(field) == len(prompt) and field[0] is None
    for at in range(1, len(prompt)):
        row, entries = expected[at - 1], field[at]
        assert entries is not None and str(prompt[at]) in entries and tops <= len(entries) <= tops + 1
        for token, entry in entries.items():
            value = float(row[int(token)])
            assert abs(entry["logprob"] - value) < TOLERANCE
            near = int((row - value).abs().lt(TOLERANCE).sum())
            assert abs(entry["rank"] - int((row >= value).sum())) < near


async def whole(client: ApiClient, **fields: Any) -> Fields:
    async with await client.post("/v1/completions", **fields) as response:
        body: Fields = await response.json()
        assert response.status == 200, body
        return {**body, "path": response.headers["x-tandem-path"]}


async def streamed(client: ApiClient, **fields: Any) -> dict[int, Fields]:
    """Return the first chunk of each choice, and its finish reason."""
    choices: dict[int, Fields] = {}
    async with await client.post("/v1/completions", stream=True, **fields) as response:
        assert response.status == 200, await response.text()
        async for event in events(response):
            for part in event["choices"]:
                choices.setdefault(part["index"], part)["finish_reason"] = part["finish_reason"]
    return choices


@pytest.mark.parametrize("output", [0, 1, 8])
async def test_an_echo_has_the_numbers_of_transformers(
    system: RunningSystem, oracle: Callable[[str], Reference], output: int
) -> None:
    """As lm-eval asks: several prompts of token ids, greedy, with a seed; also streamed, and with several choices."""
    prompts = [prompt_of(length, 40 + output) for length in LENGTHS]
    fields = {"prompt": prompts, "max_tokens": output, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    async with system.client() as client:
        body = await whole(client, **fields, n=2)
        chunks = await streamed(client, **fields)
        await client.until_idle(within_s=10)
    assert sorted(chunks) == list(range(len(prompts)))
    for choice in body["choices"]:
        prompt = prompts[choice["index"] // 2]
        check_echo(oracle("llama"), prompt, choice)
        assert len(choice["logprobs"]["tokens"]) <= len(prompt) + output and choice["finish_reason"] in (
            "length",
            "stop",
        )
    for index, choice in chunks.items():
        check_echo(oracle("llama"), prompts[index], choice)
    assert body["path"] in (("prefill", "colocated") if output < 2 else ("disagg", "colocated", "prefill"))


async def test_the_field_of_vllm_has_them_after_a_prefix_hit(
    system: RunningSystem, oracle: Callable[[str], Reference]
) -> None:
    prompt = prompt_of(700, 3)
    fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with system.client() as client:
        await client.complete(**fields)
        await client.until_idle(within_s=10)
        again = await client.complete(**fields)
        scored = await whole(client, **fields, prompt_logprobs=3, n=2)
        chat = await client.chat("The sender holds its blocks", prompt_logprobs=1, max_tokens=2)
    assert again.cached >= 680, "the prompt is cached"
    for choice in scored["choices"]:
        check_field(oracle("llama"), prompt, choice["prompt_logprobs"], 3)
    check_field(oracle("llama"), chat.prompt, chat.body["prompt_logprobs"], 1)


async def test_prompts_survive_the_death_of_their_prefill_worker(
    checkpoint: Callable[[str], Path], oracle: Callable[[str], Reference], tmp_path: Path
) -> None:
    """One of two prefill workers is killed while each computes long prompts in chunks of 64 tokens."""
    prompts = [prompt_of(1400, 50 + index) for index in range(8)]
    flags = (*TWO_TWO, "--max-num-batched-tokens", "64", "--local-prefill", "never")
    with RunningSystem.up(tmp_path, checkpoint("llama"), *flags) as system:
        async with system.client() as client:
            doomed = (await client.workers())["prefill-0"]["pid"]
            fields = {"max_tokens": 3, "echo": True, "logprobs": 1, "temperature": 0, "prompt_logprobs": 0}
            running = [asyncio.create_task(whole(client, prompt=prompt, **fields)) for prompt in prompts]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            assert not all(task.done() for task in running)
            os.kill(doomed, signal.SIGKILL)
            bodies = await asyncio.gather(*running)
            async with client.session.get("/metrics") as response:
                page = await response.text()
    for prompt, body in zip(prompts, bodies, strict=True):
        [choice] = body["choices"]
        check_echo(oracle("llama"), prompt, choice)
        check_field(oracle("llama"), prompt, choice["prompt_logprobs"], 0)
    retries = [line for line in page.splitlines() if line.startswith("tandem_retries_total")]
    assert retries and float(retries[0].split()[-1]) > 0, retries


async def test_the_built_in_model_has_the_numbers_of_transformers(tmp_path: Path) -> None:
    reference = Reference(builtin.path())
    texts = ["The capital of France is Paris.", "1 2 3 4 5 6 7 8 9 10", "hello " * 200]
    small = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "600")
    with RunningSystem.up(tmp_path, builtin.path(), *ONE_ONE, small=small) as system:
        async with system.client() as client:
            fields = {"max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
            body = await whole(client, prompt=texts, **fields)
    for text, choice in zip(texts, body["choices"], strict=True):
        assert choice["text"] == text and choice["finish_reason"] == "length"
        check_echo(reference, choice["prompt_token_ids"], choice)
