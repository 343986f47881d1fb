"""Readers of single tool calls, one for each style of :class:`ToolFormat`.

A reader begins behind the text that introduces a call. It writes the call's name and arguments as soon as both the name
and the first character of the arguments are known; from then on, arguments are streamed. A reader returns an
:class:`Outcome`: "none" means that nothing was written, because the text is no call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Literal

from coordinator.output.deltas import DeltaWriter
from coordinator.output.formats import ToolFormat
from coordinator.output.text_stream import TextStream
from coordinator.output.values import read_string, read_value

Outcome = Literal["none", "whole", "broken"]
"""Nothing written; a complete call; a call whose arguments were malformed or cut and were closed."""
CallReading = Generator[None, None, Outcome]


@dataclass(frozen=True, slots=True)
class Context:
    """What all readers of one output share. ``tools``: parameter schemas by the tool's name."""

    stream: TextStream
    writer: DeltaWriter
    format: ToolFormat
    tools: dict[str, dict[str, object]]
    new_id: Callable[[], str]

    def begin(self, name: str, call_id: str = "") -> None:
        """Write the head of a call; what was read of it so far is no longer kept."""
        self.stream.forget()
        self.writer.begin_call(call_id or self.new_id(), name)


def read_json_call(context: Context, *, known_only: bool = False) -> CallReading:
    """Read ``{"name": ..., "arguments": {...}}``, keys in any order, other keys ignored.

    Missing or null arguments are an empty object; arguments given as a string of JSON are decoded. Without a name, or
    with arguments that are no object, the text is no call. ``known_only``: neither if the object does not begin with a
    known tool's name."""
    stream = context.stream
    if (yield from stream.skip_space()) != "{":
        return "none"
    stream.at += 1
    return (yield from _JsonCall(context, known_only).read())


class _JsonCall:
    """Reads the members of one call object."""

    def __init__(self, context: Context, known_only: bool) -> None:
        self._context = context
        self._stream = context.stream
        self._known_only = known_only
        self._name = ""
        self._arguments = ""
        """Arguments that came before the name, as JSON."""
        self._begun = False

    def read(self) -> CallReading:
        whole = yield from self._members()
        if not self._begun:
            arguments = _object_text(self._arguments)
            if not self._name or arguments is None or not whole:
                return "none"
            self._begin()
            self._context.writer.arguments(arguments)
        return "whole" if whole else "broken"

    def _begin(self) -> None:
        self._context.begin(self._name)
        self._begun = True

    def _members(self) -> Generator[None, None, bool]:
        """Read to the end of the object. Return whether it was well formed."""
        stream = self._stream
        while True:
            char = yield from stream.skip_space()
            if char == "}":
                stream.at += 1
                return True
            if char == ",":
                stream.at += 1
                continue
            if char not in ('"', "'"):
                return False
            key = yield from _text_of(stream)
            if (yield from stream.skip_space()) != ":":
                return False
            stream.at += 1
            if not (yield from self._member(key)):
                return False

    def _member(self, key: str) -> Generator[None, None, bool]:
        format, stream = self._context.format, self._stream
        char = yield from stream.skip_space()
        if key in _names(format):
            value = yield from _value_text(stream)
            return self._named(value)
        if self._known_only and not self._name and key not in _PREAMBLE:
            return False
        if key not in _argument_keys(format):
            return (yield from read_value(stream, _ignore))
        if self._name and not self._begun and char == "{":
            self._begin()
            return (yield from read_value(stream, self._context.writer.arguments))
        parts = list[str]()
        whole = yield from read_value(stream, parts.append)
        self._arguments = "".join(parts)
        return whole

    def _named(self, text: str) -> bool:
        """Take the name from ``text``, a JSON value: a string, or an object with the whole call."""
        value = _decode(text)
        if isinstance(value, dict):
            arguments = next((value[key] for key in _argument_keys(self._context.format) if key in value), None)
            self._arguments = json.dumps(arguments, ensure_ascii=False)
            value = value.get("name")
        if not isinstance(value, str) or (self._known_only and value not in self._context.tools):
            return False
        self._name = self._name or clean_name(value, self._context.format)
        return bool(self._name)


_PREAMBLE = frozenset({"type", "id"})
"""Keys that may stand before the name."""


def _names(format: ToolFormat) -> Collection[str]:
    return (format.name_key, "name", "function")


def _argument_keys(format: ToolFormat) -> Collection[str]:
    return (format.arguments_key, "arguments", "parameters")


def clean_name(name: str, format: ToolFormat) -> str:
    """Return a tool's name as the client knows it, from what the model wrote."""
    return name.strip().removeprefix(format.name_prefix).encode("utf-8", "replace").decode()


def _object_text(text: str) -> str | None:
    """Return JSON ``text`` if it is an object or may stand for one, None if not."""
    if not text or text == "null":
        return "{}"
    if text.startswith("{"):
        return text
    inner = _decode(text)
    if isinstance(inner, str) and isinstance(_decode(inner), dict):
        return inner.strip()
    return "{}" if inner == "" else None


def _decode(text: str) -> object:
    """Return the value of JSON ``text``, or None if it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _ignore(_: str) -> None:
    pass


def _value_text(stream: TextStream) -> Generator[None, None, str]:
    parts = list[str]()
    whole = yield from read_value(stream, parts.append)
    return "".join(parts) if whole else "null"


def _text_of(stream: TextStream) -> Generator[None, None, str]:
    """Read a quoted string, of which the opening quote is unread; return what it stands for."""
    parts = list[str]()
    yield from read_string(stream, parts.append)
    return str(_decode("".join(parts)))
