"""At one and a half times the capacity, clients that retry like the openai client are almost all served."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.system import RunningSystem
from tests.leaked_keys import new_key
from tests.security.outside import ask, coordinator, request

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

MAX_RETRIES, MAX_RETRY_AFTER_S = 2, 60.0
"""Defaults of the openai client (3.57.0, ``_base_client.py``: ``_should_retry``, ``_calculate_retry_timeout``). It
obeys retry times of up to one minute, since 3.0 of up to two; the smaller bound is used here."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0
SLOTS, QUEUE = 5, 3
"""The coordinator sends a worker for four sequences one request more."""
TOKENS = 500
"""Tokens of each answer, about two seconds of work: if the server assumed less, a client would use up its three
tries."""


def delay_s(headers: dict[str, str], retries: int) -> float:
    """Return the seconds that the client waits before retry number ``retries`` + 1."""
    for name, divisor in (("retry-after-ms", 1000), ("retry-after", 1)):
        if name in headers:
            asked_s = float(headers[name]) / divisor
            if 0 < asked_s <= MAX_RETRY_AFTER_S:
                return asked_s
            break
    return float(min(FIRST_BACKOFF_S * 2**retries, MAX_BACKOFF_S) * (1 - 0.25 * random.random()))


async def send(session: aiohttp.ClientSession, prompt: list[int], refusals: list[dict[str, str]]) -> int:
    """Return the final status after the retries; ``refusals`` collects the headers of each 429."""
    fields = {"model": RunningSystem.name, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    for retries in range(MAX_RETRIES + 1):
        counted = {"x-stainless-retry-count": str(retries)}
        async with session.post("/v1/completions", json=fields, headers=counted) as response:
            await response.read()
            headers = {name.lower(): value for name, value in response.headers.items()}
            if response.status == 429:
                refusals.append(headers)
            if response.status not in (408, 409, 429) and response.status < 500:
                return response.status
        if retries < MAX_RETRIES:
            await asyncio.sleep(delay_s(headers, retries))
    return response.status


@pytest.mark.parametrize("same", [False, True], ids=["other prompts", "one prompt"])
async def test_two_retries_are_enough_at_one_and_a_half_times_the_capacity(
    tmp_path: Path, checkpoint: Callable[[str], Path], same: bool
) -> None:
    flags = ("--colocated", "1", "--max-num-seqs", "4", "--max-queued-requests", str(QUEUE))
    clients, key = math.ceil(1.5 * (SLOTS + QUEUE)), new_key()
    refusals: list[dict[str, str]] = []
    statuses: list[int] = []
    with RunningSystem.up(tmp_path, checkpoint("llama"), *flags, "--api-key", key) as system:
        headers = {"Authorization": f"Bearer {key}"}
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(system.url, connector=connector, timeout=timeout, headers=headers) as session:

            async def user(number: int) -> None:
                for nth in range(2):
                    prompt = [5, 6, 7] if same else [number + 5, nth + 5, 7]
                    statuses.append(await send(session, prompt, refusals))

            await asyncio.gather(*map(user, range(clients)))
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 0.95 * len(statuses), (statuses, refusals)
    assert refusals, "there was no room for all"
    for refusal in refusals:
        assert int(refusal["retry-after"]) == math.ceil(int(refusal["retry-after-ms"]) / 1000) <= MAX_RETRY_AFTER_S
    assert int(refusals[0]["retry-after-ms"]) > 1000, "nothing was measured yet, and no place frees at once"


def test_clients_that_are_refused_together_are_not_to_come_back_together(tmp_path: Path) -> None:
    """Without a worker the retry time is one second, spread by up to 20 % in both directions."""
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    with coordinator(tmp_path) as system:
        answers = [ask(system.url, request("POST", "/v1/completions", body=body)) for _ in range(100)]
    assert {answer.status for answer in answers} == {503}
    delays_ms = [int(answer.headers["retry-after-ms"]) for answer in answers]
    # fails by chance only if all 100 draws miss a quarter of the range
    assert 800 <= min(delays_ms) < 900 and 1100 < max(delays_ms) <= 1200
    assert len(set(delays_ms)) > 20
    for answer, delay_ms in zip(answers, delays_ms, strict=True):
        assert int(answer.headers["retry-after"]) == math.ceil(delay_ms / 1000)
