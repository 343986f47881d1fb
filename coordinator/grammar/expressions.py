"""Expressions for what clients give: JSON schemas, JSON as text, grammars.

White space of JSON: between any two tokens one space, or one newline with an indentation of up to 32 spaces or 8 tabs,
so that compact, one-line and indented JSON can be written as models do, but no model can write white space for ever.
``disable_any_whitespace`` gives compact JSON without any, ``whitespace_pattern`` is the client's own choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance.gbnf_to_lark import any_to_lark

from coordinator.grammar import lark
from coordinator.grammar.errors import TOO_COMPLEX, refuse
from coordinator.grammar.json_schema import MAX_DEPTH, prepared

WHITESPACE = r" |\n(?: {0,32}|\t{0,8})"
_LARK_START = re.compile(r"^[?!]*start\b[^:=]*:(?!:=)", re.MULTILINE)
ANY_OBJECT: dict[str, object] = {"type": "object"}


def json_value(
    schema: object, whitespace: str | None = None, *, closed: bool = False, lenient: bool = False, at: str = ""
) -> str:
    """Return the expression for JSON values of a client's ``schema``; ``closed``, ``lenient`` and ``at`` are those of
    :func:`~coordinator.grammar.json_schema.prepared`. Raises GrammarError."""
    made = prepared(schema, closed=closed, lenient=lenient, at=at)
    if made is True:
        made = {}
    elif made is False:
        refuse("is the schema false, which no value matches.")
    pattern = WHITESPACE if whitespace is None else whitespace
    options: Mapping[str, object] = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return lark.schema({"x-guidance": options, **made})


def parsed(value: object) -> object:
    """Return ``value``, or what the JSON text ``value`` holds. Raises GrammarError."""
    if not isinstance(value, str):
        return value
    try:
        found: object = json.loads(value)
    except ValueError as error:
        refuse(f"is not valid JSON: {error}.")
    except RecursionError:
        refuse(f"is nested deeper than {MAX_DEPTH} levels.", "", TOO_COMPLEX)
    return found


def as_lark(text: str) -> str:
    """Return a client's grammar as Lark; it may be in llama.cpp's GBNF (``root ::= ...``)."""
    if not text.strip():
        refuse("is empty.")
    if "::=" not in text:
        return text
    try:
        return any_to_lark(text)
    except RecursionError:
        refuse("is nested too deeply.", "", TOO_COMPLEX)
    except Exception as error:  # the converter raises bare Exception
        if _LARK_START.search(text):  # "::=" stands inside a string
            return text
        refuse(f"is neither Lark nor GBNF: {str(error)[:200]}.")
