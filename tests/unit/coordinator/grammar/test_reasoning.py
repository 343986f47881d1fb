"""Reasoning before an answer: the grammar begins behind it, and a bound counts its tokens exactly."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.grammar.errors import UNSUPPORTED
from coordinator.grammar.task import Answer, Task, Tool
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.unit.coordinator.grammar.families import model_with
from tests.unit.coordinator.grammar.test_tool_calls import tools_of
from tests.unit.coordinator.output.transcripts import TRANSCRIPTS, Transcript

THINK = ("<think>", "</think>")
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
QWEN = REASONING_FORMATS["qwen3"]
X = Answer("json_schema", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, True)


def task(**options: Any) -> Task:
    return Task(**{"answer": X, "reasoning": QWEN, **options})


@pytest.mark.parametrize("control", [THINK, ()], ids=["control", "text"])
@pytest.mark.parametrize(
    ("thinking", "text", "fits"),
    [
        (False, '{"x": 1}', True),
        (False, '<think>It is {"x": 0} or <b>.</think>\n\n{"x": 1}', True),
        (False, '<think></think>{"x": 1}', True),
        (False, '<think>so</think>{"y": 1}', False),
        (False, "<think>so", False),
        (False, 'so</think>{"x": 1}', False),
        (True, 'so</think>\n\n{"x": 1}', True),
        (True, '</think>{"x": 1}', True),
        (True, '{"x": 1}', False),
        (True, "so</think>other", False),
    ],
)
def test_the_answer_is_constrained_behind_reasoning(
    control: tuple[str, ...], thinking: bool, text: str, fits: bool
) -> None:
    model = model_with(control)
    assert model.accepts(model.grammar(task(thinking=thinking)), text) == fits


@pytest.mark.parametrize(
    "transcript", [each for each in TRANSCRIPTS if each.reasoning], ids=lambda each: each.text[:30]
)
def test_a_bound_changes_nothing_of_what_a_family_writes(transcript: Transcript) -> None:
    """Reasoning that ends with text too, in front of tool calls."""
    model, form = model_with(()), REASONING_FORMATS[transcript.reasoning]
    if form.style == "channels" or form.anywhere:
        return
    options: dict[str, Any] = {"reasoning": form, "thinking": transcript.thinking}
    made = Task(tools=tools_of(), tool_format=TOOL_FORMATS[transcript.tools], **options)
    grammar, bounded = model.grammar(made), model.grammar(msgspec.structs.replace(made, max_reasoning_tokens=40))
    assert model.accepts(bounded, transcript.text) == model.accepts(grammar, transcript.text)


@pytest.mark.parametrize("answer", [X, None], ids=["json", "free"])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("most", [0, 1, 5, 700])
def test_a_bound_counts_the_tokens_of_reasoning_exactly(answer: Answer | None, thinking: bool, most: int) -> None:
    model = model_with(THINK)
    (opened, closed), ends = (model.ids(text)[0] for text in THINK), set(model.tokenizer.eos_tokens)
    state = model.matcher(model.grammar(task(answer=answer, thinking=thinking, max_reasoning_tokens=most)))
    if not thinking:
        assert state.consume_token(opened)
    word = model.ids(" a")[0]
    for _ in range(most):
        assert {word, closed} <= model.allowed(state) and not model.allowed(state) & ends
        assert state.consume_token(word)
    assert model.allowed(state) == {closed}
    assert state.consume_token(closed)
    assert opened not in model.allowed(state)
    assert (word in model.allowed(state)) == (answer is None)


def test_free_text_without_reasoning_stays_free() -> None:
    model = model_with(THINK)
    grammar = model.grammar(task(answer=None, max_reasoning_tokens=3))
    for text in ("", "Hello <there> {", "\n\n<think>a b</think> and <more>", "<think></think>"):
        assert model.accepts(grammar, text), text
    assert not model.begins(grammar, "<think>one two three four five six seven")


@pytest.mark.parametrize("name", ["qwen3", "granite", "mistral", "seed_oss", "cohere_command3", "gemma4"])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("most", [0, 1, 2, 9, 300])
def test_a_bound_where_the_end_is_text_forces_the_whole_marker(name: str, thinking: bool, most: int) -> None:
    model, form = model_with(()), REASONING_FORMATS[name]
    end, word = form.end.strip(), model.ids(" a")[0]
    state = model.matcher(model.grammar(task(reasoning=form, thinking=thinking, max_reasoning_tokens=most)))
    if not thinking:
        assert state.consume_tokens(model.ids(form.begin.strip()))
    taken = 0
    while word in model.allowed(state) and taken <= most:
        assert state.consume_token(word)
        taken += 1
    assert taken == (0 if most == 1 and thinking else most)
    forced = state.compute_ff_tokens()
    assert model.tokenizer.decode_str(forced).startswith(end)


def test_a_marker_that_has_begun_at_the_bound_is_continued() -> None:
    model = model_with(())
    begun = model.ids("</th")
    state = model.matcher(model.grammar(task(thinking=True, max_reasoning_tokens=len(begun))))
    assert state.consume_tokens(begun)
    assert model.tokenizer.decode_str(state.compute_ff_tokens()).startswith("ink>")


@pytest.mark.parametrize("most", [None, 50])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('so</think>{"x": 1}', True),
        ('</think>\n\n{"x": 1}', True),
        ('<</</think>{"x": 1}', True),
        ('<</th<</think>{"x": 1}', True),
        ('a</think>{"x": ""}', False),
        ('</think></think>{"x": 1}', False),
        ('{"x": 1}', False),
    ],
)
def test_a_bound_where_the_end_is_text_changes_nothing_within_it(most: int | None, text: str, fits: bool) -> None:
    model = model_with(())
    grammar = model.grammar(task(thinking=True, max_reasoning_tokens=most))
    assert model.accepts(grammar, text) == fits


def test_a_bound_on_analysis_needs_its_tokens() -> None:
    harmony = REASONING_FORMATS["harmony"]
    assert model_with(()).verdict(task(reasoning=harmony, max_reasoning_tokens=5)).code == UNSUPPORTED


TOOLS = (Tool("f", {"type": "object", "properties": {}, "additionalProperties": False}),)


def test_tool_calls_behind_reasoning() -> None:
    model = model_with((*THINK, "<tool_call>", "</tool_call>"))
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for forced in (False, True):
        made = task(answer=None, tools=TOOLS, tool_format=TOOL_FORMATS["hermes"], forced=forced, thinking=True)
        grammar = model.grammar(made)
        assert model.accepts(grammar, f"the tool <tool_cal\n</think>\n\n{call}")
        assert model.accepts(grammar, "so</think>\n\nHello.") == (not forced)
        assert not model.begins(grammar, "so</think>\n\n<tool_call>x")


def test_a_call_may_end_reasoning_where_the_family_does_that() -> None:
    kimi = TOOL_FORMATS["kimi_k2"]
    control = (*THINK, *kimi.section, kimi.begin, kimi.after_name, kimi.end)
    model = model_with(control)
    made = task(answer=None, reasoning=REASONING_FORMATS["kimi_k2"], tools=TOOLS, tool_format=kimi, thinking=True)
    call = f"{kimi.section[0]}{kimi.begin}functions.f:0{kimi.after_name}{{}}{kimi.end}{kimi.section[1]}"
    grammar = model.grammar(made)
    assert model.accepts(grammar, f"so{call}") and model.accepts(grammar, f"so</think>{call}")
    assert not model.begins(grammar, f"so{kimi.section[0]}x")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('<|channel|>final<|message|>{"x": 1}', True),
        ('<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>{"x": 1}', True),
        ('<|channel|>final <|constrain|>json<|message|>{"x": 1}', True),
        ("<|channel|>final<|message|>Hello", False),
        ('{"x": 1}', False),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", True),
        (" to=functions.f<|channel|>commentary json<|message|>{}", True),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', False),
        ("<|channel|>commentary to=functions.g", False),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f", None),
    ],
)
def test_channels(text: str, fits: bool | None) -> None:
    model = model_with(HARMONY)
    form = REASONING_FORMATS["harmony"]
    grammar = model.grammar(task(reasoning=form, tools=TOOLS, tool_format=TOOL_FORMATS["openai"]))
    if fits is None:
        assert model.begins(grammar, text)
    else:
        assert model.accepts(grammar, text) == fits


def test_a_bound_on_analysis() -> None:
    model = model_with(HARMONY)
    grammar = model.grammar(task(answer=None, reasoning=REASONING_FORMATS["harmony"], max_reasoning_tokens=2))
    head, end = "<|channel|>analysis<|message|>", model.ids("<|end|>")[0]
    state = model.matcher(grammar)
    assert state.consume_tokens([*model.ids(head), *model.ids(" a")[:1], *model.ids(" a")[:1]])
    assert model.allowed(state) == {end}
    twice = f"{head}a<|end|><|start|>assistant"
    assert model.begins(grammar, twice) and not model.begins(grammar, f"{twice}<|channel|>analysis")
