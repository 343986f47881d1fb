"""What becomes of calls that are malformed, unfinished or unusual."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.coordinator.output.reading import Read, cuts, parser_of, read

Calls = list[tuple[str, str]]
"""Name and arguments' text of each call."""

CASES: list[tuple[str, str, str, Calls]] = [
    # calls that are none are content, marker included
    ("hermes", "<tool_call>{nope}</tool_call> x", "<tool_call>{nope}</tool_call> x", []),
    ("hermes", "a <tool_call> b </tool_call>", "a <tool_call> b </tool_call>", []),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    ("hermes", "x <tool_call>\n", "x <tool_call>\n", []),
    ("mistral", "[TOOL_CALLS]what now?", "[TOOL_CALLS]what now?", []),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>no", "<｜tool▁calls▁begin｜>no", []),
    ("qwen3_coder", "<tool_call> see <function=f> b", "<tool_call> see <function=f> b", []),
    ("glm45", "<tool_call>f\nno", "<tool_call>f\nno", []),
    (
        "kimi_k2",
        "<|tool_call_begin|>f<|tool_call_argument_begin|>3",
        "<|tool_call_begin|>f<|tool_call_argument_begin|>3",
        [],
    ),
    ("openai", "<|channel|>commentary to=functions.f<|message|>[1]<|call|>", "[1]", []),
    ("openai", "<|channel|>commentary to=functions. f<|message|>{}<|call|>", "", []),
    # unmarked text is a call only if it names a known tool
    ("llama3_json", '{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {}}', []),
    ("llama3_json", '{"parameters": {}, "name": "now"}', '{"parameters": {}, "name": "now"}', []),
    ("llama3_json", 'See {"name": "now"}', 'See {"name": "now"}', []),
    ("llama4_pythonic", "[f(a=1)]", "[f(a=1)]", []),
    ("llama4_pythonic", "[now, later]", "[now, later]", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    # arguments in other places and forms
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}, "id": [2]}</tool_call>', "", [("f", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [("f", "{}"), ("g", "{}")]),
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
    ("deepseek_v31", '<｜tool▁call▁begin｜>{"name": "f"}<｜tool▁call▁end｜>', "", [("f", "{}")]),
    # arguments that are nearly JSON are corrected, others closed; the rest of the call is dropped
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': True,}}</tool_call>", "", [("f", '{"a": true}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}', "", [("f", '{"a": "1\\n2"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]} x</tool_call> y', "y", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tr', "", [("f", '{"a": null}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}}</tool_call>', "", [("f", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": ]}<tool_call>{"name": "g"}</tool_call>',
        "",
        [("f", '{"a": null}'), ("g", "{}")],
    ),
    ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nPar", "", [("get_weather", '{"city": "Par"}')]),
    ("llama4_pythonic", "[get_weather(city='Par", "", [("get_weather", '{"city": "Par"}')]),
    ("llama4_pythonic", "[get_weather(city=f(1))]", "", [("get_weather", '{"city": "f"}')]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>b', "", [("f", '{"a":"b"}')]),
    # markers inside strings, escapes, nesting
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>{"}}', "", [("f", '{"a": "</tool_call>{"}')]),
    (
        "hermes",
        '<tool_call>{"name": "\\u0066", "arguments": {"a": "\\u00e9\\ud83d"}}',
        "",
        [("f", '{"a": "\\u00e9\\ud83d"}')],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]g[ARGS]{}"}', "", [("f", '{"a": "[TOOL_CALLS]g[ARGS]{}"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": [{}]}}}', "", [("f", '{"a": {"b": [{}]}}')]),
    # text around calls, end markers that are missing or stray
    ("hermes", 'a\n<tool_call>{"name": "f"}</tool_call>\n\nb </tool_call>', "a\nb", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"} b', "b", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
    ("hermes", "No call </tool_call>", "No call </tool_call>", []),
    ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}", "", [("f", "{}")]),
    ("qwen3_coder", "<tool_call>\n\n<function=now>\n</function>", "", [("now", "{}")]),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CASES)
def test_decision(tools: str, text: str, content: str, calls: Calls) -> None:
    for tokens in cuts(text):
        found = read(parser_of(tools, "harmony" if tools == "openai" else ""), tokens)
        assert (found.content, [call[1:] for call in found.calls]) == (content, calls)


def test_deep_nesting_is_closed() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000
    [(name, arguments)] = read(parser_of("hermes"), [(text, False)]).named
    depth: Any = arguments["a"]
    while depth:
        [depth] = depth
    assert name == "f"


def test_a_repeated_begin_marker_of_reasoning_is_dropped() -> None:
    for tokens in cuts("<think>\nso</think>x"):
        assert read(parser_of("hermes", "deepseek_r1", thinking=True), tokens) == Read("x", "so")


def test_reasoning_may_follow_a_call_but_not_content() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>\n<think>so</think> a <think> b'
    for tokens in cuts(text):
        assert read(parser_of("hermes", "qwen3"), tokens) == Read("a <think> b", "so", [("call_0", "now", "{}")])


def test_arguments_are_streamed_as_they_come() -> None:
    parser = parser_of("hermes")
    texts = ['<tool_call>{"name": "f", "arguments": ', '{"a": "x', "y", 'z", "b": [1', ", 2]", "}}</tool_call>"]
    shown = ["".join(call.arguments for call in parser.push(text).calls) for text in texts]
    assert shown == ["", '{"a": "x', "y", 'z", "b": [', "1, 2]", "}"]


def test_arguments_of_tagged_strings_are_streamed() -> None:
    parser = parser_of("qwen3_coder")
    texts = ["<function=get_weather>\n<parameter=city>\nPa", 'r"is', "\n", "x\n</param", "eter></function>"]
    shown = ["".join(call.arguments for call in parser.push(text).calls) for text in texts]
    assert shown == ['{"city": "Pa', 'r\\"is', "", "\\nx", '"}']


def test_a_control_token_in_an_argument_adds_nothing() -> None:
    tokens = [
        ("<|tool_call>", True),
        ('call:f{a:<|"|>b', False),
        ("<|channel>", True),
        ("<channel|>", True),
        ("c", False),
    ]
    assert read(parser_of("gemma4", "gemma4"), tokens).calls == [("call_0", "f", '{"a":"bc"}')]
