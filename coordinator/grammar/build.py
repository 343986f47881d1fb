"""From a task to the text of its grammar."""

from __future__ import annotations

from coordinator.grammar import lark
from coordinator.grammar.answers import answer
from coordinator.grammar.errors import TOO_COMPLEX, refuse
from coordinator.grammar.task import Task
from coordinator.requests.spec import Constraint

MAX_GRAMMAR = 1 << 18
"""Maximum characters of a grammar."""


def build(task: Task, vocabulary: lark.Vocabulary) -> str:
    """Return the grammar that the whole output of ``task`` must match. Raises GrammarError."""
    grammar = lark.Grammar()
    given = task.answer
    assert given is not None
    constraint = Constraint(
        kind=given.kind,
        value=given.value,
        param="",
        strict=given.strict,
        whitespace=given.whitespace,
        closed=given.closed,
    )
    text = grammar.text(answer(grammar, constraint, vocabulary))
    if len(text) > MAX_GRAMMAR:
        refuse(f"makes a grammar of {len(text):,} characters; at most {MAX_GRAMMAR:,} are allowed.", "", TOO_COMPLEX)
    return text
