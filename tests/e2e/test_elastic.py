"""Workers join and leave a running system, each started by hand with its own command."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import MODEL_LEN, READY_S, ApiClient, RunningSystem, TandemProcess, sampling_of
from tests.e2e.test_tokens import prompt_of
from tests.pace import scaled
from tests.reference import BFLOAT16, FLOAT32, Reference, Tolerance

pytestmark = pytest.mark.e2e

FIELDS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
_CONTROL = re.compile(r"workers at tcp://\S*?:(\d+)\b")


@pytest.fixture
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


class ElasticCluster:
    """A coordinator and the workers started for it."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory, self.model = directory, model
        self.workers: dict[str, TandemProcess] = {}
        words = ["coordinator", model, "--port", "0", "--control-port", "0", "--served-model-name", RunningSystem.name]
        self.coordinator = TandemProcess.start(directory / "coordinator.log", *words)
        self.system = RunningSystem(self.coordinator, RunningSystem._find_url(self.coordinator))
        found = _CONTROL.search(self.coordinator.text)
        assert found, self.coordinator.text
        self.control = f"127.0.0.1:{found[1]}"

    def start(self, role: str, name: str, *flags: str) -> None:
        words = [role, self.model, "--coordinator", self.control, "--name", name, "--threads", "1"]
        words += ["--dtype", "float32", "--num-kv-blocks", "300", "--max-model-len", str(MODEL_LEN), *flags]
        words += ["--served-model-name", RunningSystem.name]
        self.workers[name] = TandemProcess.start(self.directory / f"{name}.log", *words)

    async def until_ready(self, client: ApiClient, *names: str) -> None:
        deadline = time.monotonic() + READY_S
        while not set(names) <= {name for name, w in (await client.workers()).items() if w["state"] == "ready"}:
            for name in names:
                self.workers[name].check_alive()
            assert time.monotonic() < deadline, f"{names} have not joined:\n{self.coordinator.text}"
            await asyncio.sleep(0.05)

    async def until_gone(self, client: ApiClient, name: str) -> None:
        deadline = time.monotonic() + scaled(10.0)
        while (worker := (await client.workers()).get(name)) and worker["state"] == "ready":
            assert time.monotonic() < deadline, f"{name} is still there: {worker}"
            await asyncio.sleep(0.05)

    def stop(self, name: str) -> None:
        self.workers.pop(name).stop()

    def stop_all(self) -> None:
        for name in list(self.workers):
            self.stop(name)
        self.coordinator.stop()

    def kill_all(self) -> None:
        for process in (*self.workers.values(), self.coordinator):
            process.kill()


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[ElasticCluster]:
    with _cluster(tmp_path, model) as made:
        yield made


@contextmanager
def _cluster(directory: Path, model: Path) -> Iterator[ElasticCluster]:
    made = ElasticCluster(directory, model)
    try:
        yield made
        made.stop_all()
    finally:
        made.kill_all()


async def test_workers_join_and_leave_a_running_system(
    cluster: ElasticCluster, oracle: Callable[[str], Reference], model: Path
) -> None:
    reference = oracle("llama")

    async def ask(client: ApiClient, length: int) -> tuple[str, str | None]:
        answer = await client.complete(prompt_of(length, 60), **FIELDS)
        reference.check(answer.prompt, answer.ids, sampling_of(FIELDS))
        return answer.path, answer.headers.get("x-tandem-decode")

    async with cluster.system.client() as client:
        assert await client.ready() == 503, "no worker has joined"
        started = time.monotonic()
        async with await client.post("/v1/completions", prompt=[9, 9], **FIELDS) as response:
            assert response.status == 503
            assert "decode" in (await response.json())["error"]["message"]
        assert time.monotonic() - started < 3 + scaled(2), "a missing role is answered at once, not at the deadline"

        cluster.start("decode", "d0")
        cluster.start("prefill", "p0", "--block-size", "32")  # workers may differ in block size
        await cluster.until_ready(client, "d0", "p0")
        assert await client.ready() == 200
        assert await ask(client, 700) == ("disagg", "d0")

        await asyncio.to_thread(cluster.stop, "p0")
        await cluster.until_gone(client, "p0")
        assert await ask(client, 701) == ("local", "d0"), "without a prefill worker, decode does it all"

        cluster.start("decode", "d1")
        cluster.start("prefill", "p1", "--kv-transport", "zmq")
        await cluster.until_ready(client, "d1", "p1")
        paths = await asyncio.gather(*(ask(client, 600 + i) for i in range(8)))
        assert {decode for _, decode in paths} == {"d0", "d1"}, "the new one gets its share"

        running = asyncio.gather(*(ask(client, 500 + i) for i in range(8)))
        await asyncio.to_thread(cluster.stop, "d0")
        assert len(await running) == 8, "no request fails when a worker leaves"
        await cluster.until_gone(client, "d0")
        assert await ask(client, 702) == ("disagg", "d1")


MIGRATED = re.compile(r"^tandem_migrations_total (\S+)$", re.MULTILINE)


async def number(client: ApiClient, pattern: re.Pattern[str]) -> float:
    """Return the number that ``pattern`` captures in GET /metrics."""
    async with client.session.get("/metrics") as response:
        found = pattern.search(await response.text())
    assert found, pattern
    return float(found[1])


LONG = {"max_tokens": 240, "ignore_eos": True, "stop": ["\u2603 that no answer has"]}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0.9, "seed": 7, "n": 2, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.1, "seed": 8, "top_k": 20, "top_p": 0.9, "presence_penalty": 0.4, "logprobs": 0},
    {"temperature": 0.0, "min_tokens": 5, "n": 3},
]


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_worker_costs_a_pause_and_no_token(
    cluster: ElasticCluster, oracle: Callable[[str], Reference], role: str
) -> None:
    """Requests with penalties, seeds, log-probabilities and several choices continue as if no worker had died."""
    reference = oracle("llama")

    begun: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()

    async def ask(client: ApiClient, at: int) -> None:
        fields = LONG | KINDS[at % len(KINDS)]
        answer = await client.stream(prompt_of(30 + 50 * at, 62 + at), begun=None if at else begun, **fields)
        assert len(answer.choices) == fields.get("n", 1)
        for index, choice in enumerate(answer.choices):
            assert len(choice.token_ids) == 240 and choice.finish_reason == "length"
            logprobs = choice.logprobs if "logprobs" in fields else None
            assert logprobs is None or len(logprobs) == 240
            sampling = sampling_of(fields)
            reference.check(answer.prompt, choice.token_ids, sampling, choice=index, logprobs=logprobs)

    async with cluster.system.client() as client:
        names = "p0", "p1", "d0", "d1"
        for name in names:
            cluster.start("prefill" if name.startswith("p") else "decode", name)
        await cluster.until_ready(client, *names)
        streams = [asyncio.create_task(ask(client, at)) for at in range(8)]
        headers = await begun
        cluster.workers.pop("p0" if role == "prefill" else headers["x-tandem-decode"]).kill()
        await asyncio.gather(*streams)
        assert role == "prefill" or await number(client, MIGRATED) >= 1, "a stream was interrupted"
        await client.until_idle(10)


async def test_a_second_signal_stops_a_worker_that_was_started_alone(
    cluster: ElasticCluster, oracle: Callable[[str], Reference]
) -> None:
    """The second signal comes in the middle of a stream, which continues on another worker."""
    fields = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True}

    async with cluster.system.client() as client:
        cluster.start("prefill", "p0")
        for name in ("d0", "d1"):
            cluster.start("decode", name, "--drain-timeout", "60")
        await cluster.until_ready(client, "p0", "d0", "d1")
        begun: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        asked = asyncio.create_task(client.stream(prompt_of(40, 63), begun=begun, **fields))
        leaving = cluster.workers[(await begun)["x-tandem-decode"]]
        leaving.popen.send_signal(signal.SIGTERM)
        while "draining for at most 60 s" not in leaving.text:
            assert not asked.done()
            await asyncio.sleep(0.001)
        assert leaving.popen.poll() is None, "it has the stream to end"
        leaving.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(leaving.popen.wait, READY_S) == 0
        answer = await asked
        assert await number(client, MIGRATED) == 1, "it did not wait for the stream's end"
        oracle("llama").check(answer.prompt, answer.choices[0].token_ids, sampling_of(fields))
        assert len(answer.choices[0].token_ids) == 1900


async def test_workers_of_different_kv_dtypes_serve_together(
    cluster: ElasticCluster, oracle: Callable[[str], Reference]
) -> None:
    """Answers are right within bfloat16's tolerance, and within float32's once both workers use float32."""
    reference = oracle("llama")

    async def ask(client: ApiClient, length: int, tolerance: Tolerance) -> tuple[str, str | None, int]:
        answer = await client.complete(prompt_of(length, 61), **FIELDS)
        reference.check(answer.prompt, answer.ids[:1], sampling_of(FIELDS), name="the token of prefill")
        reference.check(answer.prompt, answer.ids, sampling_of(FIELDS), tolerance=tolerance)
        return answer.path, answer.headers.get("x-tandem-decode"), answer.cached

    async with cluster.system.client() as client:
        cluster.start("prefill", "p0")
        cluster.start("decode", "d0", "--dtype", "bfloat16", "--block-size", "32")
        await cluster.until_ready(client, "p0", "d0")
        assert {name: w["dtype"] for name, w in (await client.workers()).items()} == {"p0": "float32", "d0": "bfloat16"}
        for length in (3, 100, 700):
            assert await ask(client, length, BFLOAT16) == ("disagg", "d0", 0)
        assert await ask(client, 700, BFLOAT16) == ("disagg", "d0", 688), "prefill has it cached"

        cluster.start("decode", "d1", "--kv-transport", "zmq")
        await cluster.until_ready(client, "d1")
        await asyncio.to_thread(cluster.stop, "d0")
        await cluster.until_gone(client, "d0")
        assert await ask(client, 100, FLOAT32) == ("disagg", "d1", 96)


async def test_a_worker_of_another_model_is_refused(cluster: ElasticCluster, checkpoint: Callable[[str], Path]) -> None:
    async with cluster.system.client() as client:
        cluster.start("decode", "d0")
        await cluster.until_ready(client, "d0")
        cluster.model = checkpoint("llama-untied")
        cluster.start("decode", "stranger")
        stranger = cluster.workers.pop("stranger")
        assert await asyncio.to_thread(stranger.popen.wait, READY_S) != 0
        lines = [line for line in stranger.text.splitlines() if line.lstrip().startswith(("error:", "why:", "do:"))]
        assert len(lines) == 3, stranger.text
        assert "refuse" in lines[0]
        assert set(await client.workers()) == {"d0"}
