"""Reading a JSON body by hand: every wrong thing becomes an OpenAI-shaped error that names the field.

Owns the bytes-to-object step (strict UTF-8, no NaN, no duplicate keys, bounded nesting) and typed getters. A field that
is null counts as absent. Knows no endpoint. Fields that nobody asked for are remembered as ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from common.core.errors import RequestError
from coordinator.requests.spec import Json

_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 17
MAX_STRINGS = 1 << 17
"""Arrays and objects, and strings (keys among them), in all JSON of one request. Eight megabytes have room for
millions, which would take hundreds of megabytes, and seconds in which the parser holds the interpreter lock."""
_MARKS = b'"[{'
_NO_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS)
_STRING = re.compile(rb'"[^"]*+"?')
INT64 = 1 << 63


def refuse(message: str, param: str | None = None, code: str = "invalid_value") -> NoReturn:
    """RequestError 400."""
    raise RequestError(message, param=param, code=code)


def kind_of(value: object) -> str:
    """How an error message calls the type of ``value``."""
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
    """How many keys there are in ``value``, at all depths; RequestError if these are more than ``left``."""
    if left == 0:
        refuse(f"The JSON {param or 'body'} is nested deeper than {MAX_DEPTH} levels.", param, "invalid_json")
    items, keys = (value, 0) if isinstance(value, list) else (value.values(), len(value))
    if {dict, list} & set(map(type, items)):  # long lists of numbers are passed at C's speed
        for item in items:
            if isinstance(item, dict | list):
                keys += _keys(item, left - 1, param)
    return keys


class JsonBudget:
    """The arrays, objects and strings that the JSON of one request may have: its body and, in strings of the body, the
    arguments of tool calls."""

    __slots__ = ("_containers", "_marks", "_short", "_strings")

    def __init__(self) -> None:
        self._containers = self._strings = 0
        self._marks = bytearray()
        """Quotation marks and brackets that are not in ``_containers`` yet: some brackets may be in strings."""
        self._short = False

    def spend_body(self, body: bytes) -> None:
        """Count the values of ``body``, without parsing anything; RequestError if they are too many."""
        self._short = len(body) <= MAX_CONTAINERS  # each value takes a byte, also in what a string of the body holds
        self.spend(body)

    def spend(self, text: bytes, param: str | None = None) -> None:
        """Count the values of the JSON ``text`` at ``param``, as those of the body."""
        if self._short:
            return
        if b"\\" in text:  # without escapes every quotation mark begins or ends a string
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
    """The JSON object in ``body``, whose values ``budget`` counts; RequestError 400 for everything else that could be
    there."""
    if not body.strip():
        refuse("The request body is empty; a JSON object is expected.", None, "invalid_json")
    (budget or JsonBudget()).spend_body(body)
    try:
        value = msgspec.json.decode(body)  # refuses NaN, lone surrogates, bad UTF-8 and numbers beyond float64
        # each member has a colon: as many as there are keys, and no key was there twice; more may be in strings
        if not isinstance(value, dict) or body.count(b":") > _keys(value, MAX_DEPTH):
            value = json.loads(body.decode(), object_pairs_hook=_no_duplicates)
    except RequestError:
        raise
    except UnicodeDecodeError:  # its position is that in one string
        refuse("The request body is not valid JSON: it is not UTF-8.", None, "invalid_json")
    except (msgspec.DecodeError, ValueError) as error:
        refuse(f"The request body is not valid JSON: {error}.", None, "invalid_json")
    except RecursionError:
        refuse(f"The JSON body is nested deeper than {MAX_DEPTH} levels.", None, "invalid_json")
    if not isinstance(value, dict):
        refuse(f"The request body must be a JSON object, not {kind_of(value)}.", None, "invalid_type")
    return value


def parse_arguments(text: str, param: str, budget: JsonBudget) -> Json:
    """The JSON object in ``text``, a string of the client's at ``param``, as strictly as a body, with whose values
    ``budget`` counts its own; of a key that is there twice the last value counts, as models write such arguments.
    RequestError 400 for everything else."""
    encoded = text.encode()
    budget.spend(encoded, param)
    try:
        value = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        refuse(f"{param!r} must be a JSON object, as a string.", param)
    _keys(value, MAX_DEPTH, param)
    return value


class Fields:
    """Typed access to one JSON object at ``path`` (for error messages)."""

    def __init__(self, values: Json, path: str = "") -> None:
        self._values, self._path = values, path
        self._read: set[str] = set()

    def at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def ignored(self) -> list[str]:
        """Names of present fields that nobody read."""
        return [name for name, value in self._values.items() if value is not None and name not in self._read]

    def skip(self, *names: str) -> None:
        """Fields that are known and need no action."""
        self._read.update(names)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """The value as it is, None if absent."""
        self._read.add(name)
        return self._values.get(name)

    def missing(self, name: str) -> NoReturn:
        refuse(f"You must provide the field {self.at(name)!r}.", self.at(name), "missing_required_parameter")

    def wrong(self, name: str, wanted: str, value: object) -> NoReturn:
        wrong_type(self.at(name), wanted, value)

    # -- scalars --------------------------------------------------------------------------------------------------

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, "a boolean", value)
        return value

    def string(self, name: str, *, limit: int = 1 << 16) -> str | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.wrong(name, "a string", value)
        if len(value) > limit:
            refuse(f"{self.at(name)!r} has {len(value)} characters, at most {limit} are allowed.", self.at(name))
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high]; 3.0 is one, true is not."""
        value = self.raw(name)
        return None if value is None else checked_integer(value, self.at(name), low, high)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in [low, high]."""
        value = self.raw(name)
        return None if value is None else checked_number(value, self.at(name), low, high)

    # -- structures -----------------------------------------------------------------------------------------------

    def mapping(self, name: str, limit: int | None = None) -> Json | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.wrong(name, "an object", value)
        if limit is not None and len(value) > limit:
            refuse(f"{self.at(name)!r} has {len(value)} entries, at most {limit} are allowed.", self.at(name))
        return value

    def nested(self, name: str) -> Fields | None:
        """A nested object, to be read field by field."""
        value = self.mapping(name)
        return None if value is None else Fields(value, self.at(name))

    def array(self, name: str, limit: int) -> list[object] | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.wrong(name, "an array", value)
        if len(value) > limit:
            refuse(f"{self.at(name)!r} has {len(value)} entries, at most {limit} are allowed.", self.at(name))
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        value = self.string(name)
        if value is not None and value not in allowed:
            refuse(f"{self.at(name)!r} must be one of {', '.join(allowed)}, not {value[:64]!r}.", self.at(name))
        return value


def wrong_type(param: str, wanted: str, value: object) -> NoReturn:
    refuse(f"{param!r} must be {wanted}, not {kind_of(value)}.", param, "invalid_type")


def checked_integer(value: object, param: str, low: int, high: int) -> int:
    """``value`` as an integer in [low, high]; RequestError otherwise."""
    if isinstance(value, float) and value.is_integer() and abs(value) < INT64:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(param, "an integer", value)
    if not low <= value <= high:
        bounds = f"at least {low}" if value < low and high >= INT64 - 1 else f"between {low} and {high}"
        refuse(f"{param!r} must be {bounds}, not {value if abs(value) < INT64 else 'a huge number'}.", param)
    return value


def checked_number(value: object, param: str, low: float, high: float) -> float:
    """``value`` as a float in [low, high]; RequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(param, "a number", value)
    if not (low <= value <= high) or not math.isfinite(value):
        shown = value if abs(value) < INT64 else "a huge number"
        refuse(f"{param!r} must be between {low:g} and {high:g}, not {shown}.", param)
    return float(value)
