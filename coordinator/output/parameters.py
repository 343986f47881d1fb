"""Reader of calls whose arguments are written one by one between tags, as text typed by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from typing import NoReturn

from coordinator.output.calls import CallReading, Context, read_name
from coordinator.output.formats import ToolFormat, pieces
from coordinator.output.text_stream import TextStream, markers
from coordinator.output.values import Emit, encode, read_value
from coordinator.requests.spec import Json

_MOST_DEPTH = 8
"""References and alternatives that are followed to find the type of a parameter."""
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def read_parameters_call(context: Context) -> CallReading:
    """Read ``NAME after_name``, then parameters up to the end of the call. Text behind the name that is neither a
    parameter nor the end makes it no call.

    A value becomes JSON of the type in the tool's schema: a string is streamed as it is; a number, constant, array or
    object is passed on if the text is one, otherwise it becomes a string. Without a schema, text that is JSON is taken
    as that, other text as a string."""
    format, stream = context.format, context.stream
    name = context.clean((yield from read_name(stream)))
    for piece in pieces(format.after_name):
        if not (yield from stream.accept(markers(piece))):
            return "none"
    expected = markers(format.key, *format.closing)
    found = yield from stream.accept(expected)
    if not name or not found:
        return "none"
    context.begin(name)
    emit, separator, complete = context.writer.arguments, "{", True
    schema = context.tools.get(name, {})
    while complete and found == format.key:
        key, attributes = yield from _key(stream, format)
        emit(f'{separator}"{encode(key)}": ')
        separator = ", "
        types = _declared(attributes) if format.typed else types_of(schema, key)
        complete = yield from _value(stream, format, types, emit)
        found = yield from stream.accept(expected)
    emit("}" if separator == ", " else "{}")
    return "whole" if complete and found else "broken"


def _key(stream: TextStream, format: ToolFormat) -> Generator[None, None, tuple[str, str]]:
    """Read a parameter's name and what stands before its value; return the name and the attributes behind it."""
    key, attributes = list[str](), list[str]()
    first, *others = pieces(format.after_key)
    if format.typed:
        yield from stream.pass_until(markers('"'), key.append)
        yield from stream.pass_until(markers(">"), attributes.append)
    else:
        yield from stream.pass_until(markers(first), key.append)
    for piece in others:
        yield from stream.accept(markers(piece))
    return "".join(key).strip(), "".join(attributes)


def _value(
    stream: TextStream, format: ToolFormat, types: Collection[str] | None, emit: Emit
) -> Generator[None, None, bool]:
    """Read a value up to its end tag. Return whether that was found before the output ended."""
    end = markers(*pieces(format.after_value))
    lines = format.after_key.endswith("\n")
    if types == {"string"}:
        emit('"')
        text = _Lines(lambda part: emit(encode(part)), lines)
        closed = yield from stream.pass_until(end, text.add)
        text.finish()
        emit('"')
        return closed != ""
    parts = list[str]()
    text = _Lines(parts.append, lines)
    closed = yield from stream.pass_until(end, text.add)
    text.finish()
    emit(typed("".join(parts), types))
    return closed != ""


class _Lines:
    """Passes a value on; where values stand on lines of their own, without the line breaks before and behind."""

    def __init__(self, emit: Emit, own_lines: bool) -> None:
        self._emit = emit
        self._own_lines = own_lines
        self._started = not own_lines
        self._held = ""

    def add(self, text: str) -> None:
        if not self._started:
            self._started = True
            text = text.removeprefix("\n")
        if self._own_lines and text:
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if text:
            self._emit(text)

    def finish(self) -> None:
        self._held = ""


def _declared(attributes: str) -> Collection[str] | None:
    """Return the types that the model states itself: ``string="true"``, or anything else but a string."""
    if 'string="true"' in attributes:
        return {"string"}
    return set(_JSON_TYPES) - {"string"} if 'string="false"' in attributes else None


def types_of(schema: Json, key: str) -> Collection[str] | None:
    """Return the JSON types that ``schema``, of a tool's parameters, allows for parameter ``key``; None: any."""
    found = _schemas_of(schema, key, schema, _MOST_DEPTH)
    return _types(found[0] if len(found) == 1 else {"allOf": found}, schema, _MOST_DEPTH) if found else None


def _schemas_of(schema: object, key: str, root: Json, depth: int) -> list[object]:
    """Return what ``schema`` and its parts say about parameter ``key``."""
    if not isinstance(schema, dict) or not depth:
        return []
    properties, parts = schema.get("properties"), [_referred(schema.get("$ref"), root)]
    for keyword in ("allOf", "anyOf", "oneOf"):
        choices = schema.get(keyword)
        parts += choices if isinstance(choices, list) else []
    found: list[object] = [properties[key]] if isinstance(properties, dict) and key in properties else []
    found += [each for part in parts for each in _schemas_of(part, key, root, depth - 1)]
    if not found:
        patterns, rest = schema.get("patternProperties"), schema.get("additionalProperties")
        found = [
            *(patterns.values() if isinstance(patterns, dict) else ()),
            *([rest] if isinstance(rest, dict) else ()),
        ]
    return found


def _types(schema: object, root: Json, depth: int) -> set[str] | None:
    if not isinstance(schema, dict) or not depth:
        return None
    declared = schema.get("type")
    if isinstance(declared, str | list):
        return {declared} if isinstance(declared, str) else {name for name in declared if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return {name for name in _JSON_TYPES for value in values if _matches(value, {name})}
    for keyword in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(keyword)
        if isinstance(choices, list) and choices:
            found = [_types(choice, root, depth - 1) for choice in choices]
            known = [types for types in found if types is not None]
            return set().union(*known) if known and (len(known) == len(found) or keyword == "allOf") else None
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth - 1)
    return {"object"} if "properties" in schema else None


def _referred(reference: object, root: Json) -> object:
    """Return the part of ``root`` that a reference such as ``#/$defs/NAME`` names, or None."""
    if not isinstance(reference, str):
        return None
    target: object = root if reference.startswith("#/") else None
    for step in reference[2:].split("/"):
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target


def typed(text: str, types: Collection[str] | None) -> str:
    """Return ``text`` as JSON of one of ``types``, or as a string if it is none of them."""
    bare = text.strip()
    for candidate in (bare, _corrected(bare, types)):
        try:
            value = json.loads(candidate, parse_constant=_no_such_number)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, str):
            break
        if types is None or _matches(value, types):
            return candidate
        if "integer" in types and isinstance(value, float) and value.is_integer():
            return str(int(value))
    return f'"{encode(text)}"'


def _matches(value: object, types: Collection[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, kind) for name, kind in _JSON_TYPES.items() if name in types and name != "boolean")


def _corrected(text: str, types: Collection[str] | None) -> str:
    """Return ``text``, a Python literal or nearly JSON, as JSON; "" if it is neither or a type does not call for it."""
    wanted = set(_JSON_TYPES) - {"string"} if types is None else set(types) - {"string"}
    if not text or not wanted or (text[0] not in "[{" and text not in ("True", "False", "None")):
        return ""
    stream, parts = TextStream(), list[str]()
    stream.push(text + "\n")
    stream.ended = True
    reading = read_value(stream, parts.append)
    try:
        next(reading)
    except StopIteration as stop:
        return "".join(parts) if stop.value and stream.at >= len(text) else ""
    return ""


def _no_such_number(constant: str) -> NoReturn:
    raise ValueError(constant)
