"""Readers of tool calls, one for each style of :class:`~coordinator.output.formats.ToolFormat`.

A reader begins behind the markers that introduce a call, or a list of calls. It writes a call's name as soon as name
and the beginning of the arguments are known to be well formed; from then on, the arguments are streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Literal

from coordinator.output.deltas import DeltaWriter
from coordinator.output.formats import ToolFormat, pieces
from coordinator.output.text_stream import TextStream, markers
from coordinator.output.values import Notation, read_arguments, read_string, read_value
from coordinator.requests.spec import Json

Outcome = Literal["none", "whole", "broken"]
"""No call, and nothing was written; calls to their end; a call that broke off, whose arguments were closed."""
CallReading = Generator[None, None, Outcome]

_NAME = re.compile(r"[^\s<>{}\[\]()\"',;=]+")
_MOST_NAME = 256
"""Characters of a tool's name; a longer word is none."""
_BEFORE_NAME = frozenset({"type", "id"})
"""Keys that may stand before the name in a call without a marker."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all readers of one output share. ``tools``: parameter schemas by the tool's name. ``new_id``: makes the
    identifier of a call."""

    stream: TextStream
    writer: DeltaWriter
    format: ToolFormat
    tools: dict[str, Json]
    new_id: Callable[[], str]

    def begin(self, name: str, call_id: str = "") -> None:
        """Write the head of a call; what was read of it can no longer become content."""
        self.stream.forget()
        self.writer.begin_call(call_id or self.new_id(), name)

    def clean(self, name: str) -> str:
        """Return a tool's name as the client knows it, from what the model wrote."""
        return name.strip().removeprefix(self.format.name_prefix).encode("utf-8", "replace").decode()


def read_json_calls(context: Context, known_only: bool = False) -> CallReading:
    """Read an object ``{"name": ..., "arguments": {...}}`` or an array of such objects; in a section without other
    markers also several objects. They may stand in a code block.

    Keys may come in any order, and other keys are ignored. Missing or null arguments are an empty object; arguments
    given as a string of JSON are decoded. An object without a name, or with arguments that are no object, is no call.
    Neither is one that says that no tool is called. ``known_only``: only one that begins with a known tool's name is a
    call."""
    format, stream = context.format, context.stream
    if not known_only:
        yield from stream.accept(markers("```json"))
    listed = (yield from stream.skip_space()) == "["
    stream.at += listed
    several = listed or bool(format.section[0] and not format.begin)
    outcome: Outcome = "none"
    while True:
        char = yield from stream.skip_space()
        if outcome == "whole" and not (several and char and char in ",{"):
            stream.at += char == "]" and listed
            return "whole" if char == "]" or not listed else "broken"
        if char == ",":
            stream.at += 1
            continue
        following = yield from _JsonCall(context, known_only).read()
        if following != "whole":
            return "broken" if outcome == "whole" else following
        outcome = following


class _JsonCall:
    """Reads one call object."""

    def __init__(self, context: Context, known_only: bool) -> None:
        self._context = context
        self._stream = context.stream
        self._known_only = known_only
        self._names: Collection[str] = (context.format.name_key, "name", "function")
        self._argument_keys: Collection[str] = (context.format.arguments_key, "arguments", "parameters")
        self._name = ""
        self._arguments = ""
        """Arguments that came before the name, as JSON."""
        self._begun = False

    def read(self) -> CallReading:
        if (yield from self._stream.skip_space()) != "{":
            return "none"
        self._stream.at += 1
        whole = yield from self._members()
        if self._begun:
            return "whole" if whole else "broken"
        arguments = _object_text(self._arguments)
        if not self._name or arguments is None or not whole:
            return "none"
        self._begin()
        self._context.writer.arguments(arguments)
        return "whole"

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
            if not char or char not in "\"'":
                return False
            key = _decode((yield from _text(read_string, stream)))
            if (yield from stream.skip_space()) != ":":
                return False
            stream.at += 1
            if not (yield from self._member(str(key))):
                return False

    def _member(self, key: str) -> Generator[None, None, bool]:
        char = yield from self._stream.skip_space()
        if not self._context.format.name_key and not self._name:
            if char != "{" or not self._take_name(key):
                return False
            self._begin()
            return (yield from read_value(self._stream, self._context.writer.arguments))
        if key in self._names and not self._name:
            return self._take_name(_decode((yield from _text(read_value, self._stream))))
        if self._known_only and not self._name and key not in _BEFORE_NAME:
            return False
        if key not in self._argument_keys or self._begun:
            return (yield from read_value(self._stream, _ignore))
        if self._name and char == "{":
            self._begin()
            return (yield from read_value(self._stream, self._context.writer.arguments))
        parts = list[str]()
        whole = yield from read_value(self._stream, parts.append)
        self._arguments = "".join(parts)
        return whole

    def _take_name(self, value: object) -> bool:
        """Take the name from a string, or name and arguments from an object. Return whether the call may go on."""
        if isinstance(value, dict):
            arguments = next((value[key] for key in self._argument_keys if key in value), None)
            self._arguments = json.dumps(arguments, ensure_ascii=False)
            value = value.get("name")
        if isinstance(value, str):
            self._name = self._context.clean(value)
        if self._name in self._context.tools:
            return True
        return bool(self._name) and not self._known_only and self._name not in self._context.format.no_tool


def read_named_call(context: Context) -> CallReading:
    """Read ``NAME after_name {...}``. A call that ends behind its name has no arguments; other text is no call."""
    format, stream = context.format, context.stream
    written = yield from read_name(stream)
    name, call_id = context.clean(written), ""
    if format.numbered:
        before, _, number = name.rpartition(":")
        if number.isdecimal():
            name, call_id = before, written
        elif name not in context.tools:
            name = name.partition(":")[0]
    if format.id_marker and (yield from stream.accept(markers(format.id_marker))):
        yield from read_name(stream)
    introduced = ""
    for piece in pieces(format.after_name):
        introduced += yield from stream.accept(markers(piece))
    char = yield from stream.skip_space()
    if not name:
        return "none"
    if char == "{":
        context.begin(name, call_id)
        whole = yield from read_value(stream, context.writer.arguments, Notation(quote=format.quote))
        return "whole" if whole else "broken"
    ended = not char or (yield from stream.accept(markers(*format.closing)))
    if not introduced or not ended:
        return "none"
    context.begin(name, call_id)
    context.writer.arguments("{}")
    return "whole"


def read_pythonic_calls(context: Context, known_only: bool = False) -> CallReading:
    """Read ``[name(key=literal, ...), ...]``; the brackets and commas between calls may be missing.

    Arguments without a key get the names of the tool's parameters in their order. ``known_only``: the text is no call
    if it does not begin with the name of a known tool."""
    stream = context.stream
    listed = (yield from stream.skip_space()) == "["
    stream.at += listed
    outcome: Outcome = "none"
    while True:
        char = yield from stream.skip_space()
        if outcome == "whole" and char == ",":
            stream.at += 1
            continue
        if outcome == "whole" and (not listed or char == "]"):
            stream.at += listed
            if listed or not context.format.end:
                return "whole"
        name = context.clean((yield from read_name(stream))).removesuffix(context.format.method)
        known = name in context.tools or (not known_only and bool(name))
        if not known or (yield from stream.skip_space()) != "(":
            return "broken" if outcome == "whole" and (listed or name) else outcome
        stream.at += 1
        context.begin(name)
        properties = context.tools.get(name, {}).get("properties")
        positional = iter(properties if isinstance(properties, dict) else ())
        if not (yield from read_arguments(stream, context.writer.arguments, positional)):
            return "broken"
        outcome = "whole"


def read_name(stream: TextStream) -> Generator[None, None, str]:
    """Read whitespace and a word that may be a tool's name; return "" if none stands here or it is too long."""
    yield from stream.skip_space()
    parts, size = list[str](), 0
    while True:
        found = _NAME.match(stream.text, stream.at)
        if found is not None:
            stream.at = found.end()
            parts.append(found[0])
            size += len(found[0])
        if stream.at < len(stream.text) or stream.ended or size > _MOST_NAME:
            return "".join(parts) if size <= _MOST_NAME else ""
        yield


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


def _text(
    read: Callable[[TextStream, Callable[[str], None]], Generator[None, None, bool]], stream: TextStream
) -> Generator[None, None, str]:
    """Read a value and return it as JSON text, or as "null" if it is malformed."""
    parts = list[str]()
    whole = yield from read(stream, parts.append)
    return "".join(parts) if whole else "null"


def _ignore(_: str) -> None:
    pass
