"""Text of strings that JSON schemas constrain, as terminals: patterns, formats, lengths, and what may not occur.

A *term* is a Lark expression for a terminal; terms are joined by ``&``. Patterns search, as JSON schema says, so text
may stand around what they match unless they have anchors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from llguidance import LLMatcher

from coordinator.grammar import lark
from coordinator.grammar.errors import unsupported
from coordinator.grammar.string_formats import FORMATS

_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[\s\S]")
"""One character of a regular expression, an escape or a class of characters."""


class Inexpressible(Exception):
    """The notation of a model cannot express ``keyword`` of a schema."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


def terms(schema: Mapping[str, object], give_up: Callable[[str], None]) -> list[str]:
    """Return terms for the text of strings that match ``schema``, [] for any text. ``patterns`` of the schema is a list
    of patterns. ``give_up`` is called with a keyword that is left out."""
    found: list[str] = []
    for each in _strings(schema.get("patterns")):
        try:
            found.append(searching(each))
        except Inexpressible as error:
            give_up(error.keyword)
    if (format := schema.get("format")) in FORMATS:
        found.append(lark.regex(FORMATS[str(format)]))
    return [*found, *lengths(schema)]


def lengths(schema: Mapping[str, object]) -> list[str]:
    """Return the term for the lengths in ``schema``, [] if it has none."""
    count = times(*bounds(schema, "minLength", "maxLength"))
    return [] if count == "*" else [f"/(?s:.{count})/"]


def bounds(schema: Mapping[str, object], least: str, most: str) -> tuple[int, int | None]:
    """Return the values of two keywords of ``schema``, of which the second may have none. Raises Inexpressible if no
    number is between them."""
    low, high = whole(schema.get(least)) or 0, whole(schema.get(most))
    if high is not None and high < low:
        raise Inexpressible(most)
    return low, high


def times(low: int, high: int | None) -> str:
    """Return a repetition as expressions have it, such as ``{2,5}``."""
    return "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"


def whole(value: object) -> int | None:
    """Return ``value`` if it is an integer, None otherwise."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@functools.lru_cache(maxsize=256)
def searching(pattern: str) -> str:
    """Return the term for texts in which ``pattern`` finds something. Raises Inexpressible if llguidance has no such
    expression."""
    found = lark.regex(_whole(pattern))
    if LLMatcher.validate_grammar(f"start: T\nT: {found}"):
        raise Inexpressible("pattern")
    return found


def _whole(pattern: str) -> str:
    """Return an expression that matches a text as a whole exactly if ``pattern`` finds something in it."""
    options: list[str] = []
    for option in _alternatives(pattern):
        if (inner := _group(option)) is not None:
            options.append(_whole(inner))
            continue
        begins, ends = option[:1] == ["^"], option[-1:] == ["$"]
        body = option[begins : len(option) - ends]
        if {"^", "$"} & set(body):
            raise Inexpressible("pattern")
        before, after = ("" if anchored else "(?s:.*)" for anchored in (begins, ends))
        options.append(f"{before}(?:{''.join(body)}){after}")
    return f"(?:{'|'.join(options)})"


def _alternatives(pattern: str) -> list[list[str]]:
    """Return the alternatives of ``pattern`` outside of groups, each as its atoms."""
    found: list[list[str]] = [[]]
    depth = 0
    for atom in _ATOM.findall(pattern):
        depth += (atom == "(") - (atom == ")")
        if atom == "|" and not depth:
            found.append([])
        else:
            found[-1].append(atom)
    return found


def _group(atoms: Sequence[str]) -> str | None:
    """Return what ``atoms`` have inside if they are one group, None otherwise."""
    if atoms[:1] != ["("] or atoms[-1:] != [")"]:
        return None
    depth = 0
    for at, atom in enumerate(atoms):
        depth += (atom == "(") - (atom == ")")
        if not depth and at < len(atoms) - 1:
            return None
    inner = "".join(atoms[1:-1])
    return inner.removeprefix("?:") if not inner.startswith("?") or inner.startswith("?:") else None


def without(text: str) -> str:
    """Return the term for texts in which ``text`` does not occur."""
    return f"~{lark.regex(f'(?s:.*){re.escape(text)}(?s:.*)')}"


def pieces_without(*ends: str) -> str:
    """Return a grammar for texts without any of ``ends``, none of which is the beginning of another one, in pieces that
    leave what stands behind them recognizable. Raises GrammarError if the first character of an end occurs inside of
    one."""
    firsts = "".join(sorted({end[0] for end in ends}))
    for end in ends:
        if set(end[1:]) & set(firsts):
            unsupported(f"is not supported: reasoning of this model ends with {end!r}.")
    lines, names = list[str](), ["OTHER"]
    lines.append(f"OTHER: {lark.regex(f'[^{re.escape(firsts)}]+')}")
    for at, first in enumerate(firsts):
        rests = [end[1:] for end in ends if end[0] == first]
        pieces = {"BROKEN": _broken(rests, firsts), "BEGUN": _begun(rests)}
        names += (f"{name}_{at}" for name in pieces)
        lines += (f"{name}_{at}: {lark.regex(re.escape(first) + piece)}" for name, piece in pieces.items())
    return "\n".join([f"start: ({' | '.join(names)})*", *lines])


def _by_first(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return what stands behind the first character of ``texts``, by that, without empty texts."""
    found: dict[str, list[str]] = {}
    for text in texts:
        found.setdefault(text[0], []).extend([text[1:]] if text[1:] else [])
    return found


def _broken(texts: Sequence[str], firsts: str) -> str:
    """Return the expression for the beginning of one of ``texts`` and a character that neither continues it nor is in
    ``firsts``."""
    following = _by_first(texts)
    options = [f"[^{re.escape(firsts + ''.join(following))}]"]
    options += (f"{re.escape(char)}{_broken(rests, firsts)}" for char, rests in following.items() if rests)
    return f"(?:{'|'.join(options)})"


def _begun(texts: Sequence[str]) -> str:
    """Return the expression for the beginning of one of ``texts``, at most all but its last character."""
    options = [f"{re.escape(char)}{_begun(rests)}" for char, rests in _by_first(texts).items() if rests]
    return f"(?:{'|'.join(options)})?" if options else ""


def joined(given: Sequence[str]) -> str:
    """Return the terminal expression for texts that match all terms ``given``."""
    positive = [] if any(each[0] != "~" for each in given) else [lark.ANY_TEXT]
    return f"({' & '.join([*positive, *given])})" if given else lark.ANY_TEXT


def either(given: Sequence[str]) -> str:
    """Return the terminal expression for any of ``given``."""
    return given[0] if len(given) == 1 else f"({' | '.join(given)})"


def _strings(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
