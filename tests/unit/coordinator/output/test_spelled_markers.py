"""Markers that are tokens of the tokenizer, and the same texts spelled by other tokens."""

from __future__ import annotations

import pytest

from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.unit.coordinator.output.reading import JSON_LINES, Read, cuts, parser_for, parser_of, random_cuts, read
from tests.unit.coordinator.output.transcript import Transcript
from tests.unit.coordinator.output.transcripts import TRANSCRIPTS

MARKED = [each for each in TRANSCRIPTS if each.control]
CALL = '{"name": "now", "arguments": {}}'


def _named(transcript: Transcript) -> str:
    return f"{transcript.tools}-{transcript.text[:24]}"


def _marks(transcript: Transcript, marker: str) -> bool:
    return any(token in marker for token in transcript.control)


@pytest.mark.parametrize("shown", [False, True], ids=["special", "added"])
@pytest.mark.parametrize("transcript", MARKED, ids=_named)
def test_markers_that_arrive_as_tokens_count(transcript: Transcript, shown: bool) -> None:
    """Those of the transcript as special tokens, or as added tokens that are not special."""
    for tokens in cuts(transcript.text, transcript.control):
        parser = parser_of(
            transcript.tools, transcript.reasoning, thinking=transcript.thinking, tokens=frozenset(transcript.control)
        )
        found = read(parser, [(text, special and not shown, special) for text, special in tokens])
        assert (found.reasoning, found.named) == (transcript.thought, transcript.calls)
        assert found.content == transcript.content or shown


@pytest.mark.parametrize("transcript", MARKED, ids=_named)
def test_markers_that_other_tokens_spell_are_text(transcript: Transcript) -> None:
    form, reasoning = TOOL_FORMATS[transcript.tools], REASONING_FORMATS.get(transcript.reasoning)
    marked = any(_marks(transcript, marker) for marker in form.opening[:1])
    if not marked and not transcript.text.startswith(form.also):
        pytest.skip("calls of this family need no marker")
    for tokens in cuts(transcript.text):
        parser = parser_of(transcript.tools, transcript.reasoning, tokens=frozenset(transcript.control))
        found = read(parser, tokens)
        assert not found.calls, "text became a call"
        if reasoning is not None and _marks(transcript, reasoning.begin):
            assert not found.reasoning and found.content == transcript.text


@pytest.mark.parametrize("transcript", [each for each in MARKED if each.thinking], ids=_named)
def test_reasoning_goes_on_where_its_end_is_only_spelled(transcript: Transcript) -> None:
    reasoning = REASONING_FORMATS[transcript.reasoning]
    if not _marks(transcript, reasoning.end):
        pytest.skip("its end is text")
    for tokens in cuts(transcript.text):
        parser = parser_of(transcript.tools, transcript.reasoning, thinking=True, tokens=frozenset(transcript.control))
        assert read(parser, tokens).reasoning.rstrip() == transcript.text.rstrip()


@pytest.mark.parametrize(
    ("tools", "tokens", "text"),
    [
        ("seed_oss", ("<seed:tool_call>", "</seed:tool_call>"), "So: <function=now>\n</function>"),
        ("minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>"), 'So: <invoke name="now">\n</invoke>'),
        ("phi4_mini", ("<|tool_call|>", "<|/tool_call|>"), f"functools[{CALL}]"),
        ("granite", ("<|tool_call|>",), f"<tool_call>[{CALL}]"),
    ],
)
def test_where_a_token_marks_calls_text_alone_does_not(tools: str, tokens: tuple[str, ...], text: str) -> None:
    """A grammar that begins at the token would not see the call."""
    for pieces in cuts(text):
        assert read(parser_of(tools, tokens=frozenset(tokens)), pieces) == Read(text)
    assert read(parser_of(tools), [(text, False)]).calls


def test_a_first_marker_that_models_leave_out_may_be_missing() -> None:
    tokens = frozenset(("<tool_call>", "</tool_call>"))
    text = "So: <function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
    for end in ("", "\n</tool_call>"):
        for pieces in cuts(text + end, ["</tool_call>"]):
            found = read(parser_of("qwen3_coder", tokens=tokens), pieces)
            assert (found.content, found.named) == ("So:", [("get_weather", {"city": "Paris"})])


def test_a_spelled_marker_before_a_real_one_hides_nothing() -> None:
    """Also in a value, and as the end of a call."""
    tokens = frozenset(("<tool_call>", "</tool_call>"))
    said, call = f"Write <tool_call>{CALL}</tool_call>: ", CALL.replace("{}", '{"a": "</tool_call>"}')
    for seed in range(20):
        pieces = [*random_cuts(said, seed), ("<tool_call>", True), *random_cuts(call, seed), ("</tool_call>", True)]
        found = read(parser_of("hermes", tokens=tokens), pieces)
        assert (found.content, found.named) == (said.rstrip(), [("now", {"a": "</tool_call>"})])


@pytest.mark.parametrize(
    ("tools", "reasoning"), [("granite", "granite_tags"), ("mistral", "mistral"), ("hermes", "qwen3")]
)
def test_markers_in_the_strings_of_a_constrained_answer_are_text(tools: str, reasoning: str) -> None:
    form, call = REASONING_FORMATS[reasoning], TOOL_FORMATS[tools].opening[0] + CALL
    text = f'{{"x": "{form.begin}so{form.end}{"".join(form.around_content[:1])}{call}"}}'
    for pieces in cuts(text):
        assert read(parser_of(tools, reasoning, calls_first=True), pieces) == Read(text)
    thought, end = f"{form.begin}so{form.end}", "".join(form.around_content[1:])
    for pieces in cuts(f"{thought}{text}{end}"):
        assert read(parser_of(tools, reasoning, calls_first=True), pieces) == Read(text, "so")


def test_the_end_of_a_value_counts_as_token() -> None:
    end, tokens = (
        "</arg_value>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )
    head = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
    tail = f"{end}\n</tool_call>"
    pieces = [
        *next(iter(cuts(head, tokens))),
        *((letter, False) for letter in f"a{end}b"),
        *next(iter(cuts(tail, tokens))),
    ]
    assert read(parser_of("glm45", tokens=frozenset(tokens)), pieces).named == [("get_weather", {"city": f"a{end}b"})]


def test_markers_of_a_response_template_too() -> None:
    tokens = frozenset(("<why>", "</why>", "<do>", "</do>"))
    text = f"<why>a</why><do>{CALL}</do>"
    for pieces in cuts(text):
        assert read(parser_for(JSON_LINES, tokens=tokens), pieces) == Read(text)
    found = read(parser_for(JSON_LINES, tokens=tokens), next(iter(cuts(text, sorted(tokens)))))
    assert (found.content, found.reasoning, found.named) == ("", "a", [("now", {})])


def test_a_channel_that_is_spelled_in_a_header_is_none() -> None:
    """The channel that the token begins decides."""
    control = ("<|channel|>", "<|message|>", "<|end|>")
    pieces = [
        ("<|channel|>", True),
        *((letter, False) for letter in "final <|channel|>analysis\x1fanalysis"),
        ("<|message|>", True),
        ("Hi", False),
    ]
    assert read(parser_of("openai", "harmony", tokens=frozenset(control)), pieces) == Read("Hi")
