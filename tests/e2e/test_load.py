"""Five hundred requests through 2P2D, a tenth of them abandoned: each is counted once, and all blocks are freed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.system import SMALL, ApiClient, RunningSystem, events, sampling_of
from tests.e2e.test_tokens import TWO_TWO, metrics, prompt_of
from tests.pace import scaled
from tests.reference import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone]

REQUESTS = 500
IN_FLIGHT = 64
FREE_WITHIN_S = 2.0
_RUNNING = "vllm:num_requests_running"
_FRESH_PAGE_S = 0.08
"""Seconds between two requests for /metrics that each get a new page: beyond 8 pages in half a second, the last is
repeated."""


@pytest.fixture(scope="module")
def system(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    # so few blocks that sequences run short of them and the cache evicts
    small = [*SMALL, "--num-kv-blocks", "300"]
    with RunningSystem.up(tmp_path_factory.mktemp("load"), checkpoint("llama"), *TWO_TWO, small=small) as running:
        yield running


class RequestLoad:
    """Sends the requests and counts their outcomes."""

    def __init__(self, client: ApiClient, seed: int) -> None:
        self.client = client
        self.chooser = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.samples: list[tuple[list[int], dict[str, Any], list[int]]] = []

    async def run(self) -> None:
        gate = asyncio.Semaphore(IN_FLIGHT)
        plans = [self._plan(index) for index in range(REQUESTS)]
        await asyncio.gather(*(self._one(gate, *plan) for plan in plans))

    def _plan(self, index: int) -> tuple[list[int], dict[str, Any], int | None, bool]:
        """Return prompt, fields, the token after which the client leaves (0: at once), and whether it streams."""
        choose = self.chooser
        length = int(min(900, choose.lognormvariate(4, 1.2))) + 1
        prompt = prompt_of(min(length, 160), 40 + index % 7)[:length] + prompt_of(max(0, length - 160), 1000 + index)
        fields = {
            "max_tokens": choose.randint(1, 40),
            "temperature": choose.choice([0.0, 1.0]),
            "seed": index,
            "ignore_eos": True,
            "n": choose.choice([1, 1, 1, 1, 2]),
        }
        leaves = choose.randint(0, 6) if index % 10 == 3 else None
        return prompt, fields, leaves, leaves is not None or choose.random() < 0.5

    async def _one(
        self, gate: asyncio.Semaphore, prompt: list[int], fields: dict[str, Any], leaves: int | None, streams: bool
    ) -> None:
        async with gate:
            if leaves is not None:
                self.outcomes[await self._leave(prompt, fields, leaves)] += 1
                return
            ask = self.client.stream if streams else self.client.complete
            answer = await ask(prompt, **fields)
            assert answer.prompt == prompt
            assert [choice.finish_reason for choice in answer.choices] == ["length"] * fields["n"]
            assert [len(choice.token_ids) for choice in answer.choices] == [fields["max_tokens"]] * fields["n"]
            if self.chooser.random() < 0.1:
                self.samples.append((prompt, fields, answer.ids))
            self.outcomes["complete"] += 1

    async def _leave(self, prompt: list[int], fields: dict[str, Any], leaves: int) -> str:
        """Close the connection after some tokens, or a moment after sending when ``leaves`` is 0."""
        fields = {**fields, "max_tokens": 400, "prompt": prompt, "stream": True, "return_token_ids": True}
        if leaves == 0:
            task = asyncio.create_task(self.client.post("/v1/completions", **fields))
            await asyncio.wait({task}, timeout=self.chooser.uniform(0, 0.05))
            if task.done():
                task.result().close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return "left"
        response = await self.client.post("/v1/completions", **fields)
        assert response.status == 200, await response.text()
        seen = 0
        async for event in events(response):
            assert "error" not in event, event
            seen += sum(bool(choice.get("token_ids")) for choice in event["choices"])
            if seen >= leaves:
                break
        response.close()
        return "left"


def outcomes(samples: dict[str, float]) -> dict[str, float]:
    """Return tandem_requests_total by outcome, summed over all paths."""
    found: Counter[str] = Counter()
    for name, value in samples.items():
        if name.startswith("tandem_requests_total{"):
            found[name.split('outcome="')[1].split('"')[0]] += value
    return dict(found)


async def test_everything_is_accounted_for_and_all_blocks_come_back(
    system: RunningSystem, oracle: Callable[[str], Reference]
) -> None:
    async with system.client() as client:
        load = RequestLoad(client, seed=20)
        before = outcomes(await metrics(client))
        await load.run()
        await client.until_idle(FREE_WITHIN_S)
        assert load.outcomes == {"complete": REQUESTS * 9 // 10, "left": REQUESTS // 10}
        after = outcomes(await metrics(client))
    counted = {name: after[name] - before.get(name, 0) for name in after}
    # a client that leaves before its headers are read is not counted, and one that leaves late may have its whole
    # answer already (done); all other requests are counted exactly once
    assert 0 <= counted["done"] - load.outcomes["complete"] <= load.outcomes["left"]
    assert REQUESTS * 8 // 10 <= sum(counted.values()) <= REQUESTS
    assert not counted["failed"], counted
    reference = oracle("llama")
    assert len(load.samples) > 20
    for prompt, fields, ids in load.samples:
        reference.check(prompt, ids, sampling_of(fields), name=f"{len(prompt)} tokens")


async def test_a_client_that_leaves_frees_its_blocks_at_once(system: RunningSystem) -> None:
    """Clients leave while the prompt is computed, while its KV travels, and while the answer streams."""
    async with system.client() as client:
        for tokens in (0, 0, 0, 1, 2, 30):
            fields = {"prompt": prompt_of(1500, 50 + tokens), "max_tokens": 500, "stream": True, "ignore_eos": True}
            response = asyncio.create_task(client.post("/v1/completions", return_token_ids=True, **fields))
            if tokens == 0:
                await _until_running(client)
                response.cancel()
                [begun] = await asyncio.gather(response, return_exceptions=True)
                if isinstance(begun, aiohttp.ClientResponse):  # it streams already
                    begun.close()
            else:
                await _read_tokens(await response, tokens)
            await client.until_idle(within_s=1)


async def _until_running(client: ApiClient) -> None:
    """Wait until a worker runs the only request."""
    deadline = time.monotonic() + scaled(5.0)
    while not sum([value for name, value in (await metrics(client)).items() if name.startswith(_RUNNING)]):
        assert time.monotonic() < deadline, "the request never ran"
        await asyncio.sleep(_FRESH_PAGE_S)


async def _read_tokens(response: aiohttp.ClientResponse, count: int) -> None:
    async for event in events(response):
        count -= len(event["choices"])
        if count <= 0:
            break
    response.close()
