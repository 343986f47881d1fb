"""Where the time of a request went, on a real system: the spans add up, and a migration shows both workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import ApiClient, RunningSystem, tandem
from tests.e2e.test_tokens import prompt_of
from tests.pace import scaled

pytestmark = pytest.mark.e2e

WITHIN_MS = 2.0
"""How far the sum of spans may differ from the time that the server measured for the whole."""


@pytest.fixture
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


async def until(client: ApiClient, id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return a request as soon as it fulfils ``condition``."""
    async with asyncio.timeout(scaled(30)):
        while True:
            async with client.session.get(f"/admin/requests/{id}") as response:
                assert response.status == 200, await response.text()
                request: dict[str, Any] = await response.json()
            if condition(request):
                return request
            await asyncio.sleep(0.01)


def is_complete(request: dict[str, Any]) -> bool:
    """Return whether a request has ended and its last hand-off was reported."""
    ended = request["total_ms"] is not None
    return ended and all(span["detail"]["bytes"] is not None for span in spans(request, "transfer")[-1:])


def spans(request: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [span for span in request["spans"] if span["name"] == name]


def length(request: Mapping[str, Any], *names: str) -> float:
    """Return the milliseconds of all top-level spans of these names."""
    found = [span for span in request["spans"] if span["name"] in names and span["parent"] is None]
    return sum(float(span["end_ms"] - span["start_ms"]) for span in found)


def check(request: Mapping[str, Any]) -> None:
    exposed_ms = sum(span["detail"]["exposed_ms"] for span in spans(request, "transfer"))
    all_ms = length(request, "tokenize", "queue", "prefill", "decode", "retry", "migration") + exposed_ms
    assert all_ms == pytest.approx(request["total_ms"], abs=WITHIN_MS)
    for span in request["spans"]:
        parent = span if span["parent"] is None else request["spans"][span["parent"]]
        assert parent["start_ms"] <= span["start_ms"] <= span["end_ms"] <= parent["end_ms"] + 0.002, span


async def test_spans_of_a_hand_off(tmp_path: Path, model: Path) -> None:
    flags = "--local-prefill", "never", "--max-num-batched-tokens", "64"
    with RunningSystem.up(tmp_path, model, *flags) as system:
        async with system.client() as client:
            answer = await client.complete(prompt_of(200, 1), max_tokens=12, ignore_eos=True, return_metrics=True)
            request = await until(client, answer.body["id"], is_complete)
        traced = tandem("trace", answer.body["id"], "--url", system.url)
    check(request)
    assert length(request, "tokenize", "queue", "prefill") == pytest.approx(request["ttft_ms"], abs=WITHIN_MS)
    assert request["ttft_ms"] == pytest.approx(answer.metrics["ttft_ms"], abs=0.01)
    (prefill,), (transfer,), (decode,) = (spans(request, name) for name in ("prefill", "transfer", "decode"))
    chunks = spans(request, "prefill_chunk")
    assert len(chunks) == prefill["detail"]["chunks"] == 4
    assert sum(chunk["detail"]["tokens"] for chunk in chunks) == 200
    assert chunks[-1]["end_ms"] == prefill["end_ms"]
    computed_ms = sum(chunk["end_ms"] - chunk["start_ms"] for chunk in chunks)
    assert 0 < computed_ms <= prefill["detail"]["compute_ms"] + 0.01
    assert transfer["detail"]["bytes"] == answer.metrics["kv_bytes"] or answer.metrics["kv_bytes"] is None
    assert transfer["end_ms"] <= decode["start_ms"] + 0.002 and decode["detail"]["tokens"] == 11
    assert (prefill["worker"], decode["worker"]) == ("prefill-0", "decode-0")
    assert traced.returncode == 0, traced.stderr
    assert "prefill-0 → decode-0 (disagg)" in traced.stdout and "200 tokens in 4 steps" in traced.stdout


@pytest.mark.parametrize(
    ("flags", "path"), [(("--local-prefill", "always"), "local"), (("--colocated", "1"), "colocated")]
)
@pytest.mark.whole
async def test_spans_of_a_prompt_that_is_computed_where_it_is_decoded(
    flags: tuple[str, ...], path: str, tmp_path: Path, model: Path
) -> None:
    with RunningSystem.up(tmp_path, model, *flags, "--max-num-batched-tokens", "64") as system:
        async with system.client() as client:
            answer = await client.complete(prompt_of(200, 1), max_tokens=8, ignore_eos=True)
            request = await until(client, answer.body["id"], is_complete)
    check(request)
    assert request["path"] == path and not spans(request, "transfer")
    (prefill,), (decode,) = spans(request, "prefill"), spans(request, "decode")
    assert prefill["worker"] == decode["worker"] and prefill["end_ms"] == decode["start_ms"]
    assert sum(chunk["detail"]["tokens"] for chunk in spans(request, "prefill_chunk")) == 200


@pytest.mark.parametrize("local", ["never", pytest.param("always", marks=pytest.mark.whole)])
async def test_a_migrated_request_shows_both_workers_and_the_gap(local: str, tmp_path: Path, model: Path) -> None:
    flags = "--decode", "2", "--local-prefill", local, "--max-num-batched-tokens", "64"
    with RunningSystem.up(tmp_path, model, *flags) as system:
        async with system.client() as client:
            begun: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
            asked = asyncio.create_task(
                client.stream(prompt_of(60, 2), begun=begun, max_tokens=400, ignore_eos=True, return_metrics=True)
            )
            headers = await begun
            first = headers["x-tandem-decode"]
            await until(client, headers["x-request-id"], lambda request: request["output_tokens"] > 20)
            os.kill((await client.workers())[first]["pid"], signal.SIGKILL)
            answer = await asked
            assert len(answer.ids) == 400
            request = await until(client, headers["x-request-id"], is_complete)
    check(request)
    assert (request["migrations"], request["retries"]) == (1, 0) and request["output_tokens"] == 400
    (gap,) = spans(request, "migration")
    assert gap["detail"]["from"] == first and gap["end_ms"] > gap["start_ms"]
    other = ({"decode-0", "decode-1"} - {first}).pop()
    places = [span["detail"]["decode"] for span in spans(request, "place")]
    assert places == [first, other] and [span["worker"] for span in spans(request, "decode")] == places
    inside = {span["name"] for span in request["spans"] if span["parent"] == request["spans"].index(gap)}
    assert inside == {"queue", "place", "prefill"}
    again, goes_on = spans(request, "prefill")[-1], spans(request, "decode")[-1]
    assert again["worker"] == (other if local == "always" else "prefill-0")
    chunks = [span for span in spans(request, "prefill_chunk") if span["attempt"] == again["attempt"]]
    assert len(chunks) == again["detail"]["chunks"] >= 1
    assert {(span["worker"], span["parent"]) for span in chunks} == {(again["worker"], request["spans"].index(again))}
    assert chunks[0]["start_ms"] > gap["start_ms"] and chunks[-1]["end_ms"] == gap["end_ms"]
    sent_before = 400 - 1 - goes_on["detail"]["tokens"]
    computed = sum(span["detail"]["tokens"] for span in chunks) + again["detail"]["cached_tokens"]
    assert computed == 60 + sent_before, "the prompt, and the tokens sent before the loss"
    assert request["itl_ms"]["max"] >= gap["end_ms"] - gap["start_ms"] - WITHIN_MS
