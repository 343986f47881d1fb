"""After a coordinator's start, requests wait a moment for running workers to join, and no longer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.e2e.system import READY_S, SMALL, ApiClient, RunningSystem, TandemProcess
from tests.pace import scaled
from tests.security.outside import coordinator

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

HELD_S = 3.0
"""Seconds after a coordinator's start for which requests wait for workers."""
LATE_S = 1.0
"""Seconds of allowance for the machine."""
HELLO = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
_CONTROL = re.compile(r"workers at tcp://\S*?:(\d+)\b")


async def until_it_listens(client: ApiClient) -> None:
    """Wait until the coordinator accepts connections."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            async with client.session.get("/health") as response:
                assert response.status == 200
                return
        except aiohttp.ClientConnectionError:
            assert time.monotonic() < deadline, f"no process listens:\n{client.system.process.text}"
            await asyncio.sleep(0.01)


async def ask(client: ApiClient) -> tuple[int, str | None, float]:
    """Return (status, error code, seconds until the answer)."""
    began = time.monotonic()
    async with await client.post("/v1/completions", **HELLO) as response:
        body = await response.json()
        return response.status, body.get("error", {}).get("code"), time.monotonic() - began


async def test_a_coordinator_that_was_killed_serves_its_workers_as_soon_as_it_listens(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    model = checkpoint("llama")

    def start(*ports: str) -> TandemProcess:
        words = ["coordinator", model, "--served-model-name", RunningSystem.name, "--port", ports[0]]
        return TandemProcess.start(tmp_path / "coordinator.log", *words, "--control-port", ports[1])

    first = start("0", "0")
    processes = [first]
    try:
        system = RunningSystem(first, RunningSystem._find_url(first))
        found = _CONTROL.search(first.text)
        assert found, first.text
        for role in ("prefill", "decode"):
            words = [role, model, "--coordinator", f"127.0.0.1:{found[1]}", "--served-model-name", RunningSystem.name]
            processes.append(TandemProcess.start(tmp_path / f"{role}.log", *words, *SMALL))
        async with system.client() as client:
            deadline = time.monotonic() + READY_S
            while [worker["state"] for worker in (await client.workers()).values()] != ["ready"] * 2:
                assert time.monotonic() < deadline, first.text
                await asyncio.sleep(0.05)
            for _ in range(2):
                processes[0].popen.kill()
                processes[0].popen.wait()
                processes[0] = system.process = start(system.url.rpartition(":")[2], found[1])
                await until_it_listens(client)
                assert [(await answer)[0] for answer in [ask(client) for _ in range(3)]] == [200] * 3
        for process in reversed(processes):
            process.stop()
    finally:
        for process in processes:
            process.kill()


async def test_a_coordinator_that_its_launcher_starts_again_does_so(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    with RunningSystem.up(tmp_path, checkpoint("llama"), "--colocated", "1") as system:
        children = psutil.Process(system.process.popen.pid).children()
        (killed,) = (child for child in children if "coordinator" in child.cmdline())
        async with system.client() as client:
            killed.kill()
            await asyncio.to_thread(psutil.wait_procs, [killed], 10)
            await until_it_listens(client)
            answers = await asyncio.gather(*(ask(client) for _ in range(8)))
        assert [status for status, *_ in answers] == [200] * 8
        system.process.look_around()


async def one_is_refused(client: ApiClient, requests: int) -> list[asyncio.Task[tuple[int, str | None, float]]]:
    """Send one request more than the queue has places for; return those that wait."""
    asked = [asyncio.create_task(ask(client)) for _ in range(requests)]
    refused, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result()[:2] for task in refused] == [(429, "server_is_overloaded")]
    return list(waiting)


async def test_without_workers_requests_wait_for_three_seconds_after_the_start_and_then_not_at_all(
    tmp_path: Path,
) -> None:
    flags = ("--max-queued-requests", "2", "--served-model-name", RunningSystem.name)
    with coordinator(tmp_path, *flags) as system:
        began = time.monotonic()
        async with system.client() as client:
            gone, held = await one_is_refused(client, 3)
            gone.cancel()
            while (answer := await ask(client))[0] == 429:  # until the place of the cancelled request is free
                pass
            for status, code, _ in (answer, await held):
                assert (status, code) == (503, "no_decode_workers")
            assert HELD_S / 2 < time.monotonic() - began < HELD_S + scaled(LATE_S)
            status, code, took_s = await ask(client)
            assert (status, code) == (503, "no_decode_workers") and took_s < scaled(LATE_S)


async def test_a_drain_does_not_wait_for_workers(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--max-queued-requests", "1", "--served-model-name", RunningSystem.name) as system:
        async with system.client() as client:
            (held,) = await one_is_refused(client, 2)
            began = time.monotonic()
            system.process.popen.terminate()
            assert (await held)[0] == 503 and time.monotonic() - began < scaled(LATE_S)
            assert await asyncio.to_thread(system.process.popen.wait, scaled(10)) == 0
