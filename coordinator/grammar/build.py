"""From a task to the text of its grammar."""

from __future__ import annotations

from common.core.request import MAX_GRAMMAR
from coordinator.grammar import lark
from coordinator.grammar.errors import TOO_COMPLEX, refuse
from coordinator.grammar.outputs import Output
from coordinator.grammar.task import Task
from coordinator.grammar.tool_calls import Detail


def build(task: Task, vocabulary: lark.Vocabulary) -> str:
    """Return the grammar that the whole output of ``task`` must match. Raises GrammarError.

    If the schemas of many tools make it too long, less is obeyed of those of tools that are not strict."""
    levels: tuple[Detail, ...] = ("all", "names", "nothing") if task.tools else ("all",)
    text = ""
    for detail in levels:
        grammar = lark.Grammar()
        text = grammar.text(Output(grammar, vocabulary, task, detail=detail).start())
        if len(text) <= MAX_GRAMMAR:
            break
    else:
        refuse(f"makes a grammar of {len(text):,} characters; at most {MAX_GRAMMAR:,} are allowed.", "", TOO_COMPLEX)
    return text
