"""Real answers of every endpoint have exactly the members that /openapi.json describes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from deploy.cli.answer_types import Answer, Error, MessagesError
from deploy.cli.openapi import ANSWERS, STREAMS
from deploy.cli.reference import OPENAPI
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, letters, open_cluster
from tests.unit.coordinator.http.test_parsed_answers import CALL, OPENS, WEATHER

pytestmark = pytest.mark.processes  # tools have grammars, which a process compiles

MORE = {"return_metrics": True, "return_token_ids": True, "prompt_logprobs": 1}
SAID = {"model": "tiny", "max_tokens": 300, **HELLO, "thinking": {"type": "adaptive"}, "return_metrics": True}
TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**HELLO}),
    (CHAT, {**HELLO, "tools": [WEATHER], "logprobs": True, "top_logprobs": 2, **MORE, "n": 2}),
    (CHAT, {**HELLO, "functions": [WEATHER["function"]]}),
    (CHAT, {**HELLO, "include_reasoning": False, "max_tokens": 3}),
    (TEXT, {"prompt": "hello"}),
    (TEXT, {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": True, "n": 2, **MORE}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/responses", {"input": "hello", "tools": [{"type": "function", **WEATHER["function"]}], "top_logprobs": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 3, "return_metrics": True, "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": "hello", "reasoning": {"summary": "auto"}}),
    ("/v1/responses/input_tokens", {"input": "hello"}),
    ("/v1/messages", SAID),
    ("/v1/messages", {**SAID, "tools": [TOOL], "stop_sequences": ["x"]}),
    ("/v1/messages/count_tokens", SAID),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/v1/tokenize", {**HELLO}),
    ("/detokenize", {"tokens": [40, 41]}),
    ("/v1/detokenize", {"tokens": []}),
]
GETS = ("/", "/v1/models", "/v1/models/tiny", "/health", "/ping", "/ready", "/version", "/admin/workers")
REFUSED = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", CHAT, TEXT, "/nothing", "/admin/scale")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[FakeCluster]:
    async with open_cluster(model, chat_template=OPENS) as cluster:
        for role in ("prefill", "decode"):
            await cluster.add(role, script=letters(f"Hm.</think>So: {CALL}"))  # type: ignore[arg-type]
        yield cluster


@cache
def schemas() -> Any:
    return json.loads(OPENAPI.read_text(encoding="utf-8"))["components"]


def conforms(kind: type[Answer], body: Any) -> None:
    """Check ``body`` against a type, which allows no other members, and against its schema."""
    msgspec.convert(body, kind)
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": schemas()}
    jsonschema.Draft202012Validator(schema).validate(body)


def test_schemas_are_valid() -> None:
    kinds = {*ANSWERS.values(), *filter(None, STREAMS.values()), Error, MessagesError}
    assert {kind.__name__ for kind in kinds} <= schemas()["schemas"].keys()
    for schema in schemas()["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path, methods in json.loads(OPENAPI.read_text(encoding="utf-8"))["paths"].items():
        for method, operation in methods.items():
            for status, answer in operation["responses"].items():
                kinds_of = [
                    kind for kind, each in answer["content"].items() if not {"schema", "x-event-schema"} & each.keys()
                ]
                assert not kinds_of, (method, path, status)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_answers_are_described(served: FakeCluster, path: str, body: dict[str, Any]) -> None:
    response, answer = await served.post(path, body)
    assert response.status == 200
    conforms(ANSWERS[f"POST {path}"], answer)
    if f"POST {path}" not in STREAMS:
        return
    async with served.client.post(f"{served.url}{path}", json={**body, "stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        stream = await response.read()
    if (event := STREAMS[f"POST {path}"]) is not None:
        chunks = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line]
        assert len(chunks) > 2 and chunks[-1] == b"[DONE]"
        for chunk in chunks[:-1]:
            conforms(event, json.loads(chunk))


async def test_pages_are_described(served: FakeCluster) -> None:
    for path in GETS:
        response, body = await served.get(path)
        conforms(ANSWERS[f"GET {path.replace('tiny', '{id}')}"], body)
    response, body = await served.post("/admin/drain", {"worker": served.workers[0].name})
    assert response.status == 202
    conforms(ANSWERS["POST /admin/drain"], body)
    _, body = await served.post("/admin/links", {})
    conforms(ANSWERS["POST /admin/links"], body)


async def test_errors_are_described(served: FakeCluster) -> None:
    for path in REFUSED:
        response, body = await served.post(path, {"model": "tiny", "max_tokens": -9})
        assert response.status >= 400
        conforms(MessagesError if path.startswith("/v1/messages") else Error, body)


async def test_the_description_names_the_served_model(served: FakeCluster) -> None:
    _, described = await served.get("/openapi.json")
    for path, allowed in ((CHAT, ["tiny", None]), ("/v1/messages", ["tiny"])):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["properties"]["model"]["enum"] == allowed
        ids = body["properties"]["stop_token_ids"]["anyOf"][0]["items"]
        assert ids["maximum"] == served.services.model.checkpoint.vocab_size - 1
