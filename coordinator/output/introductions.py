"""What begins tool calls in an output: the one definition that the parser and the grammars share.

Calls begin behind a marker (:func:`introductions`, :func:`counting`), or, in families without one, with text that
:func:`call_head` matches. The parser reads calls there and nowhere else, and a grammar constrains the output from there
on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from coordinator.output.formats import ToolFormat, pieces

_BLANK = r"[ \t\r\n]{0,40}"
_QUOTE = "[\"']"


@dataclass(frozen=True, slots=True)
class Introduction:
    """A marker behind which calls are read."""

    marker: str
    bracket: bool
    """Whether the last character of the marker is the bracket of the list of calls."""
    following: tuple[str, ...]
    """Markers that may stand behind it, before the first call."""
    written: str
    """What the family writes between the marker and the first name or object, with the bracket of a list."""
    surplus: tuple[str, ...]
    """Markers behind the calls that may be missing, as what they close was not opened."""


@functools.lru_cache(maxsize=64)
def introductions(form: ToolFormat) -> tuple[Introduction, ...]:
    """Return all introductions of a family, those of ``form.opening`` first. None is the beginning of another one."""
    text, opening, closing = form.section[0] + form.begin, form.opening, form.closing
    found, at = list[Introduction](), 0
    for index, marker in enumerate(opening):
        at = text.index(marker, at) + len(marker)
        found.append(_introduction(form, marker, opening[index + 1 :], text[at:], closing[len(closing) - index :]))
    found += [_introduction(form, marker, (), "", pieces(form.section[1])) for marker in form.also]
    return tuple(found)


def _introduction(
    form: ToolFormat, marker: str, following: tuple[str, ...], written: str, surplus: tuple[str, ...]
) -> Introduction:
    if form.brackets and marker[-1].isalnum() and not written:  # a word alone is often no call
        return Introduction(f"{marker}[", True, following, "", surplus)
    return Introduction(marker, False, following, f"{written}\n[" if form.brackets else written, surplus)


def counting(form: ToolFormat, names_token: Callable[[str], bool]) -> tuple[Introduction, ...]:
    """Return the introductions that count outside of a section of calls. ``names_token``: whether a text is, or
    contains, a token of the tokenizer and not ordinary text with the same spelling.

    If the family's first marker is one, introductions that are only text do not count, since a model may repeat them
    from a client's text, except where the family's models are known to leave the first marker out."""
    found, opening = introductions(form), len(form.opening)
    if not opening or not names_token(found[0].marker):
        return found
    left_out = found[1:opening] if form.leaves_out else ()
    return tuple(each for each in found if names_token(each.marker) or each in left_out)


def call_head(form: ToolFormat, names: Iterable[str], *, listed: bool = True) -> str:
    """Return the regular expression, in syntax that Rust shares, of how a call of one of the tools ``names`` begins
    where calls have no marker: white space and all up to its name. ``listed``: a list of objects too."""
    name = "|".join(map(re.escape, names))
    if form.style == "pythonic":
        method = f"(?:{re.escape(form.method)})?" if form.method else ""
        return rf"{_BLANK}\[{_BLANK}(?:{name}){method}{_BLANK}\("
    keys = "|".join(sorted({form.name_key, "name", "function"}))
    before = (
        rf"(?:{_QUOTE}(?:type|id){_QUOTE}{_BLANK}:{_BLANK}{_QUOTE}[^\"'\\]{{0,64}}{_QUOTE}{_BLANK},{_BLANK}){{0,2}}"
    )
    bracket = rf"(?:\[{_BLANK})?" if listed else ""
    key = rf"{_QUOTE}(?:{keys}){_QUOTE}{_BLANK}:{_BLANK}"
    return rf"{_BLANK}{bracket}\{{{_BLANK}{before}{key}{_QUOTE}(?:{name}){_QUOTE}"
