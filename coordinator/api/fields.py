"""Parsing and validation of JSON bodies. Every error is OpenAI-shaped and names the field.

Owns the step from bytes to objects (strict UTF-8, no NaN, no duplicate keys, bounded nesting) and typed getters. A
field that is null counts as absent. Fields that no getter has read are reported as ignored. Must not know the
endpoints.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from common.core.errors import RequestError
from common.core.request import MAX_TOKENS
from coordinator.requests.spec import Json

_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 17
MAX_STRINGS = 1 << 17
"""Maximum number of arrays and objects, and of strings including keys, in all JSON of one request. A body of eight
megabytes could have millions of them, which would take hundreds of megabytes once parsed, and seconds during which the
parser holds the interpreter lock."""
_MARKS = b'"[{'
_NO_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS)
_STRING = re.compile(rb'"[^"]*+"?')
INT64 = 1 << 63


def refuse(message: str, param: str | None = None, code: str = "invalid_value") -> NoReturn:
    """Raise RequestError 400."""
    raise RequestError(message, param=param, code=code)


def kind_of(value: object) -> str:
    """Return the name of the type of ``value`` for error messages, with an article."""
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def _no_duplicates(pairs: list[tuple[str, object]]) -> Json:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                refuse(f"The key {name[:64]!r} appears twice in one JSON object.", None, "duplicate_key")
            seen.add(name)
    return fields


def _keys(value: Json | list[object], left: int, param: str | None = None) -> int:
    """Count the keys in ``value`` at all depths. Raises RequestError if it is nested deeper than ``left`` levels."""
    if left == 0:
        refuse(f"The JSON {param or 'body'} is nested deeper than {MAX_DEPTH} levels.", param, "invalid_json")
    items, keys = (value, 0) if isinstance(value, list) else (value.values(), len(value))
    if {dict, list} & set(map(type, items)):  # skips long lists of scalars without a Python loop
        for item in items:
            if isinstance(item, dict | list):
                keys += _keys(item, left - 1, param)
    return keys


class JsonBudget:
    """Limits the arrays, objects and strings in all JSON of one request: its body, and the arguments of tool calls,
    which are JSON inside strings of the body.

    Counts quotation marks and brackets in the bytes, so that a body over the limit is refused before it is parsed."""

    __slots__ = ("_containers", "_marks", "_short", "_strings")

    def __init__(self) -> None:
        self._containers = self._strings = 0
        self._marks = bytearray()
        """Quotation marks and opening brackets not yet added to ``_containers``. Brackets inside strings do not count;
        the strings are only removed when the total with these marks would exceed the limit."""
        self._short = False

    def spend_body(self, body: bytes) -> None:
        """Count the values of ``body`` without parsing it. Raises RequestError if there are too many."""
        self._short = len(body) <= MAX_CONTAINERS  # each value takes at least a byte, also inside a string
        self.spend(body)

    def spend(self, text: bytes, param: str | None = None) -> None:
        """Add the values of the JSON ``text`` at ``param``. Raises RequestError if there are too many."""
        if self._short:
            return
        if b"\\" in text:  # remove escaped quotation marks, so that each remaining one begins or ends a string
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        marks = text.translate(None, _NO_MARKS)
        self._strings += marks.count(b'"') // 2
        if self._strings > MAX_STRINGS:
            refuse(f"The JSON has {self._strings} strings, at most {MAX_STRINGS} are allowed.", param)
        self._marks += marks
        if self._containers + len(self._marks) > MAX_CONTAINERS:
            self._containers += len(_STRING.sub(b"", self._marks))
            self._marks.clear()
        if self._containers > MAX_CONTAINERS:
            count = self._containers
            refuse(f"The JSON has {count} arrays and objects, at most {MAX_CONTAINERS} are allowed.", param)


def parse_json(body: bytes, budget: JsonBudget | None = None) -> Json:
    """Return the JSON object in ``body`` and count its values in ``budget``. Raises RequestError 400 if ``body`` is not
    valid JSON or not an object."""
    if not body.strip():
        refuse("The request body is empty; a JSON object is expected.", None, "invalid_json")
    (budget or JsonBudget()).spend_body(body)
    try:
        value = msgspec.json.decode(body)  # refuses NaN, lone surrogates, bad UTF-8 and numbers beyond float64
        # each member has a colon, so no duplicate key was dropped if there are no more colons than keys. Strings may
        # contain colons too, so a body with more colons is parsed again with a check for duplicates
        if not isinstance(value, dict) or body.count(b":") > _keys(value, MAX_DEPTH):
            value = json.loads(body.decode(), object_pairs_hook=_no_duplicates)
    except RequestError:
        raise
    except UnicodeDecodeError:  # the position in the error is relative to one string, so it is not shown
        refuse("The request body is not valid JSON: it is not UTF-8.", None, "invalid_json")
    except (msgspec.DecodeError, ValueError) as error:
        refuse(f"The request body is not valid JSON: {error}.", None, "invalid_json")
    except RecursionError:
        refuse(f"The JSON body is nested deeper than {MAX_DEPTH} levels.", None, "invalid_json")
    if not isinstance(value, dict):
        refuse(f"The request body must be a JSON object, not {kind_of(value)}.", None, "invalid_type")
    return value


def parse_arguments(text: str, param: str, budget: JsonBudget) -> Json:
    """Return the JSON object in ``text``, the tool-call arguments at ``param``, and add its values to ``budget``.

    As strict as :func:`parse_json`, except that the last value of a duplicate key wins, because models write such
    arguments. Raises RequestError 400 if ``text`` is not a JSON object."""
    encoded = text.encode()
    budget.spend(encoded, param)
    try:
        value = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        refuse(f"{param!r} must be a string that contains a JSON object.", param)
    _keys(value, MAX_DEPTH, param)
    return value


class Fields:
    """Typed access to one JSON object at ``path`` (for error messages). The getters raise RequestError 400 for a value
    of another type or outside the given limits."""

    def __init__(self, values: Json, path: str = "") -> None:
        self.values, self.path = values, path
        self._read: set[str] = set()
        self._named = False
        """Whether :meth:`ignored` was called, after which no field may be read: it would be obeyed and named."""

    def at(self, name: str) -> str:
        """Return the path of the field ``name`` in the body, for error messages."""
        return f"{self.path}.{name}" if self.path else name

    def ignored(self) -> list[str]:
        """Return the names of present fields that no getter has read. Must be called last: a getter that is called
        later fails."""
        self._named = True
        return [name for name, value in self.values.items() if value is not None and name not in self._read]

    def skip(self, *names: str) -> None:
        """Mark fields as known although they have no effect, so that they are not reported as ignored."""
        self._read.update(names)

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null. Does not count as reading it."""
        return self.values.get(name) is not None

    def raw(self, name: str) -> object:
        """Return the unchecked value, None if absent."""
        assert not self._named, f"{self.at(name)} is read after the ignored fields were named"
        self._read.add(name)
        return self.values.get(name)

    def missing(self, name: str) -> NoReturn:
        """Raise RequestError because the field ``name`` is required."""
        refuse(f"You must provide the field {self.at(name)!r}.", self.at(name), "missing_required_parameter")

    def wrong(self, name: str, wanted: str, value: object) -> NoReturn:
        """Raise RequestError because ``value`` of the field ``name`` is not ``wanted``, the name of a type with an
        article."""
        wrong_type(self.at(name), wanted, value)

    # -- scalars --------------------------------------------------------------------------------------------------

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean, ``default`` if absent. Numbers and strings are refused."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, "a boolean", value)
        return value

    def string(self, name: str, *, limit: int = 1 << 16) -> str | None:
        """Return a string of at most ``limit`` characters, None if absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.wrong(name, "a string", value)
        if len(value) > limit:
            refuse(f"{self.at(name)!r} has {len(value)} characters, at most {limit} are allowed.", self.at(name))
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer in [low, high], None if absent. 3.0 is accepted, true is not."""
        value = self.raw(name)
        return None if value is None else checked_integer(value, self.at(name), low, high)

    def tokens(self, name: str, least: int) -> int | None:
        """Return a number of tokens from ``least`` on; None if absent or -1, which stands for as many as fit."""
        value = self.integer(name, -1, MAX_TOKENS)
        if value is not None and -1 < value < least:
            refuse(f"{self.at(name)!r} must be at least {least}, or -1 for as many as fit.", self.at(name))
        return None if value == -1 else value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number in [low, high], None if absent."""
        value = self.raw(name)
        return None if value is None else checked_number(value, self.at(name), low, high)

    # -- structures -----------------------------------------------------------------------------------------------

    def mapping(self, name: str, limit: int | None = None) -> Json | None:
        """Return an object of at most ``limit`` members, None if absent. Its members are not checked."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.wrong(name, "an object", value)
        if limit is not None and len(value) > limit:
            refuse(f"{self.at(name)!r} has {len(value)} entries, at most {limit} are allowed.", self.at(name))
        return value

    def nested(self, name: str) -> Fields | None:
        """Return the fields of a nested object, None if absent."""
        value = self.mapping(name)
        return None if value is None else Fields(value, self.at(name))

    def array(self, name: str, limit: int) -> list[object] | None:
        """Return an array of at most ``limit`` elements, None if absent. Its elements are not checked."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.wrong(name, "an array", value)
        if len(value) > limit:
            refuse(f"{self.at(name)!r} has {len(value)} entries, at most {limit} are allowed.", self.at(name))
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """Return a string that is one of ``allowed``, None if absent."""
        value = self.string(name)
        if value is not None and value not in allowed:
            refuse(f"{self.at(name)!r} must be one of {', '.join(allowed)}, not {value[:64]!r}.", self.at(name))
        return value


def wrong_type(param: str, wanted: str, value: object) -> NoReturn:
    """Raise RequestError because ``value`` at ``param`` is not ``wanted``, the name of a type with an article."""
    refuse(f"{param!r} must be {wanted}, not {kind_of(value)}.", param, "invalid_type")


def checked_integer(value: object, param: str, low: int, high: int) -> int:
    """Return ``value`` as an integer in [low, high]. Raises RequestError if it is not one."""
    if isinstance(value, float) and value.is_integer() and abs(value) < INT64:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(param, "an integer", value)
    if not low <= value <= high:
        bounds = f"at least {low}" if value < low and high >= INT64 - 1 else f"between {low} and {high}"
        refuse(f"{param!r} must be {bounds}, not {value if abs(value) < INT64 else 'a huge number'}.", param)
    return value


def checked_number(value: object, param: str, low: float, high: float) -> float:
    """Return ``value`` as a float in [low, high]. Raises RequestError if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(param, "a number", value)
    if not (low <= value <= high) or not math.isfinite(value):
        shown = value if abs(value) < INT64 else "a huge number"
        refuse(f"{param!r} must be between {low:g} and {high:g}, not {shown}.", param)
    return float(value)
