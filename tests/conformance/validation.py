"""Checks one recorded exchange against the schemas of its API.

Chat and text completions, models and errors are checked against OpenAI's published schemas; responses and messages, of
which there is no copy here, against the types of OpenAI's and Anthropic's own clients.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import anthropic.types
import jsonschema
import openai.types.responses
from pydantic import BaseModel, TypeAdapter

_SCHEMAS = Path(__file__).parents[1] / "golden" / "openai_schemas.json"
_OPENAI = {
    "/v1/chat/completions": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "/v1/completions": ("CreateCompletionResponse", "CreateCompletionStreamResponse"),
    "/v1/models": ("ListModelsResponse", ""),
}
_TYPES: dict[str, tuple[Any, Any]] = {
    "/v1/responses": (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
    "/v1/messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    "/v1/messages/count_tokens": (anthropic.types.MessageTokensCount, None),
}


class _AnthropicError(BaseModel):
    type: str
    message: str


class _AnthropicErrorBody(BaseModel):
    type: str
    error: _AnthropicError


class _AnthropicModels(BaseModel):
    data: list[anthropic.types.ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


@cache
def _schema(name: str) -> jsonschema.Draft202012Validator:
    schemas = json.loads(_SCHEMAS.read_text())
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **schemas})


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _valid(path: str, body: Any, *, event: bool) -> None:
    if path in _TYPES:
        _adapter(_TYPES[path][event]).validate_json(json.dumps(body), strict=True)
    elif path in _OPENAI:
        _schema(_OPENAI[path][event]).validate(body)
    elif path.startswith("/v1/models/"):
        _schema("Model").validate(body)
    else:
        raise AssertionError(f"no schema for {path}")


def check(exchange: dict[str, Any]) -> None:
    """AssertionError or a ValidationError unless the response is whole and what its API says."""
    path, status = exchange["path"], exchange.get("status")
    assert status is not None, f"no answer: {exchange}"
    assert not exchange["broken"], f"the connection broke: {exchange}"
    headers, body = exchange["headers"], exchange["body"]
    assert headers.get("x-request-id"), headers
    if status != 200:
        _check_error(path, json.loads(body))
    elif exchange["anthropic"] and path.startswith("/v1/models"):
        kind = _AnthropicModels if path == "/v1/models" else anthropic.types.ModelInfo
        _adapter(kind).validate_json(body, strict=True)
    elif not headers["content-type"].startswith("text/event-stream"):
        assert headers["content-type"].startswith("application/json"), headers
        _valid(path, _without_first_nulls(json.loads(body)), event=False)
    elif exchange["left"]:
        pass  # the client hung up in the middle of a stream
    elif path == "/v1/messages" or path == "/v1/responses":
        _check_named_events(path, body)
    else:
        events = body.removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]", events[-1]
        for event in events[:-1]:
            chunk = json.loads(event.strip().removeprefix("data: "))
            if path == "/v1/completions" and chunk.get("usage", 0) is None:
                del chunk["usage"]  # as OpenAI's text on include_usage says, but not its schema of completions
            _valid(path, chunk, event=True)


def _without_first_nulls(body: Any) -> Any:
    """With ``echo``, the first token of a prompt has no log-probability: OpenAI and vLLM write null, which its schema
    forbids."""
    for choice in body.get("choices", ()):
        columns = choice.get("logprobs") or {}
        for name in ("token_logprobs", "top_logprobs"):
            if columns.get(name) and columns[name][0] is None:
                columns[name] = columns[name][1:]
    return body


def _check_error(path: str, body: Any) -> None:
    if path.startswith("/v1/messages"):
        _AnthropicErrorBody.model_validate(body, strict=True)
    else:
        _schema("ErrorResponse").validate(body)


def _check_named_events(path: str, body: str) -> None:
    """Events of responses and messages have a name, which their data repeats."""
    for event in body.removesuffix("\n\n").split("\n\n"):
        name, _, data = event.strip().partition("\n")
        if name == "data: [DONE]":
            continue
        found = json.loads(data.removeprefix("data: "))
        assert name == f"event: {found['type']}", event
        _valid(path, found, event=True)
