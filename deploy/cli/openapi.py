"""The OpenAPI description of the HTTP API, generated from the parsers of request bodies and from the routes.

``python -m deploy.cli.reference`` writes it to ``coordinator/http/openapi.json``, which the server sends. The type of a
field and its range are those of the getter with which a parser reads it, so the description and
the server agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from coordinator.requests.spec import Json

_RANGE = re.compile(r"(-?[\d,.]+) to (-?[\d,.]+)")
_LEAST = re.compile(r"at least (-?[\d,]+)")
_TEXT_OR_TEXTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT: dict[str, Any] = {"anyOf": [*_TEXT_OR_TEXTS["anyOf"], _TOKENS, {"type": "array", "items": _TOKENS}]}
_OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
_SHAPES: dict[str, dict[str, Any]] = {
    "allowed_token_ids": _TOKENS,
    "bad_words": {"type": "array", "items": {"type": "string"}},
    "documents": _OBJECTS,
    "input": {"anyOf": [{"type": "string"}, _OBJECTS]},
    "messages": _OBJECTS,
    "prompt": _PROMPT,
    "stop": _TEXT_OR_TEXTS,
    "stop_sequences": {"type": "array", "items": {"type": "string"}},
    "stop_token_ids": _TOKENS,
    "system": {"anyOf": [{"type": "string"}, _OBJECTS]},
    "tokens": _TOKENS,
    "tools": _OBJECTS,
}
"""Forms of fields that have no getter for scalars."""
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi(
    found: Iterable[tuple[web.RouteDef, str]],
    bodies: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]],
    helps: Mapping[str, str],
) -> Json:
    """Return the description. ``found``: the routes, each with what it does. ``bodies``: by path, the fields of a body
    with their types as :func:`deploy.cli.reference.request_fields` gives them, and those that are required. ``helps``:
    what a field means."""
    paths: dict[str, Any] = {}
    for route, words in found:
        path = route.path.replace(":.+", "")
        operation: Json = {"operationId": f"{route.method.lower()}{re.sub('[^a-z0-9]+', '_', path)}", "summary": words}
        answers: Json = {"200": {"description": "The answer.", "content": _content(route)}}
        if path.startswith("/admin/drain"):
            answers["202"] = {"description": "The drain has begun.", "content": _content(route)}
        answers["default"] = {
            "description": "An error: `error.code` says which.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        operation["responses"] = answers
        names = re.findall(r"{(\w+)}", path)
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if path in bodies:
            schema = _body(*bodies[path], helps)
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
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _content(route: web.RouteDef) -> Json:
    path = route.path
    if path in ("/", "/docs", "/ui"):
        return {"text/html": {}, "application/json": {}}
    if path == "/metrics":
        return {"text/plain": {}}
    plain: Json = {"application/json": {"schema": {"type": "object"}}}
    return {**plain, "text/event-stream": {}} if path.startswith("/v1/") and route.method == "POST" else plain


def _body(fields: Mapping[str, str], required: tuple[str, ...], helps: Mapping[str, str]) -> Json:
    properties: dict[str, dict[str, Any]] = {}
    inner: dict[str, Json] = {}
    for name, kind in sorted(fields.items()):
        parent, _, last = name.rpartition(".")
        if parent:
            inner.setdefault(parent, {})[last] = _schema(last, kind, optional=True)
            continue
        properties[name] = {**_schema(name, kind, optional=name not in required)}
        if name in helps:
            properties[name]["description"] = helps[name]
    for parent, members in inner.items():
        if parent in properties:
            properties[parent]["properties"] = members
    return {"type": "object", "required": list(required), "properties": properties}


def _schema(name: str, kind: str, *, optional: bool) -> Json:
    """Return the schema of a field of the type ``kind``, such as "integer, 0 to 20"."""
    if name in _SHAPES:
        shape = _SHAPES[name]
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
        schema["minimum"] = int(match[1].replace(",", ""))
    return schema
