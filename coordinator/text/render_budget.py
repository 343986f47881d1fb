"""Bounds on the text that a chat template may make of one request, checked before each text is made.

A template is the operator's and trusted; the strings, numbers and nesting that it prints are a client's. An operation
that can make much of little (JSON with an indent, ``"x" * n``, ``replace``) asks the budget of the rendering first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import islice
from typing import Any

from coordinator.text.traced import origins

MOST_GROWTH = 2
"""All that operations add to the texts that they are given may be so many times the longest text that is allowed."""
MOST_MADE = 1 << 30
"""Characters of all texts that are made, one of another, in one rendering: about a second of copying."""
MOST_PARTS = 1 << 20
"""Strings that texts are split into in one rendering: each takes 50 bytes and more."""
_FAST_JSON = 1 << 18
"""JSON of about so many characters is written in one call, which holds the interpreter lock."""
_VALUE_CHARS = 8
"""About how many characters a number, a bracket or a separator counts there."""
_BATCH = 1024
"""Pieces of JSON that are written before their characters are counted."""
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?([a-zA-Z])")
_NUMBER = re.compile(r"\d+")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""Of ``str.splitlines``."""


class TooMuchText(Exception):
    """The template would make more text than the budget allows."""


class RenderBudget:
    """What one rendering may still make; ``most`` is the length of the longest text."""

    __slots__ = ("_growth", "_made", "_parts", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._growth, self._made = MOST_GROWTH * most, max(MOST_MADE, most)
        self._parts = MOST_PARTS

    def spend(self, chars: int, growth: int = 0) -> None:
        """Count a text of ``chars`` characters that is about to be made, ``growth`` of which are in none of the texts
        that it is made of; TooMuchText if that is too much."""
        self._made -= chars
        self._growth -= max(0, growth)
        if chars > self.most or self._growth < 0 or self._made < 0:
            raise TooMuchText

    def split(self, parts: int) -> None:
        """Count a text that is about to be split into ``parts``."""
        self._parts -= parts
        if self._parts < 0:
            raise TooMuchText

    @property
    def room(self) -> int:
        """The most characters that a text may have that is made of none."""
        return min(self.most, self._growth, self._made)


current: ContextVar[RenderBudget] = ContextVar("render budget")
"""The budget of the rendering that goes on in this thread."""


# -- JSON -------------------------------------------------------------------------------------------------------------


def to_json(value: object, encoder: json.JSONEncoder, *, indented: bool) -> str:
    """``value`` as ``encoder`` writes it: in one call if it is little, else piece by piece as far as the budget goes.
    ``indented``: whether ``encoder`` begins lines, which may be longer than what stands in them."""
    budget = current.get()
    if not indented and _is_little(value):
        text = encoder.encode(value)
        budget.spend(len(text), len(text))
        return text
    pieces, texts, left = encoder.iterencode(value), list[str](), budget.room
    while batch := list(islice(pieces, _BATCH)):
        texts.append("".join(batch))  # a string object for each number takes more memory than the text
        left -= len(texts[-1])
        if left < 0:
            raise TooMuchText
    whole = "".join(texts)
    budget.spend(len(whole), len(whole))
    return whole


def _is_little(value: object) -> bool:
    """Whether ``value`` is about _FAST_JSON characters of JSON at most, without an indent."""
    left, rest = _FAST_JSON, [value]
    while rest and left >= 0:
        item = rest.pop()
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, dict):
            left -= _VALUE_CHARS * (len(item) + 1) + sum(map(len, map(str, item)))
            rest += item.values() if left >= 0 else ()
        elif isinstance(item, list | tuple):
            left -= _VALUE_CHARS * (len(item) + 1)
            rest += item if left >= 0 else ()
    return left >= 0


# -- operators --------------------------------------------------------------------------------------------------------


def before_operator(operator: str, left: object, right: object) -> None:
    """Count what ``left operator right`` is about to make, if that is a text or a list."""
    if operator == "%":
        if isinstance(left, str):
            before_percent(left, right)
    elif operator == "*":
        if isinstance(right, str | list | tuple):
            left, right = right, left
        if isinstance(left, str | list | tuple) and isinstance(right, int):
            length = len(left) * right
            current.get().spend(length, length)
    elif (isinstance(left, str) and isinstance(right, str)) or (isinstance(left, list) and isinstance(right, list)):
        current.get().spend(len(left) + len(right))


def before_percent(text: str, values: object) -> None:
    """Count the widths in ``text % values``; of a text that is not all the template's own also what it may repeat."""
    if isinstance(values, Mapping):
        given: Sequence[object] = list(values.values())
    else:
        given = values if isinstance(values, tuple) else (values,)
    conversions = _CONVERSION.findall(text)
    starred = max((value for value in given if isinstance(value, int)), key=abs, default=0)
    chars = 0
    for width, precision, kind in conversions:
        for number in (width, "" if kind == "s" else precision):
            chars += abs(starred) if number == "*" else int(number or 0)
    if b"\0" in origins(text):
        chars += len(conversions) * max((len(str(value)) for value in given), default=0)
    current.get().spend(chars, chars)


def before_field(layout: str) -> None:
    """Count the widths in ``layout``, the format of a field of ``str.format``."""
    chars = sum(map(int, _NUMBER.findall(layout)))
    current.get().spend(chars, chars)


# -- methods and filters ----------------------------------------------------------------------------------------------


def before_method(text: str, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Count what the method ``name`` of ``text`` is about to make; returns ``args``, with a list for an iterator that
    had to be read."""
    match name:
        case "center" | "ljust" | "rjust" | "zfill" if args and isinstance(args[0], int):
            before_padding(text, args[0])
        case "expandtabs":
            size = args[0] if args else named.get("tabsize", 8)
            if isinstance(size, int):
                _before_growing(text, text.count("\t") * size)
        case "replace" if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            before_replacing(text, args[0], args[1], args[2] if len(args) > 2 else named.get("count", -1))
        case "split" | "rsplit":
            separator, most = (*args, *[None] * 2)[:2]
            before_splitting(text, named.get("sep", separator), named.get("maxsplit", most))
        case "splitlines":
            current.get().split(sum(map(text.count, _LINE_ENDS)))
        case "join" if len(args) == 1:
            parts = list(args[0])
            before_joining(text, parts)
            return (parts,)
    return args


def before_padding(text: str, width: int) -> None:
    _before_growing(text, width - len(text))


def before_replacing(text: str, old: str, new: str, count: object = -1) -> None:
    found = text.count(old)
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    _before_growing(text, found * (len(new) - len(old)))


def before_splitting(text: str, separator: object, most: object) -> None:
    found = text.count(separator) if isinstance(separator, str) else sum(map(text.count, " \t\n\r"))
    current.get().split(min(found, most) if isinstance(most, int) and most >= 0 else found)


def before_joining(separator: str, parts: Sequence[object]) -> None:
    separators = len(separator) * (len(parts) - 1)
    current.get().spend(separators + sum(len(part) for part in parts if isinstance(part, str)), separators)


def before_indenting(text: str, width: int | str, blank: bool) -> None:
    ends = sum(map(text.count, _LINE_ENDS))
    lines = 1 + (ends if blank else min(ends, len(text) - ends))
    _before_growing(text, lines * (len(width) if isinstance(width, str) else width))


def _before_growing(text: str, growth: int) -> None:
    growth = max(0, growth)
    current.get().spend(len(text) + growth, growth)
