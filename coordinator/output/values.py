"""Values that a model writes: JSON, Python literals and kindred notations, rewritten as JSON while they arrive.

The reader never fails. Text that is JSON is passed on unchanged. What is nearly JSON is corrected: control characters
and wrong escapes in strings, single quotes, bare words, Python's names of constants, trailing commas. Text that cannot
be continued, and the end of the output, close what is open, so the result is always one whole JSON value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Final

from coordinator.output.text_stream import SPACES, Reading, TextStream, markers

Emit = Callable[[str], None]

MOST_DEPTH = 128
"""Levels of nested arrays and objects that are read; what is deeper counts as malformed."""
_MOST_SPACE = 256
"""Characters of whitespace between two tokens of a value that are passed on."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_PLAIN_SINGLE = re.compile(r"[^'\\\x00-\x1f]+")
_WORD = re.compile(r"[^\s,:=()\[\]{}\"'<>;]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NO_JSON_NUMBERS = frozenset({"nan", "inf", "-inf", "infinity", "-infinity"})
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_HEXADECIMAL = re.compile("[0-9a-fA-F]*")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"{": ("}", "}"), "[": ("]", "]"), "(": (")", "]")}
"""Closing bracket in the notation and in JSON."""


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes values. ``python``: string escapes are Python's. ``quote``: a marker that begins and ends a
    string, within which nothing is escaped."""

    python: bool = False
    quote: str = ""


JSON: Final = Notation()
PYTHON: Final = Notation(python=True)


def encode(text: str) -> str:
    """Return ``text`` as it stands inside a JSON string, without quotes. Lone surrogates become escapes."""
    encoded = json.dumps(text, ensure_ascii=False)[1:-1]
    return encoded if encoded.isascii() else re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", encoded)


def scalar(word: str) -> str:
    """Return an unquoted word as JSON: a constant, a number, otherwise a string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        number = float(word) if "." in word or word.lower() in _NO_JSON_NUMBERS else int(word, 0)
    except ValueError:
        return f'"{encode(word)}"'
    return str(number) if math.isfinite(number) else "null"


def read_value(stream: TextStream, emit: Emit, notation: Notation = JSON) -> Generator[None, None, bool]:
    """Read one value and emit it as JSON. Return whether it was complete and well formed."""
    return _Reader(stream, emit, notation).value()


def read_arguments(stream: TextStream, emit: Emit, positional: Iterator[str]) -> Generator[None, None, bool]:
    """Read ``key=value, ...)``, the rest of a Python call behind its opening bracket, and emit it as a JSON object.
    Return whether it was complete and well formed.

    ``positional``: names of the parameters that are given by position; where they run out, the call is malformed."""
    return _Reader(stream, emit, PYTHON).arguments(positional)


def read_string(stream: TextStream, emit: Emit, notation: Notation = JSON) -> Generator[None, None, bool]:
    """Read a quoted string, of which the opening quote is unread, and emit it as JSON with its quotes. Return whether
    it was complete."""
    emit('"')
    if notation.quote and stream.begins_with(notation.quote):
        stream.at += len(notation.quote)
        closed = yield from stream.pass_until(markers(notation.quote), lambda text: emit(encode(text)))
    else:
        quote = stream.text[stream.at]
        stream.at += 1
        closed = yield from _quoted(stream, emit, quote, notation.python)
    emit('"')
    return closed != ""


def _quoted(stream: TextStream, emit: Emit, quote: str, python: bool) -> Generator[None, None, str]:
    """Pass on the inside of a string. Return its closing quote, or "" if the output ended."""
    plain = (_PLAIN if quote == '"' else _PLAIN_SINGLE).match
    while True:
        found = plain(stream.text, stream.at)
        if found is not None:
            stream.at = found.end()
            emit(found[0] if quote == '"' else found[0].replace('"', '\\"'))
        if stream.at == len(stream.text):
            if stream.ended:
                return ""
            yield
            continue
        char = stream.text[stream.at]
        if char == "\\":
            yield from _escape(stream, emit, python)
            continue
        stream.at += 1
        if char == quote:
            return quote
        emit(encode(char))


def _escape(stream: TextStream, emit: Emit, python: bool) -> Reading:
    """Pass on one escape sequence, which begins at the current position."""
    while len(stream.text) - stream.at < 2:
        if stream.ended:
            stream.at = len(stream.text)
            return
        yield
    char = stream.text[stream.at + 1]
    digits = _HEX_DIGITS.get(char, 0) if python or char == "u" else 0
    while True:
        code = stream.text[stream.at + 2 : stream.at + 2 + digits]
        hexadecimal = _HEXADECIMAL.fullmatch(code) is not None
        if not hexadecimal or len(code) == digits or stream.ended:
            break
        yield
    if hexadecimal and len(code) < digits:
        stream.at = len(stream.text)
        return
    if digits and hexadecimal and int(code, 16) < 0x110000:
        stream.at += 2 + digits
        emit(f"\\u{code}" if char == "u" else encode(chr(int(code, 16))))
        return
    stream.at += 2
    if python and char in _PYTHON_ESCAPES:
        emit(encode(_PYTHON_ESCAPES[char]))
    elif char in _JSON_ESCAPES and not digits:
        emit(f"\\{char}")
    elif char == "'":
        emit("'")
    elif char != "\n" or not python:
        emit(encode(f"\\{char}"))


class _Reader:
    """Reads one value with an explicit stack, so that no nesting exhausts Python's.

    The state is what must follow: a "value", an "item" (a value or the end of the array), a "key" (or the end of the
    object), a "colon", or the "next" comma or closing bracket."""

    def __init__(self, stream: TextStream, emit: Emit, notation: Notation) -> None:
        self._stream = stream
        self._emit = emit
        self._notation = notation
        self._closers = list[tuple[str, str]]()
        self._positional: Iterator[str] = iter(())
        self._gap = ""
        """Whitespace and a comma that were read and not yet written."""
        self._cut = False
        """Whether the output ended inside a string or a word."""

    def value(self) -> Generator[None, None, bool]:
        return self._read("value")

    def arguments(self, positional: Iterator[str]) -> Generator[None, None, bool]:
        self._positional = positional
        self._closers.append((")", "}"))
        self._emit("{")
        return self._read("key")

    def _read(self, state: str) -> Generator[None, None, bool]:
        following: str | None = state
        while following is not None:
            state = following
            if state == "next" and not self._closers:
                return not self._cut
            char = yield from self._space()
            if state == "next" or (state in ("item", "key") and self._closes(char)):
                following = self._next(char)
            elif state == "colon":
                following = self._colon(char)
            elif state == "key":
                following = yield from self._key(char)
            else:
                following = yield from self._value(char)
        rest = {"colon": ": null", "value": " null" if self._closers else "null"}.get(state, "")
        self._emit(rest + "".join(closer for _, closer in reversed(self._closers)))
        return False

    def _space(self) -> Generator[None, None, str]:
        """Skip whitespace, keeping it in ``_gap``. Return the next character, or "" at the end of the output."""
        stream = self._stream
        while True:
            found = SPACES.match(stream.text, stream.at)
            assert found is not None
            stream.at = found.end()
            if self._closers and len(self._gap) < _MOST_SPACE:
                self._gap += found[0]
            if stream.at < len(stream.text):
                return stream.text[stream.at]
            if stream.ended:
                return ""
            yield

    def _write(self, text: str) -> None:
        self._emit(self._gap + text)
        self._gap = ""

    def _closes(self, char: str) -> bool:
        return bool(self._closers) and char == self._closers[-1][0]

    def _next(self, char: str) -> str | None:
        if self._closes(char):
            self._stream.at += 1
            self._gap = self._gap.replace(",", "")
            self._write(self._closers.pop()[1])
            return "next"
        if char != ",":
            return None
        self._stream.at += 1
        self._gap += ","
        return "key" if self._closers[-1][1] == "}" else "item"

    def _colon(self, char: str) -> str | None:
        equals = self._closers[-1][0] == ")"
        if not char or char != ("=" if equals else ":"):
            return None
        self._stream.at += 1
        self._gap = "" if equals else self._gap
        self._write(": " if equals else ":")
        return "value"

    def _key(self, char: str) -> Generator[None, None, str | None]:
        call = self._closers[-1][0] == ")"
        if call and char and char in "\"'[{(":
            return "value" if self._position() else None
        if (yield from self._at_quote(char)):
            self._write("")
            self._cut = not (yield from read_string(self._stream, self._emit, self._notation))
            return "colon"
        word = yield from self._word()
        if not word:
            return None
        if call and (yield from self._space()) != "=":
            if not self._position():
                return None
            self._emit(scalar(word))
            return "next"
        self._write(f'"{encode(word)}"')
        return "colon"

    def _position(self) -> bool:
        """Write the name of a positional argument; return False if there is none left."""
        name = next(self._positional, None)
        if name is not None:
            self._write(f'"{encode(name)}": ')
        return name is not None

    def _value(self, char: str) -> Generator[None, None, str | None]:
        closers = _CLOSERS.get(char)
        if closers is not None:
            if len(self._closers) >= MOST_DEPTH:
                return None
            self._stream.at += 1
            self._closers.append(closers)
            self._write("{" if char == "{" else "[")
            return "key" if char == "{" else "item"
        if (yield from self._at_quote(char)):
            self._write("")
            self._cut = not (yield from read_string(self._stream, self._emit, self._notation))
            return "next"
        word = yield from self._word()
        if not word:
            return None
        self._cut = self._stream.at == len(self._stream.text)
        self._write("null" if self._cut and not _NUMBER.fullmatch(word) else scalar(word))
        return "next"

    def _at_quote(self, char: str) -> Generator[None, None, bool]:
        """Return whether a string begins at ``char``, the next character."""
        if char and char in "\"'":
            return True
        stream, quote = self._stream, self._notation.quote
        if not char or char != quote[:1]:
            return False
        while len(stream.text) - stream.at < len(quote) and not stream.ended:
            yield
        return stream.begins_with(quote)

    def _word(self) -> Generator[None, None, str]:
        """Read an unquoted word; return "" if none stands here."""
        parts = list[str]()
        stream = self._stream
        while True:
            found = _WORD.match(stream.text, stream.at)
            if found is not None:
                stream.at = found.end()
                parts.append(found[0])
            if stream.at < len(stream.text) or stream.ended:
                return "".join(parts)
            yield
