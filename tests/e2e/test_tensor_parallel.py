"""Whole systems whose workers are split among ranks: every token is right, and whichever process dies or hangs, the
system goes on and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.spawner import PRELOADED, RANKS
from tests.e2e.system import ApiClient, RunningSystem, sampling_of
from tests.e2e.test_tokens import metrics
from tests.fakes.rank_gpus import WORKER, XIDS, uuid_of
from tests.pace import scaled
from tests.reference import FLOAT32, Reference, Tolerance

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

NEARLY = Tolerance(greedy_stds=1.0)
"""For weights and KV in fp8: a wrong token is about three standard deviations away."""
NOTICED_S = 2.0
BACK_S = 60.0
DEGREES = {
    "2x2": ("--tensor-parallel-size", "2"),
    "2x1": ("--tensor-parallel-size", "2", "--decode-tensor-parallel-size", "1"),
    "2x2 in fp8": ("--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8", "--quantization", "fp8"),
}


@pytest.fixture(autouse=True)
def ranks_share_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS, "1")


@pytest.fixture
def up(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Any]:
    def start(degrees: str, kind: str = "llama", *more: str) -> Any:
        flags = ("--prefill", "1", "--decode", "1", "--local-prefill", "never", *DEGREES[degrees], *more)
        return RunningSystem.up(tmp_path, checkpoint(kind), *flags)

    return start


def prompt_of(length: int) -> list[int]:
    return [8 + (31 * at * at + length) % 500 for at in range(length)]


async def check(
    client: ApiClient, reference: Reference, length: int, tolerance: Tolerance = FLOAT32, **fields: Any
) -> None:
    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields}
    answer = await client.complete(prompt_of(length), **fields)
    assert answer.path == "disagg"
    reference.check(answer.prompt, answer.ids, sampling_of(fields), tolerance=tolerance)


async def pid_of(client: ApiClient, worker: str, other_than: int = 0) -> int:
    """Return the process id of ``worker`` once it is ready, and a new process if one is named."""
    deadline = time.monotonic() + scaled(BACK_S)
    while True:
        found = (await client.workers()).get(worker)
        if found is not None and found["state"] == "ready" and found["pid"] != other_than:
            return int(found["pid"])
        assert time.monotonic() < deadline, f"{worker} does not come back:\n{client.system.process.text}"
        await asyncio.sleep(0.05)


def other_ranks(worker: int) -> Iterator[psutil.Process]:
    """Yield the other ranks of the worker with this process id: those of its children that share its exchange."""
    for child in psutil.Process(worker).children():
        opened = [os.readlink(f"/proc/{child.pid}/fd/{each}") for each in os.listdir(f"/proc/{child.pid}/fd")]
        if any("tandem-ranks" in each for each in opened):
            yield child


@pytest.mark.parametrize(
    ("degrees", "kind"), [("2x1", "qwen3"), pytest.param("2x2", "gemma2", marks=pytest.mark.whole)]
)
async def test_every_token_is_right(
    up: Callable[..., Any], oracle: Callable[[str], Reference], degrees: str, kind: str
) -> None:
    with up(degrees, kind) as system:
        async with system.client() as client:
            sampled = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "logprobs": 1}
            lengths = (1, 16, 100, 700)
            requests = [check(client, oracle(kind), length, **each) for length in lengths for each in ({}, sampled)]
            await asyncio.gather(*requests)
            await client.until_idle(within_s=3)


@pytest.mark.whole
async def test_weights_and_kv_in_fp8_are_split_too(up: Callable[..., Any], oracle: Callable[[str], Reference]) -> None:
    with up("2x2 in fp8", "qwen3") as system:
        async with system.client() as client:
            lengths = (1, 16, 100, 700)
            await asyncio.gather(*(check(client, oracle("qwen3"), length, NEARLY) for length in lengths))


async def test_the_system_outlives_any_rank(up: Callable[..., Any], oracle: Callable[[str], Reference]) -> None:
    fields = {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True}
    with up("2x2") as system:
        async with system.client() as client:
            reference = oracle("llama")
            await check(client, reference, 40)

            decode = await pid_of(client, "decode-0")
            begun: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            stream = asyncio.create_task(client.stream(prompt_of(50), begun=begun, **fields))
            await begun
            (rank,) = other_ranks(decode)
            rank.send_signal(signal.SIGKILL)
            await client.system.process.until_logged(
                rf"rank 1 of 2 \(process {rank.pid}\) has died: SIGKILL", NOTICED_S
            )
            answer = await stream
            assert len(answer.ids) == fields["max_tokens"]
            reference.check(answer.prompt, answer.ids, sampling_of(fields))

            prefill = await pid_of(client, "prefill-0")
            (rank,) = other_ranks(prefill)
            rank.send_signal(signal.SIGSTOP)
            await client.system.process.until_logged(
                rf"rank 1 of 2 \(process {rank.pid}\) hangs: it has not answered", NOTICED_S
            )
            psutil.wait_procs([rank], scaled(NOTICED_S))
            assert not rank.is_running()
            await pid_of(client, "prefill-0", other_than=prefill)

            decode = await pid_of(client, "decode-0", other_than=decode)
            (rank,) = other_ranks(decode)
            os.kill(decode, signal.SIGKILL)
            psutil.wait_procs([rank], scaled(NOTICED_S))
            assert not rank.is_running(), "a rank outlives its worker"
            await pid_of(client, "decode-0", other_than=decode)
            await check(client, reference, 60)


async def test_ranks_on_gpus(
    up: Callable[..., Any], oracle: Callable[[str], Reference], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill computes on two stand-in GPUs, decode on the CPU. A dead rank, and then a fault of the GPU of the other
    rank, end the worker in words; both times it comes back."""
    pipe = tmp_path / "xids"
    os.mkfifo(pipe)
    for name, value in ((PRELOADED, "tests.fakes.rank_gpus"), (WORKER, "prefill-0"), (XIDS, str(pipe))):
        monkeypatch.setenv(name, value)
    with up("2x1", "llama", "--attention", "torch", "--num-kv-blocks", "256") as system:
        async with system.client() as client:
            reference = oracle("llama")
            for length in (1, 16, 100):
                await check(client, reference, length)
            async with asyncio.timeout(scaled(10.0)):
                gpu = 'tandem_gpu_temperature_celsius{gpu="1",worker="prefill-0"}'
                while gpu not in await metrics(client):  # noqa: ASYNC110 - a report comes once a second
                    await asyncio.sleep(0.05)

            prefill = await pid_of(client, "prefill-0")
            (rank,) = other_ranks(prefill)
            rank.send_signal(signal.SIGKILL)
            await client.system.process.until_logged(
                rf"rank 1 of 2 \(process {rank.pid}\) has died: SIGKILL", NOTICED_S
            )
            prefill = await pid_of(client, "prefill-0", other_than=prefill)
            await check(client, reference, 40)

            writing = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # an error if no worker listens
            os.write(writing, f"{uuid_of(1)} 95\n".encode())
            os.close(writing)
            await client.system.process.until_logged(r"worker prefill-0 leaves: GPU 1 \(.*\) reports Xid 95", NOTICED_S)
            await pid_of(client, "prefill-0", other_than=prefill)
            await check(client, reference, 60)
