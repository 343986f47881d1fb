"""Grammars of structured answers: from a client's constraint to a rule."""

from __future__ import annotations

from coordinator.grammar import lark, structural_tag
from coordinator.grammar.errors import refuse
from coordinator.grammar.expressions import ANY_OBJECT, as_lark, json_value, parsed
from coordinator.requests.spec import Constraint


def answer(grammar: lark.Grammar, constraint: Constraint, vocabulary: lark.Vocabulary) -> str:
    """Add the rules for ``constraint`` to ``grammar`` and return the expression of the answer. Raises GrammarError."""
    value = constraint.value
    match constraint.kind:
        case "json":
            return grammar.rule("json", json_value(ANY_OBJECT, constraint.whitespace))
        case "json_schema":
            closed = constraint.closed or constraint.strict
            return grammar.rule("json", json_value(parsed(value), constraint.whitespace, closed=closed))
        case "regex":
            assert isinstance(value, str)
            return grammar.rule("REGEX", lark.regex(value))
        case "choice":
            assert isinstance(value, list)
            return grammar.rule("CHOICE", " | ".join(map(lark.literal, dict.fromkeys(value))))
        case "lark":
            assert isinstance(value, str)
            return grammar.other(as_lark(value))
        case "structural_tag":
            tag = parsed(value)
            if not isinstance(tag, dict):
                refuse("must be an object.", "", "invalid_type")
            return structural_tag.answer(grammar, tag, vocabulary, constraint.whitespace)
