"""From a task to the text of its grammar."""

from __future__ import annotations

from common.core.request import MAX_GRAMMAR
from coordinator.grammar import lark
from coordinator.grammar.errors import TOO_COMPLEX, GrammarError
from coordinator.grammar.outputs import Output
from coordinator.grammar.task import Task
from coordinator.grammar.tool_calls import Detail

LeftOut = tuple[tuple[int, str], ...]
"""(index of a tool, path) of what of the schemas of tools is not obeyed."""


def build(task: Task, vocabulary: lark.Vocabulary) -> tuple[str, LeftOut]:
    """Return the grammar that the whole output of ``task`` must match, and what it does not obey. Raises GrammarError.

    If the schemas of many tools make it too long, less is obeyed of those of tools that are not strict."""
    levels: tuple[Detail, ...] = ("all", "names", "nothing") if task.tools else ("all",)
    text = ""
    for detail in levels:
        grammar = lark.Grammar()
        output = Output(grammar, vocabulary, task, detail=detail)
        text = grammar.text(output.start())
        if len(text) <= MAX_GRAMMAR:
            return text, output.left_out
    raise GrammarError(
        f"makes a grammar of {len(text):,} characters; at most {MAX_GRAMMAR:,} are allowed.", "", TOO_COMPLEX
    )
