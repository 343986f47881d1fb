"""From a task to the text of its grammar."""

from __future__ import annotations

from coordinator.grammar import lark
from coordinator.grammar.errors import TOO_COMPLEX, refuse
from coordinator.grammar.outputs import Output
from coordinator.grammar.task import Task

MAX_GRAMMAR = 1 << 18
"""Maximum characters of a grammar."""


def build(task: Task, vocabulary: lark.Vocabulary) -> str:
    """Return the grammar that the whole output of ``task`` must match. Raises GrammarError.

    If the schemas of many tools make it too long, the arguments of tools that are not strict may be any object."""
    text = _written(task, vocabulary, simple=False)
    if len(text) > MAX_GRAMMAR and task.tools:
        text = _written(task, vocabulary, simple=True)
    if len(text) > MAX_GRAMMAR:
        refuse(f"makes a grammar of {len(text):,} characters; at most {MAX_GRAMMAR:,} are allowed.", "", TOO_COMPLEX)
    return text


def _written(task: Task, vocabulary: lark.Vocabulary, *, simple: bool) -> str:
    grammar = lark.Grammar()
    return grammar.text(Output(grammar, vocabulary, task, simple=simple).start())
