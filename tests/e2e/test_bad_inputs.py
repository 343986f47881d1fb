"""The table of bad inputs against 1P1D with the built-in model: each answer, and the next good request."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common import builtin
from tests.e2e.bad_inputs import ADMIN_KEY, BAD, CONTEXT, KEY, TEXT, Bad
from tests.e2e.system import RunningSystem

pytestmark = pytest.mark.e2e
GOOD: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    flags = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--max-model-len", str(CONTEXT))
    with RunningSystem.up(tmp_path_factory.mktemp("bad"), builtin.path(), *flags, small=()) as running:
        yield running


async def _good(session: aiohttp.ClientSession) -> str:
    async with session.post(TEXT, json=GOOD, headers={"Authorization": f"Bearer {KEY}"}) as response:
        body = await response.json()
        assert response.status == 200, body
        return str(body["choices"][0]["text"])


async def _send(session: aiohttp.ClientSession, bad: Bad) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json", **bad.headers}
    async with session.request(
        bad.method, bad.path, data=io.BytesIO(bad.body) if bad.body else None, headers=headers
    ) as response:
        return response.status, (await response.json())["error"]


async def test_each_bad_input_has_its_answer_and_the_next_good_request_is_right(system: RunningSystem) -> None:
    assert len(BAD) >= 120 and len({bad.name for bad in BAD}) == len(BAD)
    wrong, seconds = [], []
    async with aiohttp.ClientSession(system.url) as session:
        expected = await _good(session)
        for bad in BAD:
            began = time.perf_counter()
            status, error = await _send(session, bad)
            seconds.append(time.perf_counter() - began)
            found = (status, error["type"], error["code"], error["param"])
            if found != (bad.status, bad.type, bad.code, bad.param):
                wrong.append(f"{bad.name}: {found}, not {(bad.status, bad.type, bad.code, bad.param)}")
            assert error["message"] and "Traceback" not in error["message"] and str(Path.cwd()) not in error["message"]
            assert await _good(session) == expected, bad.name
    print(f"{len(BAD)} bad inputs: median {statistics.median(seconds) * 1000:.1f} ms, longest {max(seconds):.3f} s")
    assert not wrong, "\n".join(wrong)
