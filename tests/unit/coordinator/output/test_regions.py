"""Formats from a tokenizer's response template. ``test_transformers_reads_the_same`` compares with transformers."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from coordinator.output.detection import detect
from coordinator.output.formats import TOOL_FORMATS, OutputFormat
from coordinator.output.region_notation import notation
from coordinator.output.regions import load
from tests.unit.coordinator.output.reading import JSON_LINES, TOOLS, Read, cuts, parser_for, read

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TAGS: dict[str, Any] = {
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open_pattern": r"(?:^|<why>\s*)", "close": "</why>"},
        "content": {"open": "<say>\n", "close_pattern": r"\n?</say>", "content_args": {"strip": False}},
        "tool_calls": {
            "open_pattern": r"<do>\s*<name=(?P<name>\w+)>",
            "close": "</do>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg=(?P<key>\w+)>\s*(?P<value>.*?)\s*</arg>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": NAMED,
        },
    },
}
LISTED: dict[str, Any] = {
    "start_anchor": "<bot>",
    "fields": {
        "content": {"open": "[say]", "close": "[/say]"},
        "tool_calls": {
            "open": "[do]",
            "close": "[/do]",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{with}"}},
        },
    },
}
QUOTED: dict[str, Any] = {
    "start_anchor": ["<bot>", "<back>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|do>call:(?P<name>\w+)",
            "close": "<do|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
CASES: list[tuple[dict[str, Any], str, Read]] = [
    (JSON_LINES, "Hello <b>.", Read("Hello <b>.")),
    (
        JSON_LINES,
        '<why>so\n</why>\n\nI look. <do>{"name": "get_weather", "arguments": {"city": "Paris"}}</do>'
        '<do>{"name": "now", "arguments": {}}</do><end>',
        Read("I look.", "so", [("call_0", "get_weather", '{"city": "Paris"}'), ("call_1", "now", "{}")]),
    ),
    (
        TAGS,
        "so</why><do>\n<name=get_weather><arg=city> 5 </arg><arg=days>3</arg></do> dropped",
        Read("", "so", [("call_0", "get_weather", '{"city": 5, "days": 3}')]),
    ),
    (TAGS, "so</why>\n<say>\n Hi </say>", Read(" Hi ", "so")),
    (LISTED, "x[say] Hi [/say]y", Read("Hi")),
    (
        LISTED,
        '[do][{"tool": "now", "with": {}}, {"tool": "get_weather", "with": {"city": "Rome"}}][/do]',
        Read(calls=[("call_0", "now", "{}"), ("call_1", "get_weather", '{"city": "Rome"}')]),
    ),
    (
        QUOTED,
        '<|channel>thought\nso<channel|>Ok<|do>call:get_weather{city:<|"|>L"A<|"|>,days:3}<do|><turn|>',
        Read("Ok", "so", [("call_0", "get_weather", '{"city": "L\\"A", "days": 3}')]),
    ),
]


@pytest.mark.parametrize(("template", "text", "expected"), CASES)
@pytest.mark.parametrize("control", [(), ("<why>", "</why>", "<do>", "</do>", '<|"|>', "<turn|>", "<end>")])
def test_every_cut_gives_the_same_reading(
    template: dict[str, Any], text: str, expected: Read, control: tuple[str, ...]
) -> None:
    for tokens in cuts(text, control):
        assert read(parser_for(template), tokens) == expected


@pytest.mark.torch
@pytest.mark.parametrize(("template", "text", "expected"), CASES)
def test_transformers_reads_the_same(template: dict[str, Any], text: str, expected: Read) -> None:
    from transformers.utils.chat_parsing import parse_response

    message = parse_response(text, template, prefix="", tools=TOOLS)
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", [])]
    assert calls == [(name, json.loads(arguments)) for _, name, arguments in expected.calls]
    assert message.get("content", "") == expected.content
    assert message.get("thinking", message.get("reasoning_content", "")) == expected.reasoning


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    assert read(parser_for(JSON_LINES, thinking=True), [("so</why> Yes", False)]) == Read("Yes", "so")
    regions = load(JSON_LINES)
    assert regions is not None
    assert regions.reasoning_opened("<bot>\n<why>\n") == 6
    assert regions.reasoning_opened("<bot><why></why>") == regions.reasoning_opened("<bot>") == -1
    assert regions.marks("<do>") and not regions.marks("<why>")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a <do>{no}</do> b", "a<do>{no}</do>b"),
        ('<do>{"arguments": {}}</do>', '<do>{"arguments": {}}</do>'),
        ('<do>{"name": "now", "argu', '<do>{"name": "now", "argu'),
        ("<do>", "<do>"),
    ],
)
def test_calls_that_are_none_are_content(text: str, content: str) -> None:
    for tokens in cuts(text):
        assert read(parser_for(JSON_LINES), tokens).content.replace("\n", "") == content


def test_what_is_not_wanted_is_content() -> None:
    text = '<why>so</why><do>{"name": "now", "arguments": {}}</do>'
    assert read(parser_for(JSON_LINES, parse_tools=False), [(text, False)]) == Read(text[13:], "so")
    assert read(parser_for(JSON_LINES, reasons=False), [(text, False)]).content == "so"


def test_text_that_might_become_a_marker_is_not_withheld_without_end() -> None:
    fields = {"tool_calls": {"open_pattern": r"<do .*?>", "close": "</do>", "content": "json"}}
    parser = parser_for({"start_anchor": "x", "fields": fields})
    shown = sum(len(parser.push("<do abcd ").content) for _ in range(1000))
    assert shown > 1000 * 9 - 5000
    assert shown + len(parser.finish().content) == 1000 * 9 - 1


def test_a_slow_pattern_is_used_once() -> None:
    fields = {"tool_calls": {"open_pattern": r"(?:(?:a|aa)+)+b", "close": "</do>", "content": "json"}}
    text = "a" * 60 + "c"
    begun = time.thread_time()
    found = read(parser_for({"start_anchor": "x", "fields": fields}), [(text, False)] * 100)
    assert found == Read(text * 100)
    assert time.thread_time() - begun < 2  # each search alone would take 0.05 s


@pytest.mark.parametrize(
    "template",
    [
        None,
        "text",
        {},
        {"version": 2, "fields": {"content": {}}},
        {"fields": {"content": {"content": "yaml"}}},
        {"fields": {"content": {"open_pattern": "("}}},
        {"fields": {"content": {"open": ""}}},
        {"fields": {"content": {}, "thinking": {}}},
        {"fields": {"tool_calls": {"open": "<", "content": "xml-inline", "content_args": {"tag_pattern": "x"}}}},
        {"fields": {"tool_calls": {"open": "<", "content": "xml-inline"}}},
        {"fields": {"content": []}},
    ],
)
def test_unknown_templates_are_refused(template: object) -> None:
    assert load(template) is None


def test_a_response_template_counts_if_the_notation_is_not_known_otherwise() -> None:
    found = detect("{{ messages }}", (), JSON_LINES)
    assert found.regions is not None and found.reads_calls and found.reads_reasoning
    assert detect('<tool_call>\n{"name": ', (), JSON_LINES) == OutputFormat(TOOL_FORMATS["hermes"])
    assert not detect("{{ messages }}", (), {"fields": 3}).reads_calls


def test_a_notation_that_the_template_shows_serves_for_grammars() -> None:
    plain, _ = notation(JSON_LINES)
    assert plain is not None and (plain.style, plain.begin, plain.end) == ("json", "<do>", "</do>")
    listed, _ = notation(LISTED)
    assert listed is not None and listed.listed and listed.section == ("[do]", "[/do]")
    assert (listed.name_key, listed.arguments_key) == ("tool", "with")
    quoted, thoughts = notation(QUOTED)
    assert quoted is not None and (quoted.style, quoted.begin, quoted.quote) == ("named", "<|do>call:", '<|"|>')
    assert thoughts is not None and (thoughts.begin, thoughts.end) == ("<|channel>thought\n", "<channel|>")
    assert notation(TAGS) == (None, None)
    assert detect("{{ messages }}", (), QUOTED).tools == quoted


@pytest.mark.parametrize(
    "change",
    [
        {"close": None},
        {"content": "kv-lines"},
        {"open": None, "open_pattern": r"<do (?P<name>\w+)( x)?>", "transform": NAMED},
        {"open": None, "open_pattern": r"(?P<name>\w+):", "transform": NAMED},
        {"open": None, "open_pattern": r"<do>(?P<other>\w+)", "transform": NAMED},
        {"content_args": {"string_delims": [["'", "'"]]}},
        {"transform": {"function": {"name": "{content.a.b}", "arguments": "{content.c}"}}},
        {"transform": {"function": "{content.call}"}},
        {"transform": ["{content}"]},
    ],
)
def test_a_notation_that_it_does_not_show_is_not_guessed(change: dict[str, Any]) -> None:
    spec = {**JSON_LINES["fields"]["tool_calls"], **change}
    assert notation({"fields": {"tool_calls": spec}}) == (None, None)


def test_keys_of_a_call_may_have_other_names() -> None:
    transform = {"function": {"name": "{content.tool}", "arguments": "{content.with}"}}
    spec = {**JSON_LINES["fields"]["tool_calls"], "transform": transform}
    found, _ = notation({"fields": {"tool_calls": spec}})
    assert found is not None and (found.name_key, found.arguments_key) == ("tool", "with")
