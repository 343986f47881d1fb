"""How clients find their way: slashes at ends, aliases, the OpenAPI description, and what a 404 says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.core.errors import RequestError
from coordinator.api.openai import parse_chat, parse_completion
from deploy.cli.reference import OPENAPI, openapi_text
from tests import leaked_keys
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, open_cluster

pytestmark = pytest.mark.processes
GETS = ("/health", "/ping", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/openapi.json", "/admin/workers")
POSTS: dict[str, dict[str, Any]] = {
    CHAT: {**HELLO, "max_tokens": 2},
    TEXT: {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {**HELLO, "max_tokens": 2, "model": "tiny"},
    "/tokenize": {"prompt": "hello"},
    "/v1/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [40]},
    "/v1/detokenize": {"tokens": [40]},
}


async def test_a_slash_at_the_end_of_a_path_changes_nothing(cluster: FakeCluster) -> None:
    for path in GETS:
        (one, body), (other, same) = await cluster.get(path), await cluster.get(f"{path}/")
        assert one.status == other.status == 200 and body.keys() == same.keys(), path
    for path, body in POSTS.items():
        (one, first), (other, second) = await cluster.post(path, body), await cluster.post(f"{path}/", body)
        assert one.status == other.status == 200 and first.keys() == second.keys(), (path, first)


async def test_every_path_but_the_open_ones_needs_the_key(model: Path) -> None:
    async with open_cluster(model, "colocated", api_key=leaked_keys.new_key()) as cluster:
        for end in ("", "/"):
            for path in GETS:
                response, _ = await cluster.get(f"{path}{end}")
                assert response.status == (200 if path in ("/health", "/ping", "/ready") else 401), path
            for path, body in POSTS.items():
                response, _ = await cluster.post(f"{path}{end}", body)
                assert response.status == 401, path
        for path in ("/nothing", "/v1/embeddings", "/docs/", "//v1/models"):
            async with cluster.client.get(f"{cluster.url}{path}") as response:
                assert response.status == 401, path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "only generates text, by POST /v1/chat/completions"),
        ("/v1/rerank", "only generates text"),
        ("/rerank", "only generates text"),
        ("/v1/audio/transcriptions", "only generates text"),
        ("/v1/chat/completion", "The nearest is /v1/chat/completions."),
        ("/chat/completions", "The nearest is /v1/chat/completions."),
        ("/v1/completion", "The nearest is /v1/completions."),
        ("/metric", "The nearest is /metrics."),
        ("/zzzzzzzz", "GET / lists all endpoints."),
        (f"/{'x' * 5000}", "GET / lists all endpoints."),
    ],
)
async def test_a_404_says_what_there_is_instead(cluster: FakeCluster, path: str, words: str) -> None:
    response, body = await cluster.post(path, {})
    assert (response.status, body["error"]["code"]) == (404, "not_found") and words in body["error"]["message"]


async def test_the_description_is_complete_and_sent(cluster: FakeCluster) -> None:
    response, body = await cluster.get("/openapi.json")
    assert response.status == 200 and response.content_type == "application/json"
    assert OPENAPI.read_text(encoding="utf-8") == openapi_text(), "run python -m deploy.cli.reference"
    _, front = await cluster.get("/")
    described = {f"{method.upper()} {path}" for path, methods in body["paths"].items() for method in methods}
    assert {*front["endpoints"]} | {"GET /"} == described


async def test_the_documentation_is_one_page_that_loads_nothing(cluster: FakeCluster) -> None:
    async with cluster.client.get(f"{cluster.url}/docs") as response:
        page = await response.text()
    assert response.status == 200 and response.content_type == "text/html"
    assert not re.search(r"https?://|<script|src=|url\(|@import", page)
    assert all(f">{word}<" in page or word in page for word in ("POST /v1/chat/completions", "truncate_prompt_tokens"))


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 0.5, 1.5, 25, -3, 10**6, 1 << 40),
    *("x", "", "none", [], ["x"], [1], [{}], {}, {"a": 1}),
)


@pytest.mark.parametrize(
    ("path", "parse", "body"), [(CHAT, parse_chat, HELLO), (TEXT, parse_completion, {"prompt": "x"})]
)
def test_what_parsers_accept_is_described(path: str, parse: Any, body: dict[str, Any]) -> None:
    """Each field with many values: none that the parser accepts violates the description, and a type that it refuses
    does."""
    described = json.loads(OPENAPI.read_text(encoding="utf-8"))["paths"][path]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator(schema)
    for name in schema["properties"]:
        for value in VALUES:
            given = {**body, name: value}
            try:
                parse(given)
            except RequestError as error:
                typed = "type" in schema["properties"][name]
                if error.code == "invalid_type" and error.param == name and typed:
                    assert not validator.is_valid(given), f"{name}: {value!r}"
            else:
                assert validator.is_valid(given), f"{name}: {value!r}"
