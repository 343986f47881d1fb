"""Outputs that spell a call by other tokens than those of its markers: a grammar allows them, and no call is read."""

from __future__ import annotations

import pytest

from coordinator.grammar.task import Task
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.unit.coordinator.grammar.families import model_with
from tests.unit.coordinator.grammar.test_tool_calls import HARMONY, tools_of
from tests.unit.coordinator.output.reading import parser_of, read
from tests.unit.coordinator.output.transcripts import TRANSCRIPTS, Transcript

MARKED = [
    each
    for each in TRANSCRIPTS
    if each.calls
    and not each.thinking
    and not TOOL_FORMATS[each.tools].leaves_out
    and any(token in marker for marker in TOOL_FORMATS[each.tools].opening[:1] for token in each.control)
]


@pytest.mark.parametrize("transcript", MARKED, ids=lambda each: f"{each.tools}-{each.text[:20]}")
def test_a_call_that_ordinary_tokens_spell_is_free_text_in_both(transcript: Transcript) -> None:
    control = HARMONY if transcript.tools == "openai" else transcript.control
    model = model_with(control)
    task = Task(
        tools=tools_of(strict=True),
        tool_format=TOOL_FORMATS[transcript.tools],
        reasoning=REASONING_FORMATS.get(transcript.reasoning),
    )
    ids = [token for letter in transcript.text for token in model.tokenizer.tokenize_str(letter)]
    allowed = model.matcher(model.grammar(task)).try_consume_tokens(ids) == len(ids)
    assert allowed or transcript.tools == "openai", "free text is restricted"
    pieces = [(letter, False) for letter in transcript.text]
    assert not read(parser_of(transcript.tools, transcript.reasoning, tokens=frozenset(control)), pieces).calls
