"""Calls as ``<tool_call>{...}</tool_call>`` and reasoning between tags."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.output.reading import Read, cuts, parser_of, read

PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CASES = [
    ("Hello.", Read("Hello.")),
    ("  1 < 2 <tool\n ", Read("  1 < 2 <tool\n ")),
    (PARIS, Read(calls=[("call_0", "get_weather", '{"city": "Paris"}')])),
    (f"I look.\n\n{PARIS}", Read("I look.", calls=[("call_0", "get_weather", '{"city": "Paris"}')])),
    (
        f"<think>\nWhat is it?\n</think>\n\n{PARIS}\n{NOW}\n",
        Read("", "What is it?", [("call_0", "get_weather", '{"city": "Paris"}'), ("call_1", "now", "{}")]),
    ),
    ("<think>\n\n</think>\n\nYes", Read("Yes", "")),
    ("<think>so", Read("", "so")),
    ("the <think> tag", Read("the <think> tag")),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_every_cut_of_an_output_gives_the_same(text: str, expected: Read) -> None:
    for tokens in cuts(text):
        assert read(parser_of("hermes", "qwen3"), tokens) == expected


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    for tokens in cuts("Hm.\n</think>\n\nYes."):
        assert read(parser_of("hermes", "qwen3", thinking=True), tokens) == Read("Yes.", "Hm.")


def test_without_tools_a_call_is_content() -> None:
    for tokens in cuts(f"See:\n{PARIS}\n"):
        assert read(parser_of("hermes", "qwen3", parse_tools=False), tokens) == Read(f"See:\n{PARIS}\n")


def test_without_reasoning_its_tags_are_content() -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    for tokens in cuts(text):
        assert read(parser_of("hermes", "qwen3", parse_reasoning=False), tokens) == Read(text)


def test_a_control_token_that_is_no_marker_is_dropped() -> None:
    tokens = [("<|begin|>", True), ("Yes", False), ("</tool_call>", True), (".", False)]
    assert read(parser_of("hermes"), tokens) == Read("Yes.")
