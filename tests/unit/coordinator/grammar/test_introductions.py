"""Calls that begin behind another marker than the first, and lists that say that no tool is called."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.grammar.task import Task
from coordinator.output.formats import TOOL_FORMATS
from tests.unit.coordinator.grammar.families import model_with
from tests.unit.coordinator.grammar.matching import Model
from tests.unit.coordinator.grammar.test_tool_calls import STRICT_TOOLS, family, tools_of
from tests.unit.coordinator.output.reading import Read, parser_of
from tests.unit.coordinator.output.reading import read as read_tokens

STOP: list[tuple[str, Any]] = [("stop", {})]


def auto(name: str, **options: Any) -> Task:
    return Task(tools=tools_of(STRICT_TOOLS, strict=True), tool_format=TOOL_FORMATS[name], **options)


def read(name: str, model: Model, text: str, control: tuple[str, ...] = ()) -> Read:
    """Return what the parser of the family reads in ``text``, with its control tokens as tokens."""
    pieces = [
        (model.tokenizer.decode_str([piece]), True) if isinstance(piece, int) else (piece, False)
        for piece in model.vocabulary.split(text)
    ]
    return read_tokens(parser_of(name, known=STRICT_TOOLS, tokens=frozenset(control)), pieces)


LIGHT = "<function=set_light>\n<parameter=room>\nhall\n</parameter>\n<parameter=level>\n7\n</parameter>\n</function>"


@pytest.mark.parametrize("control", [(), ("<tool_call>", "</tool_call>")], ids=["text", "control"])
@pytest.mark.parametrize("name", ["qwen3_coder", "qwen3_xml"])
def test_a_call_without_its_first_marker_is_obeyed(name: str, control: tuple[str, ...]) -> None:
    model = model_with(control)
    grammar = model.grammar(auto(name))
    for good in (
        LIGHT,
        f"I do. {LIGHT}",
        f"{LIGHT}\n</tool_call>",
        f"{LIGHT}\n</tool_call>\n<tool_call>\n{LIGHT}\n</tool_call>",
    ):
        assert model.accepts(grammar, good), good
        found = read(name, model, good, control)
        assert [arguments for _, arguments in found.named] == [{"room": "hall", "level": 7}] * good.count("set_light")
    for bad in (LIGHT.replace("hall", "cellar"), LIGHT.replace("7", "x"), "<function=other>", "<function= and text"):
        assert not model.begins(grammar, bad), bad


def test_a_first_marker_in_free_text_still_begins_a_call() -> None:
    model = model_with(("<tool_call>", "</tool_call>"))
    grammar = model.grammar(auto("qwen3_coder"))
    assert model.begins(grammar, f"So: <tool_call>\n{LIGHT}\n</tool_call>")
    assert not model.begins(grammar, "<tool_call> and text")
    spelled = [token for letter in "<tool_call> is a tag" for token in model.tokenizer.tokenize_str(letter)]
    assert model.matcher(grammar).try_consume_tokens(spelled) == len(spelled)


@pytest.mark.parametrize("name", ["directly_answer", "directly-answer"])
def test_a_list_that_names_no_tool_is_content(name: str) -> None:
    model = family("command_r")
    text = f'Action: ```json\n[\n    {{\n        "tool_name": "{name}",\n        "parameters": {{}}\n    }}\n]\n```'
    grammar = model.grammar(auto("command_r"))
    assert model.accepts(grammar, text) and model.accepts(grammar, text.replace(name, "stop"))
    assert not model.begins(grammar, text.replace(name, "other"))
    assert read("command_r", model, text) == Read(text)
    assert read("command_r", model, text.replace(name, "stop")).named == STOP
    assert not model.begins(model.grammar(auto("command_r", forced=True)), text)


def test_a_tool_of_that_name_is_a_tool() -> None:
    text = 'Action: ```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```'
    known: list[dict[str, object]] = [{"function": {"name": "directly_answer", "parameters": {}}}]
    assert read_tokens(parser_of("command_r", known=known), [(text, False)]).named == [("directly_answer", {})]


def test_a_word_alone_begins_no_call() -> None:
    model = family("phi4_mini_json")
    grammar = model.grammar(auto("phi4_mini_json"))
    text = "Import functools first, then functools [or not]."
    assert model.accepts(grammar, text) and read("phi4_mini_json", model, text) == Read(text)
    call = 'functools[{"name": "stop", "arguments": {}}]'
    assert model.accepts(grammar, call) and read("phi4_mini_json", model, call).named == STOP
    assert not model.begins(grammar, "functools[or")
