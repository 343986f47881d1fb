"""Refused requests: the shape of errors, and the errors for too long input."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.fields import JsonBudget, parse_json
from tests.fakes.checkpoint import POSITIONS, VOCAB
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, chat_of, open_cluster, valid


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b'{"messages": NaN}', 400, "invalid_json", None),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({}, 400, "missing_required_parameter", "messages"),
        ({**HELLO, "temperature": True}, 400, "invalid_type", "temperature"),
        ({**HELLO, "model": "gpt-4"}, 404, "model_not_found", "model"),
        ({**HELLO, "max_tokens": POSITIONS}, 400, "context_length_exceeded", "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "context_length_exceeded", "messages"),
        ({**HELLO, "logit_bias": {str(VOCAB): 1}}, 400, "invalid_value", "logit_bias"),
        ({**HELLO, "stop_token_ids": [VOCAB]}, 400, "invalid_value", "stop_token_ids"),
    ],
)
async def test_errors_have_openais_shape(
    cluster: FakeCluster, body: Any, status: int, code: str, param: str | None
) -> None:
    response, answer = await cluster.post(CHAT, body)
    assert response.status == status
    error = valid("ErrorResponse", answer)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert response.headers["x-request-id"] and "Traceback" not in error["message"]


async def test_more_errors(cluster: FakeCluster) -> None:
    for path, body, status in [
        (TEXT, {"prompt": ""}, 400),
        (TEXT, {"prompt": [VOCAB]}, 400),
        (TEXT, {"prompt": [5] * POSITIONS}, 400),
        (TEXT, {"prompt": "x" * (9 << 20)}, 413),
        ("/v1/embeddings", {}, 404),
        ("/v1/models", {}, 405),
        ("/nowhere", {}, 404),
    ]:
        response, answer = await cluster.post(path, body)
        assert response.status == status, (path, answer)
        valid("ErrorResponse", answer)
    _, answer = await cluster.post(TEXT, {"prompt": "x" * (9 << 20)})
    assert all(reported in answer["error"]["message"] for reported in ("8,388,608 bytes", "--max-body-bytes"))
    response, answer = await cluster.post("/admin/scale", {})
    assert response.status == 400 and "give prefill, decode or both" in answer["error"]["message"]
    response, answer = await cluster.post(CHAT, b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert response.status == 415


async def test_wrong_method_answer_lists_allowed_methods(cluster: FakeCluster) -> None:
    response, _ = await cluster.post("/v1/models", {})
    assert response.status == 405 and response.headers["Allow"] == "GET,HEAD"


async def test_text_beyond_context_is_refused_without_tokenizing(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cluster.services.model
    monkeypatch.setattr(model.text, "_control", None)
    monkeypatch.setattr(model.text, "slices", None)
    monkeypatch.setattr(model.text, "templates", None)
    most = model.context_length * model.text.chars_per_token
    long = "x" * (most + 1)
    messages = [{"role": "user", "content": long}]
    for path, asked in (
        (TEXT, {"prompt": long}),
        (TEXT, {"prompt": ["a", long]}),
        (CHAT, {"messages": messages}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": messages}),
    ):
        response, body = await cluster.post(path, asked)
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert f"{model.context_length} tokens, at most {most} characters" in body["error"]["message"]


async def test_rendered_chat_beyond_context_is_refused(model: Path) -> None:
    repeated = "{% for message in messages %}{{ message.content * 3 }}{% endfor %}"
    async with open_cluster(model, "prefill", "decode", chat_template=repeated) as cluster:
        most = cluster.services.model.context_length * cluster.services.model.text.chars_per_token
        asked = {"messages": [{"role": "user", "content": "x" * (most // 2)}]}
        response, body = await cluster.post("/tokenize", asked)
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert f"at most {most} characters" in body["error"]["message"]


async def test_values_that_a_template_indents_are_refused_beside_the_event_loop(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def parse(body: bytes, budget: JsonBudget) -> Any:
        threads.append(threading.current_thread())
        return parse_json(body, budget)

    monkeypatch.setattr("coordinator.http.context.parse_json", parse)
    value: Any = [1] * 2000
    for _ in range(55):
        value = [value]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": value}}}
    async with open_cluster(model, "prefill", "decode", chat_template="{{ tools | tojson(indent=4) }}") as cluster:
        for path in (CHAT, "/tokenize"):
            response, body = await cluster.post(path, {**HELLO, "tools": [tool]})
            assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
            assert body["error"]["param"] == "messages" and "after the chat template" in body["error"]["message"]
    assert threading.main_thread() not in threads


async def test_more_tokens_than_the_context_are_refused_on_the_way(cluster: FakeCluster) -> None:
    limit = cluster.services.model.context_length
    response, body = await cluster.post("/tokenize", {"prompt": "é" * limit * 4})
    assert response.status == 200 and body["count"] > 2 * limit, "counting may go on"
    for path, asked in ((TEXT, {"prompt": "é" * limit * 10}), (CHAT, chat_of("é" * limit * 10))):
        response, body = await cluster.post(path, asked)
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert f"has more than {limit}" in body["error"]["message"]
