"""Outputs of every family, cut at every place."""

from __future__ import annotations

import pytest

from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.unit.coordinator.output.oracle import calls_in
from tests.unit.coordinator.output.reading import Read, cuts, parser_of, read
from tests.unit.coordinator.output.transcript import Transcript
from tests.unit.coordinator.output.transcripts import TRANSCRIPTS

SAME = {"qwen3_xml": "qwen3_coder", "deepseek_v4": "deepseek_v32"}
"""Formats that differ from another one in their name and the text around their calls."""


def _named(transcript: Transcript) -> str:
    return f"{transcript.tools}-{transcript.text[:24]}"


def test_every_format_has_a_transcript() -> None:
    assert {each.tools for each in TRANSCRIPTS} == set(TOOL_FORMATS) - set(SAME)
    assert {each.reasoning for each in TRANSCRIPTS if each.thought} | {""} >= set(REASONING_FORMATS) - {"deepseek_r1"}


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=_named)
@pytest.mark.parametrize("control", [False, True], ids=["text", "control"])
def test_every_cut_gives_the_same_reading(transcript: Transcript, control: bool) -> None:
    wanted: Read | None = None
    for tokens in cuts(transcript.text, transcript.control if control else ()):
        parser = parser_of(transcript.tools, transcript.reasoning, thinking=transcript.thinking)
        found = read(parser, tokens)
        wanted = wanted or found
        assert found == wanted
    assert wanted is not None
    assert (wanted.content, wanted.reasoning, wanted.named) == (
        transcript.content,
        transcript.thought,
        transcript.calls,
    )


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=_named)
def test_a_second_implementation_finds_the_same_calls(transcript: Transcript) -> None:
    assert calls_in(transcript.tools, transcript.text) == transcript.calls


@pytest.mark.parametrize("transcript", [each for each in TRANSCRIPTS if each.tools != "openai"], ids=_named)
def test_without_tools_calls_are_content(transcript: Transcript) -> None:
    wanted: Read | None = None
    for tokens in cuts(transcript.text):
        parser = parser_of(transcript.tools, thinking=False, parse_tools=False)
        found = read(parser, tokens)
        wanted = wanted or found
        assert found == wanted == Read(transcript.text)


def test_without_tools_a_message_to_a_function_is_content() -> None:
    text = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
    for tokens in cuts(text):
        assert read(parser_of("openai", "harmony", parse_tools=False), tokens) == Read('{"a": 1}')


def test_identifiers_that_the_model_writes_are_kept() -> None:
    transcript = next(each for each in TRANSCRIPTS if each.tools == "kimi_k2")
    done = read(parser_of("kimi_k2", "kimi_k2"), [(transcript.text, False)])
    assert [call_id for call_id, _, _ in done.calls] == ["functions.get_weather:0", "functions.now:1"]
    for written, name in (("a:b:2", "a:b"), ("now", "now"), ("now:x", "now")):
        text = f"<|tool_call_begin|>functions.{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        assert read(parser_of("kimi_k2"), [(text, False)]).named == [(name, {})]
