"""Whatever output the grammar of strict tools accepts, the parser reads no call in it that violates its tool's schema.

Outputs are put together from markers, calls and parts of them, valid and invalid, as tokens and spelled by other
tokens. Of each piece the grammar takes what it accepts.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.grammar.errors import UNSUPPORTED
from coordinator.grammar.task import Answer, Task
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from coordinator.output.introductions import introductions
from tests.unit.coordinator.grammar.families import model_with
from tests.unit.coordinator.grammar.matching import Model
from tests.unit.coordinator.grammar.test_tool_calls import HARMONY, tools_of
from tests.unit.coordinator.output.reading import parser_of, read
from tests.unit.coordinator.output.test_notations import written
from tests.unit.coordinator.output.transcripts import TRANSCRIPTS

TOOLS: list[dict[str, Any]] = [
    {
        "function": {
            "name": "set",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "maximum": 9}},
                "required": ["n"],
                "additionalProperties": False,
            },
        }
    },
    {"function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
]
VALIDATORS = {
    each["function"]["name"]: jsonschema.Draft202012Validator(each["function"]["parameters"]) for each in TOOLS
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("set", {"n": 3}),
    ("stop", {}),
    ("set", {"n": "x"}),
    ("set", {"n": 77}),
    ("set", {"n": 3, "m": 1}),
    ("other", {"n": 3}),
]
TEXTS = ("So: ", " ", "\n", "functools", "<", "[", '{"', '{"name": "set"', "\n\n```json\n", "}", "]", "a")
ANSWER = Answer("json_schema", {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]})
MOST_TOKENS = 120


@dataclass(frozen=True)
class Case:
    """A family with a tokenizer, in which the texts ``control`` are control tokens."""

    tools: str
    reasoning: str
    thinking: bool
    most: int | None
    """Bound of the reasoning in tokens."""
    answers: bool
    """Whether the output may be JSON instead."""
    control: tuple[str, ...]

    @property
    def model(self) -> Model:
        return model_with(self.control)

    @functools.cached_property
    def grammar(self) -> str:
        """The grammar of an output that may call tools, "" if a bound cannot be obeyed."""
        reasoning = REASONING_FORMATS[self.reasoning] if self.reasoning else None
        form, tools = TOOL_FORMATS[self.tools], tools_of(TOOLS, strict=True)
        task = Task(
            ANSWER if self.answers else None,
            tools=tools,
            tool_format=form,
            reasoning=reasoning,
            thinking=self.thinking,
            max_reasoning_tokens=self.most,
        )
        made = self.model.verdict(task)
        assert not made.error or (made.code == UNSUPPORTED and self.most is not None), made.error
        return made.grammar

    @functools.cached_property
    def pieces(self) -> list[str]:
        """What outputs are put together from."""
        form, texts = TOOL_FORMATS[self.tools], [*TEXTS]
        wholes = [written(form, [call]) for call in CALLS] + [written(form, CALLS[:2]), written(form, CALLS[2:4])]
        for each in introductions(form):
            marker = each.marker.removesuffix("[") if each.bracket else each.marker
            texts += [each.marker, marker, f"{marker} ", f"{marker}\n["]
            for whole in wholes:
                behind = whole[whole.index(marker) :] if marker in whole else marker + _behind_markers(form, whole)
                texts += [behind, f"So: {behind}", behind.replace("[", "", 1), behind[: len(behind) * 2 // 3]]
        texts += [
            *wholes,
            *form.closing,
            '{"type": "function", "name": "set", "parameters": {"n": "x"}}',
        ]
        if self.answers:  # in a string, in which markers are no markers
            texts += ['{"x": "' + text.replace("\n", "").replace('"', "") for text in texts]
        if self.reasoning:
            reasoning = REASONING_FORMATS[self.reasoning]
            texts += [reasoning.begin, reasoning.end, *reasoning.around_content] * 8
        return [text for text in texts if text]

    def ids(self, text: str, spelled: bool) -> list[int]:
        """Return tokens of ``text``; ``spelled``: without control tokens."""
        if not spelled:
            return self.model.ids(text)
        return [token for letter in text for token in self.model.tokenizer.tokenize_str(letter)]

    def pushed(self, ids: list[int]) -> Iterator[tuple[str, bool]]:
        """Yield the texts of tokens, with whether they are control tokens; other text in single characters."""
        control = set(self.model.vocabulary.split("".join(self.control)))
        for special, run in groupby(ids, control.__contains__):
            if special:
                yield from ((self.model.tokenizer.decode_str([token]), True) for token in run)
            else:
                yield from ((letter, False) for letter in self.model.tokenizer.decode_str(list(run)))


def _behind_markers(form: ToolFormat, whole: str) -> str:
    """Return the calls of ``whole`` without what introduces them."""
    first = introductions(form)[: len(form.opening)]
    return whole[len(first[-1].marker) - first[-1].bracket + whole.index(first[-1].marker) :] if first else whole


def _cases() -> Iterator[Case]:
    for name, form in TOOL_FORMATS.items():
        mine = [each for each in TRANSCRIPTS if each.tools == name]
        control = next((each.control for each in mine if each.control), ())
        markers = [re.sub(r"(?<=>).*", "", each.marker) for each in introductions(form)]  # one token each
        kinds = {(), control, tuple(markers[:1]), tuple(markers[1:])} if name != "openai" else {HARMONY}
        for kind in sorted(kinds):
            own = next((each.reasoning for each in mine if each.reasoning), "granite_tags")
            for reasoning in dict.fromkeys(("harmony",) if name == "openai" else ("", own, "mistral")):
                tags = REASONING_FORMATS[reasoning] if reasoning and name != "openai" else None
                tokens = (tags.begin, tags.end) if tags and kind else ()
                words = tuple(dict.fromkeys((*kind, *tokens)))
                yield Case(name, reasoning, False, None, True, words)
                for thinking, most in product((False, True), (None, 3)) if reasoning else ((False, None),):
                    yield Case(name, reasoning, thinking, most, False, words)


CASES = list(_cases())


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_no_call_that_is_read_violates_its_schema(tools: str, data: st.DataObject) -> None:
    case = data.draw(st.sampled_from([each for each in CASES if each.tools == tools]))
    if not case.grammar:
        return
    state, ids, rng = case.model.matcher(case.grammar), list[int](), random.Random(data.draw(st.integers(0, 999)))
    for piece, spelled in data.draw(st.lists(st.tuples(st.sampled_from(case.pieces), st.booleans()), max_size=5)):
        wanted = case.ids(piece, spelled)
        taken = state.try_consume_tokens(wanted)
        ids += wanted[:taken]
    closing = {case.model.ids(text)[0] for text in '"}],:<)\n'}
    while not state.is_accepting() and len(ids) < MOST_TOKENS:
        options = case.model.allowed(state)
        token = rng.choice(sorted(options & closing if options & closing and rng.random() < 0.7 else options))
        assert state.consume_token(token)
        ids.append(token)
    if not state.is_accepting():
        return
    parser = parser_of(
        tools,
        case.reasoning,
        thinking=case.thinking,
        known=TOOLS,
        tokens=frozenset(case.control),
        calls_first=case.answers,
    )
    for name, arguments in read(parser, case.pushed(ids)).named:
        assert name in VALIDATORS, (name, case.model.tokenizer.decode_str(ids))
        assert VALIDATORS[name].is_valid(arguments), (arguments, case.model.tokenizer.decode_str(ids))
