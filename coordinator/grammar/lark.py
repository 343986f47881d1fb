"""Text of llguidance grammars: literals, tokens, and the composition of rules.

A grammar is one Lark text whose rules may refer to further grammars by name (``@name``), each with its own names. See
docs/syntax.md of llguidance for the dialect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from llguidance import regex_to_lark

ANY_TEXT = "/(?s:.*)/"
"""A terminal for any text without control tokens."""


class Vocabulary(Protocol):
    """What grammars need to know of the model's tokenizer."""

    def control_id(self, text: str) -> int | None:
        """Return the id of the control token ``text``, None if ``text`` is no token, or one that llguidance matches as
        text."""

    def split(self, text: str) -> list[str | int]:
        """Return ``text`` as a list of texts and ids of control tokens that it spells."""

    @property
    def end_ids(self) -> Sequence[int]:
        """Ids of the tokens that end a sequence."""


def literal(text: str) -> str:
    """Return a Lark expression for exactly ``text``."""
    return json.dumps(text)  # as ASCII: the dialect does not take every character as it is


def regex(expression: str) -> str:
    """Return a Lark terminal for a regular expression in Rust's syntax, which must match as a whole."""
    return f"/{regex_to_lark(expression, '')}/" if expression else '""'


def schema(prepared: object) -> str:
    """Return a Lark expression for values of a JSON schema."""
    return f"%json {json.dumps(prepared)}"


def tokens(*ids: int) -> str:
    """Return a Lark expression for one token out of ``ids``."""
    return f"<[{','.join(map(str, ids))}]>"


def other_tokens(*ids: int) -> str:
    """Return a Lark expression for one token that is not among ``ids``."""
    return f"<[^{','.join(map(str, ids))}]>"


def marker(text: str, vocabulary: Vocabulary) -> str:
    """Return a Lark expression for the marker ``text``: as a control token if it is one, else as text."""
    token = vocabulary.control_id(text)
    return literal(text) if token is None else tokens(token)


class Grammar:
    """A grammar under construction: rules and terminals of the main grammar, and named further grammars."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._others: list[dict[str, object]] = []
        self._count = 0
        self._shared: dict[tuple[str, str], str] = {}

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Define the rule ``name``, or the terminal if it is in capitals, and return its name, which gets a number to
        be unique. ``options``: such as ``[lazy]``."""
        name = self.reserve(name)
        self.define(name, body, options)
        return name

    def shared(self, name: str, body: str, options: str = "") -> str:
        """Return the name of a rule with ``body``, the same one for the same body."""
        if (found := self._shared.get((body, options))) is None:
            found = self._shared[body, options] = self.rule(name, body, options)
        return found

    def reserve(self, name: str) -> str:
        """Return the name of a rule that :meth:`define` defines later, because it refers to itself."""
        self._count += 1
        return f"{name}_{self._count}"

    def define(self, name: str, body: str, options: str = "") -> None:
        """Define the rule with a reserved name."""
        self._lines.append(f"{name}{options}: {body}")

    def other(self, lark: str) -> str:
        """Add a further grammar in Lark and return the expression that refers to it."""
        name = f"g{len(self._others) + 1}"
        self._others.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def text(self, start: str) -> str:
        """Return the whole grammar; ``start`` is the expression that the output must match."""
        lark = "\n".join([f"start: {start}", *self._lines])
        if not self._others:
            return f"%llguidance {{}}\n{lark}\n"
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, *self._others]})
