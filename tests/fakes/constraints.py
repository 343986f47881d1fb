"""Constraints of outputs for simulated and real systems, and what it takes for a text to be whole."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from tests.fakes.checkpoint import EOS, tokenizer_json
from tests.fakes.constrained import matcher_of
from tests.fakes.oracle import VOCABULARY


@functools.cache
def vocabulary() -> LLTokenizer:
    """Return the vocabulary of a fake checkpoint with the token ids of the oracle engine."""
    return LLTokenizer(tokenizer_json(), n_vocab=VOCABULARY, eos_token=EOS)


LONGEST_TOKEN = 6
"""Letters of the longest token of words."""


def text_of(tokens: list[int]) -> str:
    return vocabulary().decode_str(tokens)


class Constraint(NamedTuple):
    """What an output must be. ``field`` and ``value``: one of ``structured_outputs`` over HTTP. ``is_whole`` says
    whether a text is complete; it is independent of llguidance."""

    field: str
    value: Any
    is_whole: Callable[[str], bool]

    @property
    def grammar(self) -> str:
        """The grammar for workers."""
        return _grammar(self.field, json.dumps(self.value))

    def object_to(self, tokens: list[int], grammar: str, *, ended: bool) -> str:
        """Return what is wrong with an output under ``grammar``, "" if it is a beginning of what is wanted. ``ended``:
        it ended by itself, so it must be whole."""
        if ended and (not tokens or tokens[-1] != EOS):
            return "ends without an end of sequence"
        text = tokens[:-1] if ended else tokens
        taken = matcher_of(grammar, vocabulary()).validate_tokens(text)
        if taken < len(text):
            return f"leaves its grammar after {taken} tokens"
        return f"is not whole: {text_of(text)!r}" if ended and not self._is_whole(text_of(text)) else ""

    def _is_whole(self, text: str) -> bool:
        try:
            return self.is_whole(text)
        except ValueError:  # no JSON
            return False


@functools.cache
def _grammar(field: str, value: str) -> str:
    if field == "json":
        return LLMatcher.grammar_from_json_schema(value, overrides={"whitespace_flexible": False})
    found = json.loads(value)
    return LLMatcher.grammar_from_regex(found if field == "regex" else "|".join(map(re.escape, found)))


def _matches(pattern: str) -> Constraint:
    return Constraint("regex", pattern, lambda text: re.fullmatch(pattern, text) is not None)


def _one_of(*texts: str) -> Constraint:
    return Constraint("choice", [*texts], lambda text: text in texts)


def _object(check: Callable[[Any], bool], **properties: Any) -> Constraint:
    """Return the constraint to an object with all of ``properties``; ``check`` is for the parsed object."""
    schema = {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip
    return Constraint("json", schema, lambda text: [*(found := json.loads(text))] == [*properties] and check(found))


def _list(items: Any, least: int, most: int) -> Constraint:
    schema = {"type": "array", "items": items, "minItems": least, "maxItems": most}
    return Constraint("json", schema, lambda text: least <= len(json.loads(text)) <= most)


NAMES = ("the first of the two, with a long name", "the second of the two")
SHORT = (
    _object(
        lambda it: len(it["description"]) <= 12 and it["name"] in NAMES and it["done"] in (True, False),
        description={"type": "string", "maxLength": 12},
        name={"enum": [*NAMES]},
        done={"type": "boolean"},
    ),
    _object(lambda it: it["text"] == NAMES[0] and 0 <= it["count"] <= 99, text={"const": NAMES[0]},
            count={"type": "integer", "minimum": 0, "maximum": 99}),
    _list({"type": "integer"}, 2, 8),
    _matches("(ab|cd|the quick ){2,6}-[0-9]{2,12}(;[a-f]+)*"),
    _one_of("the quick brown fox", "the quick brown dog", "a lazy dog", "a"),
)  # fmt: skip
"""Constraints whose outputs end after some tokens: some of them forced, or all but the first."""
_PAIR = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 6, "maxLength": 30}, "done": {"type": "boolean"}},
    "required": ["name", "done"],
    "additionalProperties": False,
}


def sentence(length: int) -> Constraint:
    """Return the constraint to an object with one string of ``length`` letters, so that nearly all tokens are
    sampled."""
    return _object(lambda it: len(it["text"]) == length, text={"type": "string", "pattern": f"^[a-z ]{{{length}}}$"})


LONG = (_list(_PAIR, 60, 60), sentence(800))
"""Constraints whose outputs have more than 125 tokens."""
