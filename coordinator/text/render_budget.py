"""Limits on the text that rendering a chat template may create, checked before each operation creates it.

The template comes from the operator and is trusted, but the strings, numbers and nesting that it prints come from a
client. Operations that can turn a short input into a long output (JSON with an indent, ``"x" * n``, ``replace``) are
charged to the budget of the rendering first, by the ``before_`` functions. They raise TooMuchText if that exceeds the
budget.
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
"""Total growth per rendering, as a multiple of the longest allowed text. Growth is what the output of an operation has
beyond its inputs."""
MOST_MADE = 1 << 30
"""Total characters of all intermediate texts of one rendering: about a second of copying."""
MOST_PARTS = 1 << 20
"""Total strings that texts are split into in one rendering. Each takes at least 50 bytes."""
_FAST_JSON = 1 << 18
"""JSON of up to about this many characters is encoded in one call, which holds the interpreter lock meanwhile."""
_VALUE_CHARS = 8
"""Estimated characters of a number, a bracket or a separator for the comparison with _FAST_JSON."""
_BATCH = 1024
"""Pieces of JSON that are encoded between two checks of the budget."""
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?([a-zA-Z])")
_NUMBER = re.compile(r"\d+")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""The line ends of ``str.splitlines``."""


class TooMuchText(Exception):
    """Rendering the template would create more text than the budget allows."""


class RenderBudget:
    """The remaining budget of one rendering. ``most``: maximum characters of any single text."""

    __slots__ = ("_growth", "_made", "_parts", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._growth, self._made = MOST_GROWTH * most, max(MOST_MADE, most)
        self._parts = MOST_PARTS

    def spend(self, chars: int, growth: int = 0) -> None:
        """Charge a text of ``chars`` characters that is about to be created, ``growth`` of which are not copied from
        its inputs. Raises TooMuchText if the budget is exceeded."""
        self._made -= chars
        self._growth -= max(0, growth)
        if chars > self.most or self._growth < 0 or self._made < 0:
            raise TooMuchText

    def split(self, parts: int) -> None:
        """Charge a split of a text into ``parts`` strings. Raises TooMuchText if the budget is exceeded."""
        self._parts -= parts
        if self._parts < 0:
            raise TooMuchText

    @property
    def room(self) -> int:
        """Maximum characters of a text that is not made from other texts."""
        return min(self.most, self._growth, self._made)


current: ContextVar[RenderBudget] = ContextVar("render budget")
"""The budget of the rendering that runs in this thread."""


# -- JSON -------------------------------------------------------------------------------------------------------------


def to_json(value: object, encoder: json.JSONEncoder, *, indented: bool) -> str:
    """Encode ``value`` with ``encoder``: in one call if it is small, else piece by piece, so that TooMuchText is raised
    before more than the budget is encoded. ``indented``: whether ``encoder`` indents, in which case the indentation may
    be longer than the values and the size cannot be estimated."""
    budget = current.get()
    if not indented and _is_little(value):
        text = encoder.encode(value)
        budget.spend(len(text), len(text))
        return text
    pieces, texts, left = encoder.iterencode(value), list[str](), budget.room
    while batch := list(islice(pieces, _BATCH)):
        texts.append("".join(batch))  # joined early: one string object per number takes more memory than its text
        left -= len(texts[-1])
        if left < 0:
            raise TooMuchText
    whole = "".join(texts)
    budget.spend(len(whole), len(whole))
    return whole


def _is_little(value: object) -> bool:
    """Return whether ``value`` has about _FAST_JSON characters of unindented JSON or fewer."""
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
    """Charge the result of ``left operator right`` if it is a text or a list."""
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
    """Charge the widths in ``text % values``. If a part of ``text`` comes from a client, also charge the longest value
    for each conversion, because a client's text may repeat a long value."""
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
    """Charge the widths in ``layout``, the format specification of a field of ``str.format``."""
    chars = sum(map(int, _NUMBER.findall(layout)))
    current.get().spend(chars, chars)


# -- methods and filters ----------------------------------------------------------------------------------------------


def before_method(text: str, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Charge the result of calling the method ``name`` of ``text``. Returns ``args``; for ``join`` its iterable is
    replaced by a list, because it has to be read here."""
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
    """Charge padding ``text`` to ``width`` characters."""
    _before_growing(text, width - len(text))


def before_replacing(text: str, old: str, new: str, count: object = -1) -> None:
    """Charge replacing ``old`` by ``new`` in ``text``, at most ``count`` times if that is not negative."""
    found = text.count(old)
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    _before_growing(text, found * (len(new) - len(old)))


def before_splitting(text: str, separator: object, most: object) -> None:
    """Charge the parts of a split of ``text`` at ``separator``, or at white space if that is no string; at most
    ``most`` splits if that is not negative."""
    found = text.count(separator) if isinstance(separator, str) else sum(map(text.count, " \t\n\r"))
    current.get().split(min(found, most) if isinstance(most, int) and most >= 0 else found)


def before_joining(separator: str, parts: Sequence[object]) -> None:
    """Charge joining ``parts`` with ``separator``. Parts that are no strings do not count."""
    separators = len(separator) * (len(parts) - 1)
    current.get().spend(separators + sum(len(part) for part in parts if isinstance(part, str)), separators)


def before_indenting(text: str, width: int | str, blank: bool) -> None:
    """Charge indenting the lines of ``text`` by ``width`` characters or by a given text; blank lines only if
    ``blank``."""
    ends = sum(map(text.count, _LINE_ENDS))
    lines = 1 + (ends if blank else min(ends, len(text) - ends))
    _before_growing(text, lines * (len(width) if isinstance(width, str) else width))


def _before_growing(text: str, growth: int) -> None:
    growth = max(0, growth)
    current.get().spend(len(text) + growth, growth)
