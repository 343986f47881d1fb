"""Quantized checkpoints are served exactly: every greedy token is the one of the same model, dequantized in float32.

One system with prefill and decode workers apart serves each, another one colocated; a stream goes on when its worker is
drained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.format_cases import Case, cases
from tests.checkpoints.quantized_maker import Pair
from tests.e2e.spawner import Spawner
from tests.e2e.system import MODEL_LEN, ApiClient, RunningSystem, TandemProcess, sampling_of
from tests.e2e.test_tokens import prompt_of
from tests.reference import Reference, Tolerance

pytestmark = pytest.mark.e2e

TOLERANCE = Tolerance(greedy_stds=1e-3, logprob=1e-3)
SAMPLE = (
    *(("Q4_1 as SmolLM2", "llama"), ("Q4_K_M", "qwen3-moe"), ("GPTQ in order of activation", "gemma2")),
    *(("fp8 in blocks", "qwen3-moe"), ("MXFP4", "gpt-oss")),
)


@pytest.fixture(scope="module", params=cases(*SAMPLE), ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    return case.make(tmp_path_factory.mktemp(str(case)))


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return Reference(pair.reference, MODEL_LEN)


@pytest.fixture
def up(pair: Pair, tmp_path: Path, one_spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    TandemProcess.spawner = one_spawner
    yield partial(RunningSystem.up, tmp_path, pair.model, "--products", "exact")
    TandemProcess.spawner = None


async def ask_all(client: ApiClient, reference: Reference, path: str) -> None:
    """Send prompts of several lengths at once and check every token and log-probability."""
    fields = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    lengths = (1, 17, 100, 530)
    answers = await asyncio.gather(*(client.complete(prompt_of(length, 5), **fields) for length in lengths))
    for length, answer in zip(lengths, answers, strict=True):
        assert (len(answer.ids), answer.path) == (24, path)
        choice = answer.choices[0]
        reference.check(answer.prompt, choice.token_ids, sampling_of(fields), tolerance=TOLERANCE,
                        logprobs=choice.logprobs, top_logprobs=choice.top, name=f"{length} tokens")  # fmt: skip


async def test_prefill_and_decode_apart_and_a_stream_that_moves(up: Callable[..., Any], reference: Reference) -> None:
    with up("--prefill", "1", "--decode", "2", "--local-prefill", "never") as system:
        async with system.client() as client:
            await ask_all(client, reference, "disagg")
            begun: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
            fields = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
            stream = asyncio.create_task(client.stream(prompt_of(40, 6), begun=begun, **fields))
            worker = (await begun)["x-tandem-decode"]
            async with client.session.post("/admin/drain", json={"worker": worker, "timeout": 0}) as response:
                assert response.status == 202
            answer = await stream
            assert await migrations(client) >= 1
        await system.process.until_logged("weights stay quantized")
    assert len(answer.ids) == 400
    reference.check(answer.prompt, answer.ids, sampling_of(fields), tolerance=TOLERANCE)


@pytest.mark.whole
async def test_colocated(up: Callable[..., Any], reference: Reference) -> None:
    with up("--colocated", "1") as system:
        async with system.client() as client:
            await ask_all(client, reference, "colocated")


@pytest.mark.parametrize(
    "case",
    [
        Case("Q4_1 as SmolLM2", "llama"),
        *(pytest.param(Case(*each), marks=pytest.mark.whole) for each in (("Q4_K_M", "qwen3-moe"), ("AWQ", "qwen3"))),
    ],
    ids=str,
)
async def test_integer_products_are_the_same_in_both_topologies(
    case: Case, tmp_path: Path, one_spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the default. Their results depend neither on the batch nor on the worker."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    TandemProcess.spawner = one_spawner
    model, answers = case.make(tmp_path).model, []
    apart, together = ("--prefill", "1", "--decode", "1", "--local-prefill", "never"), ("--colocated", "1")
    for name, flags in (("apart", apart), ("together", together)):
        (tmp_path / name).mkdir()
        with RunningSystem.up(tmp_path / name, model, "--products", "integer", *flags) as system:
            async with system.client() as client:
                fields = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
                answers.append(
                    await asyncio.gather(*(client.complete(prompt_of(n, 5), **fields) for n in (3, 90, 400)))
                )
    TandemProcess.spawner = None
    assert [each.ids for each in answers[0]] == [each.ids for each in answers[1]]


async def migrations(client: ApiClient) -> float:
    async with client.session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("tandem_migrations_total"))
