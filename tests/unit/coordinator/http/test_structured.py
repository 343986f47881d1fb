"""Constraints over HTTP: the grammar that workers get, and the errors of those that cannot be obeyed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from common.core.request import Request
from common.net.messages import Prefill
from coordinator.grammar import compiler
from coordinator.grammar.screening import SUSPECT_S
from tests.unit.coordinator.fake_cluster import FakeCluster

pytestmark = pytest.mark.processes
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    TEXT: {"prompt": ["hello", "there"], "max_tokens": 3},
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may take less processor time than makes it suspect, and a minute to get it on a busy machine."""
    monkeypatch.setattr(compiler, "SECONDS", SUSPECT_S * 0.75)
    monkeypatch.setattr(compiler, "WAIT_S", 60.0)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def requests(cluster: FakeCluster) -> list[Request]:
    """Return the requests that workers got, in their order on each worker."""
    return [each.request for worker in cluster.workers for each in worker.got(Prefill)]


@pytest.mark.parametrize("path", BODIES)
async def test_workers_get_the_grammar_with_every_prompt_and_choice(cluster: FakeCluster, path: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    response, _ = await cluster.post(path, {**BODIES[path], "response_format": form, "n": 2, "stop": "x", "seed": 1})
    assert response.status == 200
    (grammar,) = {each.sampling.grammar for each in requests(cluster)}
    assert '"required": ["a"], "additionalProperties": false' in grammar
    response, _ = await cluster.post(path, BODIES[path])
    assert response.status == 200
    assert requests(cluster)[-1].sampling.grammar == ""


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
        "response_format.json_schema.schema.properties.a.not",
        "unsupported",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://a.b/c"}}}},
        "response_format.json_schema.schema.$ref",
        "unsupported",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "unsupported"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar", "invalid_value"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag.triggers", "invalid_type"),
    ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "grammar_too_complex"),
    ({"guided_regex": "a{100000}"}, "guided_regex", "grammar_too_complex"),
    ({"guided_json": {"enum": ["x" * 50] * 10_000}}, "guided_json", "grammar_too_complex"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), CASES)
async def test_what_cannot_be_obeyed_is_an_error_with_its_place(
    cluster: FakeCluster, fields: dict[str, Any], param: str, code: str
) -> None:
    for path, body in BODIES.items():
        response, answer = await cluster.post(path, {**body, **fields})
        error = answer["error"]
        found = (response.status, error["type"], error["param"], error["code"])
        assert found == (400, "invalid_request_error", param, code), error
        assert error["message"] and "\n" not in error["message"]
    response, _ = await cluster.post(CHAT, BODIES[CHAT])
    assert response.status == 200
    assert len({each.id for each in requests(cluster)}) == 1  # no other reached a worker


async def test_others_are_answered_while_a_hostile_grammar_is_compiled(cluster: FakeCluster) -> None:
    body = BODIES[CHAT]
    began = time.monotonic()
    hostile = asyncio.ensure_future(cluster.post(CHAT, {**body, "guided_regex": "(a{1000}){1000}"}))
    form = {"response_format": {"type": "json_object"}}
    for fields in ({}, form, {}):
        response, _ = await cluster.post(CHAT, {**body, **fields})
        assert response.status == 200
        assert not hostile.done() or time.monotonic() - began > compiler.SECONDS
    response, answer = await hostile
    assert response.status == 400 and answer["error"]["code"] == "grammar_too_complex"
