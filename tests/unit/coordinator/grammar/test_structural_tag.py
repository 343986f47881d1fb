"""Structural tags in both JSON forms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.coordinator.grammar.matching import accepts, answer, error

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
OLDER: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": OBJECT, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "object"}, "end": "</function>"},
        {"begin": "<tool_call>", "schema": {"type": "integer"}, "end": "</tool_call>"},
    ],
    "triggers": ["<function=", "<tool_call>"],
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ("hello <there", True),
        ("hi <function", True),
        ('hi <function=f>{"x": 1}</function> bye', True),
        ('<function=f>{"x": 1}</function><function=g>{}</function>', True),
        ("a<tool_call>5</tool_call>b", True),
        ("<function=h>", False),
        ('<function=f>{"y": 1}</function>', False),
        ('<function=f>{"x": 1}</function> <function=', False),
        ("a<tool_call>x", False),
        ("a</tool_call>", False),
    ],
)
def test_from_a_trigger_on_a_tag_is_obeyed_and_all_other_text_is_free(text: str, fits: bool) -> None:
    assert accepts(answer("structural_tag", OLDER), text) == fits


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
EITHER = {"type": "or", "elements": [const("b"), const("c")]}
ONE_TAG = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [tag("<f>", const("1"), "")],
    "at_least_one": True,
    "stop_after_first": True,
}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": [tag("[", const("1"), "]")]}
NODES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (const("abc"), ["abc"], ["", "ab", "abcd"]),
    ({"type": "json_schema", "json_schema": OBJECT}, ['{"x": 1}'], ["{}", "x"]),
    ({"type": "regex", "pattern": "[ab]+"}, ["abba"], ["", "c"]),
    ({"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, ["x", "yyx"], ["y"]),
    (ANY, ["", "anything <at> all"], []),
    ({"type": "sequence", "elements": [const("a"), EITHER]}, ["ab", "ac"], ["a", "abc"]),
    (tag("<b>", ANY, "</b>"), ["<b></b>", "<b>x < y</b>"], ["<b>", "<b></b>x"]),
    (tag("<tool_call>", ANY, "</tool_call>"), ["<tool_call>x</tool_call>"], ["<tool_call>x"]),
    (ONE_TAG, ["<f>1", "text <f>1"], ["", "text", "<f>1 more", "<f>1<f>1", "<g>"]),
    (SEPARATED, ["", "[1]", "[1], [1], [1]"], ["[1][1]", "[1],", "[2]"]),
]


@pytest.mark.parametrize(
    ("form", "good", "bad"), NODES, ids=lambda each: each.get("type") if isinstance(each, dict) else ""
)
def test_each_node_of_a_format(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = answer("structural_tag", {"type": "structural_tag", "format": form})
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


FUNCTION = "<function=f>"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, ".triggers"),
        ({**OLDER, "triggers": []}, ".triggers"),
        ({**OLDER, "triggers": [""]}, ".triggers"),
        ({**OLDER, "structures": [{"begin": "<other>", "schema": {}, "end": ""}]}, ".structures[0].begin"),
        ({**OLDER, "structures": [{"schema": {}, "end": ""}]}, ".structures[0].begin"),
        ({**OLDER, "structures": [{"begin": FUNCTION, "schema": {"not": {}}}]}, ".structures[0].schema.not"),
        ({"format": {"type": "magic"}}, ".format.type"),
        ({"format": {"type": "sequence", "elements": [tag("a", {}, "b")]}}, ".format.elements[0].content.type"),
        ({"format": 1}, ".format"),
    ],
)
def test_the_error_names_the_place(given: dict[str, Any], path: str) -> None:
    assert error("structural_tag", given).path == path


def test_deep_trees_are_refused() -> None:
    form: dict[str, Any] = const("a")
    for _ in range(200):
        form = {"type": "sequence", "elements": [form]}
    assert error("structural_tag", {"format": form}).code == "grammar_too_complex"
