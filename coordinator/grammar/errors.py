"""The error of a constraint that cannot be obeyed, independent of the request's field that holds it."""

from __future__ import annotations

from typing import NoReturn

TOO_COMPLEX = "grammar_too_complex"
"""Error code of constraints that take too much time or memory."""
UNSUPPORTED = "unsupported"
MALFORMED = frozenset({"invalid_type", "invalid_value"})
"""Error codes of constraints that no server could obey."""
CROWDED_OUT = "crowded_out"
"""Code of the verdict on a constraint that took long while many others did. It is no property of the constraint."""


class GrammarError(Exception):
    """A constraint that cannot be obeyed. ``path`` leads from the constraint's field to the culprit, such as
    ``.properties.a.pattern`` or ``[3]``, "" for the field itself. ``text`` is a predicate whose subject is the culprit,
    such as "must be a string.". ``subject``: the index of the tool whose parameters the path belongs to, None for the
    constraint of the answer."""

    def __init__(self, text: str, path: str = "", code: str = "invalid_value", subject: int | None = None) -> None:
        super().__init__(text)
        self.text, self.path, self.code, self.subject = text, path, code, subject


def refuse(text: str, path: str = "", code: str = "invalid_value") -> NoReturn:
    """Raise GrammarError."""
    raise GrammarError(text, path, code)


def unsupported(text: str, path: str = "") -> NoReturn:
    """Raise GrammarError for something well-formed that this server cannot obey."""
    raise GrammarError(text, path, UNSUPPORTED)
