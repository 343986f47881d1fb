"""Any text in any pieces: nothing raises, nothing is lost, and each piece costs what its length costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS
from coordinator.output.harmony import MARKERS
from tests.unit.coordinator.output.reading import (
    JSON_LINES,
    Read,
    add_up,
    cuts,
    parser_for,
    parser_of,
    random_cuts,
    read,
)
from tests.unit.coordinator.output.transcripts import TRANSCRIPTS

PAIRS = sorted({(each.tools, each.reasoning) for each in TRANSCRIPTS})
LONGEST_MARKER = 48
"""Characters of the longest marker of all formats."""


def _markers(tools: str, reasoning: str) -> list[str]:
    format = TOOL_FORMATS[tools]
    thought = REASONING_FORMATS[reasoning] if reasoning else None
    texts = [*format.opening, *format.also, *MARKERS]
    return texts if thought is None else [*texts, thought.begin, *thought.around_content]


@pytest.mark.parametrize(("tools", "reasoning"), PAIRS)
@settings(max_examples=20, deadline=None)
@given(parts=st.lists(st.text("<|>[]{}()\"' \n:,_/toalcs▁｜nw", max_size=8), max_size=8), seed=st.integers(0, 99))
def test_text_without_markers_is_content(tools: str, reasoning: str, parts: list[str], seed: int) -> None:
    markers = _markers(tools, reasoning)
    text = "".join(part + markers[(seed + number) % len(markers)][: len(part)] for number, part in enumerate(parts))
    if any(marker in text for marker in markers):
        return
    assert read(parser_of(tools, reasoning), random_cuts(text, seed)) == Read(text)


@pytest.mark.parametrize(("tools", "reasoning"), PAIRS)
def test_content_is_withheld_only_while_it_may_become_a_marker(tools: str, reasoning: str) -> None:
    parser, pushed, shown = parser_of(tools, reasoning), "", ""
    for text in ("Hello", " you", ", see 3 < 4 <", "b> or {x} [y] |", "\n", "\n", "and so on.", " x"):
        pushed += text
        shown += parser.push(text).content
        assert pushed.startswith(shown)
        assert len(pushed.rstrip()) - len(shown.rstrip()) < LONGEST_MARKER
    assert pushed.rstrip() == shown.rstrip()
    assert shown + parser.finish().content == pushed


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda each: f"{each.tools}-{each.text[:24]}")
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_damaged_output_never_raises_and_reads_the_same_in_all_cuts(transcript: Any, data: st.DataObject) -> None:
    text = transcript.text
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, min(len(text), begin + 12)))
        text = (
            text[:begin]
            + data.draw(st.sampled_from(["", "", text[begin:end] * 2, "{", "}", '"', "\\", ">", " x "]))
            + text[end:]
        )
    wanted: Read | None = None
    for tokens in ([(text, False)], [(char, False) for char in text], random_cuts(text, 1), random_cuts(text, 2)):
        parser = parser_of(transcript.tools, transcript.reasoning, thinking=transcript.thinking)
        found = read(parser, tokens)
        wanted = wanted or found
        assert found == wanted


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda each: f"{each.tools}-{each.text[:24]}")
def test_an_output_may_end_anywhere(transcript: Any) -> None:
    for length in range(len(transcript.text)):
        for tokens in ([(transcript.text[:length], False)], random_cuts(transcript.text[:length], length)):
            read(parser_of(transcript.tools, transcript.reasoning, thinking=transcript.thinking), tokens)


LONG: dict[str, tuple[str, Callable[[int], str]]] = {
    "content": ("hermes", lambda size: "word < " * size),
    "whitespace": ("hermes", lambda size: "x" + "\n " * size),
    "reasoning": ("hermes", lambda size: "<think>" + "hm </th " * size),
    "string": ("hermes", lambda size: '<tool_call>{"name": "f", "arguments": {"a": "' + 'a\\n"'[:3] * size),
    "numbers": ("hermes", lambda size: '<tool_call>{"name": "f", "arguments": {"a": [' + "1, " * size),
    "one number": ("hermes", lambda size: '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * size),
    "depth": ("hermes", lambda size: '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * size),
    "gaps": ("hermes", lambda size: '<tool_call>{"name": "f", "arguments": {' + " " * size),
    "no name": ("hermes", lambda size: '<tool_call>{"other": "' + "abc " * size),
    "broken": ("hermes", lambda size: '<tool_call>{"name": "f", "arguments": {]' + "</tool " * size),
    "many calls": ("hermes", lambda size: '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n' * (size // 8)),
    "no call": ("llama3_json", lambda size: '{"name": "' + "x" * size),
    "tagged string": ("qwen3_coder", lambda size: "<function=get_weather><parameter=city>\n" + "a\n" * size),
    "tagged object": ("qwen3_coder", lambda size: "<function=get_weather><parameter=where>\n" + "{a\n" * size),
    "long key": ("glm45", lambda size: "<tool_call>f\n<arg_key>" + "k" * size),
    "python string": ("llama4_pythonic", lambda size: "[get_weather(city='" + 'a"\\x41' * size),
    "quoted": ("gemma4", lambda size: '<|tool_call>call:f{a:<|"|>' + 'b<|"' * size),
    "long name": ("mistral", lambda size: "[TOOL_CALLS]" + "n" * size),
    "message": ("openai", lambda size: "<|channel|>final<|message|>" + "word < " * size),
    "region": ("", lambda size: "word < " * size),
    "region of a call": ("", lambda size: '<do>{"name": "f", "arguments": {"a": "' + "b </d " * size),
    "header": ("openai", lambda size: "<|channel|>" + "word < " * size),
}


@pytest.mark.parametrize("case", LONG)
def test_the_work_for_a_token_does_not_depend_on_what_came_before(case: str) -> None:
    tools, text = LONG[case]
    few, many = (_lines(tools, text(size)) for size in (1000, 4000))
    assert many < 4.4 * few


def _lines(tools: str, text: str) -> int:
    """Return how many lines of Python the reading of ``text`` in tokens of four characters runs. Checks that the parser
    keeps no more than the beginning of a marker unread, so that no line searches more than that and a token."""
    count, unread = 0, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "coordinator/output" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    parser = parser_of(tools, "harmony" if tools == "openai" else "qwen3") if tools else parser_for(JSON_LINES)
    deltas, before = [], sys.gettrace()
    sys.settrace(trace)
    try:
        for at in range(0, len(text), 4):
            deltas.append(parser.push(text[at : at + 4]))
            unread = max(unread, len(parser._stream.text) - parser._stream.at)
        deltas.append(parser.finish())
    finally:
        sys.settrace(before)
    add_up(deltas)
    assert unread <= LONGEST_MARKER
    return count


def test_a_whole_output_at_once_costs_what_its_tokens_cost() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>\n' * 300
    found = read(parser_of("hermes"), [(text, False)])
    assert len(found.calls) == 300
    assert found == read(parser_of("hermes"), next(iter(cuts(text))))
