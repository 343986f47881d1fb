"""The mock workers of the coordinator's goal, with a real coordinator: their messages are what the goal measures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bench.goals.mocks import MockWorker, hello_of
from common.net.messages import Role
from coordinator.cluster.registry import WorkerHandle
from tests.chaos.cluster import state_of
from tests.fakes.checkpoint import fake_checkpoint
from tests.pace import scaled
from tests.unit.coordinator.fake_cluster import FakeCluster, open_cluster, until

STEP_S = 0.005
ROOT = Path(__file__).parents[4]
ROLES: tuple[Role, ...] = ("prefill", "decode")


@contextmanager
def turning(worker: MockWorker) -> Iterator[None]:
    """Run ``worker`` in a thread; it has no end of its own, as its process is normally killed."""
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            worker._turn(time.monotonic())
            worker._channels.poll(STEP_S)
        worker._membership.close()
        worker._channels.close()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[FakeCluster, MockWorker]]:
    """Yield a coordinator with a mock worker of each role, and the decode worker."""
    model = tmp_path / "model"
    fake_checkpoint(model)
    async with open_cluster(model) as cluster:
        address = cluster.dispatcher.gateway.address
        prefill, decode = (MockWorker(hello_of(str(model), role), address, STEP_S) for role in ROLES)
        with turning(prefill), turning(decode):
            await until(
                lambda: len([each for each in cluster.dispatcher.gateway.registry if each.ready]) == 2, "both join"
            )
            yield cluster, decode
            await until(lambda: not decode._streams, "nothing is left")


async def test_mock_workers_answer_with_the_first_token_of_the_prompt(served: tuple[FakeCluster, MockWorker]) -> None:
    cluster, _ = served

    async def ask(first: int, count: int) -> tuple[int, str | None]:
        body = {"prompt": [first, 8, 9], "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
        response, answer = await cluster.post("/v1/completions", body)
        assert response.status == 200, answer
        assert answer["choices"][0]["token_ids"] == [first] * count
        assert answer["usage"]["completion_tokens"] == count
        return response.status, response.headers.get("x-tandem-path")

    counts = (1, 2, 3, 40)
    found = await asyncio.gather(*(ask(10 + count, count) for count in counts))
    assert found == [(200, "prefill"), *[(200, "disagg")] * 3]


async def test_a_mock_worker_takes_a_step_for_all_that_it_serves(served: tuple[FakeCluster, MockWorker]) -> None:
    """Tokens after the first come no faster than the worker's steps, however many streams it has."""
    cluster, _ = served
    body = {"prompt": [7, 8], "max_tokens": 21, "ignore_eos": True}
    started = time.monotonic()
    await asyncio.gather(*(cluster.post("/v1/completions", body) for _ in range(4)))
    assert time.monotonic() - started >= 19 * STEP_S


async def test_a_mock_worker_forgets_a_request_whose_client_has_left(served: tuple[FakeCluster, MockWorker]) -> None:
    cluster, decode = served
    asked = asyncio.create_task(
        cluster.post("/v1/completions", {"prompt": [7], "max_tokens": 8000, "ignore_eos": True})
    )
    await until(lambda: decode._streams, "decode has the request")
    asked.cancel()
    await until(lambda: not decode._streams, "it got the Abort of its request")
    assert cluster.dispatcher.records == {}


async def test_mock_workers_answer_their_leases(
    served: tuple[FakeCluster, MockWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the coordinator would give them up in the middle of a measurement."""
    registry = served[0].dispatcher.gateway.registry
    renewed, answered, both = registry.renewed, set(), {worker.id for worker in registry}
    assert len(both) == 2

    def note(worker: WorkerHandle) -> None:
        answered.add(worker.id)
        renewed(worker)

    monkeypatch.setattr(registry, "renewed", note)
    await until(lambda: answered == both, "both have answered")


_RUN = """
import multiprocessing, os, signal
from bench.goals import mocks
from bench.goals.coordinator import Children
if __name__ == "__main__":
    children = Children()
    children.start_and_receive(mocks.replay, [b"data: x"], 0.01)
    print(children.processes[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_nothing_is_left_of_a_run_that_was_killed(tmp_path: Path) -> None:
    (script := tmp_path / "killed.py").write_text(_RUN)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=ROOT,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    deadline = time.monotonic() + scaled(10.0)
    with suppress(FileNotFoundError):
        while state_of(int(ended.stdout)) != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
