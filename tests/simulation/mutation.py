"""What a known bug is, and symptoms that many share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Mutation(NamedTuple):
    """Replaces ``target.name`` by ``bug``; the complaint must contain one of ``symptoms``."""

    what: str
    target: Any
    name: str
    bug: Any
    symptoms: tuple[str, ...]


WRONG_TOKENS = "is not the beginning of"
NO_FIRST_TOKEN, NO_NEXT_TOKEN = "s for the first token", "s for the next token"
