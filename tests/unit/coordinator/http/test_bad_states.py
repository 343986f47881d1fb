"""Bad inputs by state: requests that are valid and come at a bad moment. Each has its status, type, code and headers on
every API, the server lives on, and the next good request is answered.

The other families are in tests/e2e/bad_inputs.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.app import drain
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, open_cluster, until

PROMPT = {"prompt": [50] * 16, "max_tokens": 8}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**HELLO, "max_tokens": 8},
    TEXT: PROMPT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 8},
    "/v1/messages": {**HELLO, "model": "tiny", "max_tokens": 8},
}
ANTHROPIC = {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


@dataclass(frozen=True)
class BadState:
    """A state and the answer that a request gets in it. ``retry_s``: the longest time that ``Retry-After`` may say,
    None if it is absent. ``closes``: whether the connection is closed."""

    name: str
    enter: Callable[[Path], Any]
    status: int
    type: str
    code: str
    retry_s: int | None = 60
    closes: bool = False


@asynccontextmanager
async def _busy(model: Path, **options: Any) -> AsyncIterator[FakeCluster]:
    """A cluster whose decode worker has room for one request: one runs, and one waits."""
    async with open_cluster(model, "prefill", **options) as cluster:
        await cluster.add("decode", step_s=0.05, changes={"kv_blocks": 4})
        tasks = [asyncio.create_task(cluster.post(TEXT, {**PROMPT, "max_tokens": 30})) for _ in range(2)]
        await until(lambda: cluster.dispatcher.admission.requests == 1, "one waits")
        yield cluster
        assert [response.status for response, _ in await asyncio.gather(*tasks)] == [200, 200]


def _full(model: Path) -> Any:
    return _busy(model, max_queued_requests=1)


def _full_of_tokens(model: Path) -> Any:
    return _busy(model, max_queued_tokens=20)


@asynccontextmanager
async def _without(model: Path, role: str, **options: Any) -> AsyncIterator[FakeCluster]:
    """A cluster whose only worker of ``role`` has left."""
    async with open_cluster(model, "prefill", "decode", **options) as cluster:
        (worker,) = [each for each in cluster.workers if each.role == role]
        worker.rejoins = False
        response, _ = await cluster.post("/admin/drain", {"worker": worker.name})
        assert response.status == 202
        await until(lambda: not cluster.dispatcher.registry.ready(worker.role), "it has left")
        yield cluster
        await cluster.add(worker.role)


def _no_decode(model: Path) -> Any:
    return _without(model, "decode")


def _no_prefill(model: Path) -> Any:
    return _without(model, "prefill", no_prefill_policy="reject")


@asynccontextmanager
async def _draining(model: Path) -> AsyncIterator[FakeCluster]:
    async with open_cluster(model, "prefill", drain_timeout=60.0) as cluster:
        await cluster.add("decode", step_s=0.02)
        asked = asyncio.create_task(cluster.post(TEXT, {**PROMPT, "max_tokens": 60}))
        await until(lambda: cluster.workers[1].busy, "it runs")
        ends = asyncio.create_task(drain(cluster.services, asyncio.Event()))
        await until(lambda: cluster.dispatcher.draining, "it drains")
        yield cluster
        assert (await asked)[0].status == 200
        await ends


@asynccontextmanager
async def _late(model: Path) -> AsyncIterator[FakeCluster]:
    """A cluster whose worker needs longer than a request may take."""
    async with open_cluster(model, request_timeout=0.2) as cluster:
        await cluster.add("colocated", delay_s=1.0)
        yield cluster


STATES = (
    BadState("the queue is full", _full, 429, "server_is_overloaded", "server_is_overloaded"),
    BadState("the queue is full of tokens", _full_of_tokens, 429, "server_is_overloaded", "server_is_overloaded"),
    BadState("no decode worker", _no_decode, 503, "server_error", "no_decode_workers", 2),
    BadState("no prefill worker", _no_prefill, 503, "server_error", "no_prefill_workers", 2),
    BadState("draining", _draining, 503, "server_error", "server_shutting_down", 2, closes=True),
    BadState("too late", _late, 504, "timeout_error", "request_timeout", None),
)


@pytest.mark.parametrize("state", STATES, ids=[state.name for state in STATES])
async def test_each_bad_state_has_its_answer(model: Path, state: BadState) -> None:
    async with state.enter(model) as cluster:
        for path, body in BODIES.items():
            for more in ({}, {"stream": True}):
                response, shown = await cluster.post(path, {**body, **more})
                error = shown["error"]
                assert response.status == state.status and error["message"], (path, shown)
                if path == "/v1/messages":
                    assert (shown["type"], error["type"]) == ("error", ANTHROPIC[state.status])
                else:
                    assert (error["type"], error["code"], error["param"]) == (state.type, state.code, None)
                _check_headers(response.headers, state)
        assert (await cluster.get("/health"))[0].status == 200


def _check_headers(headers: Any, state: BadState) -> None:
    assert headers["x-request-id"] and (headers.get("Connection") == "close") == state.closes
    assert ("Retry-After" in headers) == ("retry-after-ms" in headers) == (state.retry_s is not None)
    if state.retry_s is not None:
        milliseconds = int(headers["retry-after-ms"])
        assert milliseconds > 0 and int(headers["Retry-After"]) == -(-milliseconds // 1000) <= state.retry_s


@pytest.mark.parametrize("path", BODIES)
async def test_the_next_request_after_a_bad_state_is_answered(model: Path, path: str) -> None:
    async with _busy(model, max_queued_requests=1) as cluster:
        response, _ = await cluster.post(path, BODIES[path])
        assert response.status == 429
        await until(lambda: not cluster.dispatcher.records, "the others end")
        response, shown = await cluster.post(path, BODIES[path])
        assert response.status == 200, shown


@pytest.mark.parametrize("path", BODIES)
async def test_requests_with_the_same_id_at_once_are_both_answered(model: Path, path: str) -> None:
    """The id of a client is a name for logs. The server's own ids are new, so answers are never mixed."""
    async with open_cluster(model, "prefill") as cluster:
        await cluster.add("decode", step_s=0.01)
        alone = [_text(path, (await cluster.post(path, body))[1]) for body in _two(path)]
        headers = {"x-request-id": "mine-1"}
        both = await asyncio.gather(*(cluster.post(path, body, headers=headers) for body in _two(path)))
        assert [_text(path, shown) for _, shown in both] == alone and alone[0] != alone[1]
        assert [response.headers["x-request-id"] for response, _ in both] == ["mine-1"] * 2
        assert len({shown["id"] for _, shown in both}) == 2


def _two(path: str) -> list[dict[str, Any]]:
    """Return two bodies with different prompts."""
    other = {"prompt": [51] * 16, "input": "other", "messages": [{"role": "user", "content": "other"}]}
    body = BODIES[path]
    return [body, body | {name: value for name, value in other.items() if name in body}]


def _text(path: str, shown: dict[str, Any]) -> str:
    match path:
        case "/v1/responses":
            return str(shown["output"][0]["content"][0]["text"])
        case "/v1/messages":
            return str(shown["content"][0]["text"])
        case _:
            (choice,) = shown["choices"]
            return str(choice.get("text") or choice["message"]["content"])
