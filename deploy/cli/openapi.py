"""The OpenAPI description of the HTTP API, generated from the parsers of request bodies, the routes and the types of
answers.

``python -m deploy.cli.reference`` writes it to ``coordinator/http/openapi.json``, which the server sends. The type of a
field and its range are those of the getter with which a parser reads it, so the description and
the server agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from common.core.request import MAX_TOKENS
from coordinator.http.admin import MAX_REQUESTS
from coordinator.requests.spec import Json
from deploy.cli import answer_types, other_api_types, page_types
from deploy.cli.request_shapes import shape_of

_RANGE = re.compile(r"(-?[\d,.]+) to (-?[\d,.]+)")
_LEAST = re.compile(r"at least (-?[\d,]+)")
_REF = "#/components/schemas/{name}"

ANSWERS: dict[str, type[answer_types.Answer]] = {
    "GET /": page_types.Front,
    "POST /v1/chat/completions": answer_types.ChatCompletion,
    "POST /v1/completions": answer_types.TextCompletion,
    "POST /v1/responses": other_api_types.Response,
    "POST /v1/responses/input_tokens": other_api_types.InputTokens,
    "POST /v1/messages": other_api_types.Message,
    "POST /v1/messages/count_tokens": other_api_types.CountedTokens,
    "GET /v1/models": page_types.ModelList,
    "GET /v1/models/{id}": page_types.Model,
    "POST /tokenize": page_types.Tokenized,
    "POST /v1/tokenize": page_types.Tokenized,
    "POST /detokenize": page_types.Detokenized,
    "POST /v1/detokenize": page_types.Detokenized,
    "GET /health": page_types.Status,
    "GET /ping": page_types.Status,
    "GET /ready": page_types.Status,
    "GET /version": page_types.Version,
    "GET /admin/workers": page_types.Workers,
    "GET /admin/requests": page_types.Requests,
    "GET /admin/requests/{id}": page_types.TracedRequest,
    "POST /admin/drain": page_types.Drained,
    "POST /admin/scale": page_types.Scaled,
    "POST /admin/links": page_types.MeasuredLinks,
}
"""The types of successful answers in JSON, by method and path."""
STREAMS: dict[str, type[answer_types.Answer] | None] = {
    "POST /v1/chat/completions": answer_types.ChatChunk,
    "POST /v1/completions": answer_types.TextChunk,
    "POST /v1/responses": None,
    "POST /v1/messages": None,
}
"""The endpoints that answer with a stream if the request says so, and the type of its events. None: named events, as
OpenAI and Anthropic describe them."""
_NAMED_EVENT: Json = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
_TEXTS = {
    "GET /": ("text/html",),
    "GET /docs": ("text/html",),
    "GET /ui": ("text/html",),
    "GET /ui/{file}": ("text/html", "text/css", "text/javascript", "image/svg+xml"),
    "GET /metrics": ("text/plain",),
    "GET /admin/events": ("text/event-stream",),
}
"""Media types of successful answers that are no JSON."""
_QUERIES: dict[str, list[Json]] = {
    "GET /admin/requests": [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_REQUESTS}}
    ]
}
"""The parameters in the query of a URL."""
_ACCEPTED = "POST /admin/drain"
"""The endpoint that answers 202: before its work is done."""


class Body(NamedTuple):
    """A request body: its fields with their types as :func:`deploy.cli.reference.request_fields` gives them, the names
    of those that are required, what fields mean, and the names of those of which one is required."""

    fields: Mapping[str, str]
    required: tuple[str, ...] = ()
    helps: Mapping[str, str] = {}
    either: tuple[str, ...] = ()


def openapi(
    found: Iterable[tuple[web.RouteDef, str]],
    bodies: Mapping[str, Body],
) -> Json:
    """Return the description. ``found``: the routes, each with what it does. ``bodies``: by path."""
    paths: dict[str, Any] = {}
    for route, words in found:
        path = route.path.replace(":.+", "")
        operation: Json = {"operationId": f"{route.method.lower()}{re.sub('[^a-z0-9]+', '_', path)}", "summary": words}
        operation["responses"] = _responses(f"{route.method} {path}")
        names = re.findall(r"{(\w+)}", path)
        parameters: list[Json] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
        if parameters := parameters + _QUERIES.get(f"{route.method} {path}", []):
            operation["parameters"] = parameters
        if path in bodies:
            schema = _body(path, bodies[path])
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": "1",
            "description": "A field that is null counts as absent. Unknown fields are named in `x-tandem-ignored`.",
        },
        "paths": paths,
        "components": {
            "schemas": _components(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


# -- answers ----------------------------------------------------------------------------------------------------------


def _responses(endpoint: str) -> Json:
    """Return the answers of ``endpoint``, a method and a path."""
    answers: Json = {}
    content = _content(endpoint)
    if endpoint == _ACCEPTED:
        answers["202"] = {"description": "The work has begun.", "content": content}
    elif content:
        answers["200"] = {"description": "The answer.", "content": content}
    else:
        answers["404"] = _error(endpoint, "Nothing is stored here.")
    answers["default"] = _error(
        endpoint, "An error, which says why. With 429 and 503, `Retry-After` says when to retry."
    )
    return answers


def _error(endpoint: str, words: str) -> Json:
    kind = answer_types.MessagesError if endpoint.startswith("POST /v1/messages") else answer_types.Error
    return {"description": words, "content": {"application/json": {"schema": _reference(kind)}}}


def _content(endpoint: str) -> Json:
    """Return the media types of a successful answer. Empty: there is none."""
    content: Json = {kind: {"schema": {"type": "string"}} for kind in _TEXTS.get(endpoint, ())}
    if endpoint in ANSWERS:
        content["application/json"] = {"schema": _reference(ANSWERS[endpoint])}
    elif endpoint == "GET /openapi.json":
        content["application/json"] = {"schema": {"type": "object"}}
    if endpoint in STREAMS:
        event = STREAMS[endpoint]
        content["text/event-stream"] = {"x-event-schema": _NAMED_EVENT if event is None else _reference(event)}
    return content


def _reference(kind: type[answer_types.Answer]) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _components() -> Json:
    """Return the schemas of all types of answers. They allow further members, so that clients do."""
    errors = answer_types.Error, answer_types.MessagesError
    kinds = {kind: None for kind in (*errors, *ANSWERS.values(), *STREAMS.values()) if kind is not None}
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for schema in schemas.values():
        schema.pop("additionalProperties", None)
        schema.pop("title", None)
        schema["description"] = " ".join(schema["description"].replace("``", "`").split())
    return dict(sorted(schemas.items()))


# -- bodies -----------------------------------------------------------------------------------------------------------


def _body(path: str, body: Body) -> Json:
    properties: dict[str, dict[str, Any]] = {}
    inner: dict[str, Json] = {}
    for name, kind in sorted(body.fields.items()):
        parent, _, last = name.rpartition(".")
        if parent:
            inner.setdefault(parent, {})[last] = _schema(path, name, kind, optional=True)
            continue
        properties[name] = {**_schema(path, name, kind, optional=name not in body.required)}
        if name in body.helps:
            properties[name]["description"] = body.helps[name]
    for parent, members in inner.items():
        if parent in properties:
            properties[parent]["properties"] = members
    needed = {"anyOf": [{"required": [name]} for name in body.either]} if body.either else {}
    return {"type": "object", "required": list(body.required), **needed, "properties": properties}


def _schema(path: str, name: str, kind: str, *, optional: bool) -> Json:
    """Return the schema of the field ``name`` of a body sent to ``path``; its type is ``kind``, such as "integer, 0 to
    20"."""
    shape = shape_of(path, name)
    if shape is not None:
        if not optional:
            return dict(shape)
        return {"anyOf": [*shape.get("anyOf", [shape]), {"type": "null"}]}
    base, _, bounds = kind.partition(", ")
    if base == "any":
        return {}
    schema: Json = {"type": [base, "null"] if optional else base}
    if match := _RANGE.search(bounds):
        low, high = (float(bound.replace(",", "")) for bound in match.groups())
        schema |= {"minimum": low, "maximum": high} if base == "number" else {"minimum": int(low), "maximum": int(high)}
    elif match := _LEAST.search(bounds):
        schema |= {"minimum": int(match[1].replace(",", "")), "maximum": MAX_TOKENS}
    return schema
