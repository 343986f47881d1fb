"""Values written as plain text, typed by the schema of a tool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.output.parameters import typed, types_of
from tests.unit.coordinator.output.reading import cuts, parser_of, read

SCHEMA: dict[str, Any] = {
    "$defs": {"Place": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": {"type": "integer"}},
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "open": {"anyOf": [{"type": "integer"}, {}]},
        "choice": {"enum": ["a", "b"]},
        "mixed": {"enum": ["a", 1]},
        "fixed": {"const": True},
        "place": {"$ref": "#/$defs/Place"},
        "escaped": {"$ref": "#/$defs/a~1b"},
        "loop": {"$ref": "#/$defs/Loop"},
        "away": {"$ref": "https://example.org/schema"},
        "all": {"allOf": [{"$ref": "#/$defs/Place"}, {"description": "x"}]},
        "free": {"description": "anything"},
        "odd": True,
    },
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("text", {"string"}),
        ("maybe", {"string", "null"}),
        ("either", {"integer", "null"}),
        ("open", None),
        ("choice", {"string"}),
        ("mixed", {"string", "integer", "number"}),
        ("fixed", {"boolean"}),
        ("place", {"object"}),
        ("escaped", {"integer"}),
        ("loop", None),
        ("away", None),
        ("all", {"object"}),
        ("free", None),
        ("odd", None),
        ("unknown", None),
    ],
)
def test_types_of_a_parameter(key: str, types: set[str] | None) -> None:
    assert types_of(SCHEMA, key) == types


@pytest.mark.parametrize("schema", [{}, {"properties": []}, {"properties": {"text": "string"}}])
def test_a_schema_may_say_nothing(schema: dict[str, Any]) -> None:
    assert types_of(schema, "text") is None


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"additionalProperties": {"type": "integer"}}, {"integer"}),
        ({"additionalProperties": False}, None),
        ({"patternProperties": {"^x": {"type": "string"}}}, {"string"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"type": "string"}}}}}, {"string"}),
        ({"allOf": [{"properties": {"x": {"type": "string"}}}, {"properties": {"x": {"minLength": 2}}}]}, {"string"}),
        (
            {"anyOf": [{"properties": {"x": {"type": "string"}}}, {"properties": {"x": {"type": "null"}}}]},
            {"string", "null"},
        ),
        ({"properties": {"x": {"type": "null"}}, "additionalProperties": {"type": "string"}}, {"null"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, None),
        ({"$ref": 5, "anyOf": {}, "patternProperties": []}, None),
    ],
)
def test_a_parameter_may_be_described_in_parts_of_the_schema(schema: Any, types: set[str] | None) -> None:
    assert types_of(schema, "x") == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", {"integer"}, 3),
        (" 3 ", {"number"}, 3),
        ("3.0", {"integer"}, 3),
        ("3.5", {"integer"}, "3.5"),
        ("true", {"boolean"}, True),
        ("True", {"boolean"}, True),
        ("1", {"boolean"}, "1"),
        ("None", {"integer", "null"}, None),
        ("null", {"string", "null"}, None),
        ("nil", {"string", "null"}, "nil"),
        ('"x"', {"string", "null"}, '"x"'),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("{'a': True}", {"object"}, {"a": True}),
        ("{'a': True} x", {"object"}, "{'a': True} x"),
        ("[1, 2", {"array"}, "[1, 2"),
        ("[1]", {"object"}, "[1]"),
        ("5", None, 5),
        ("five", None, "five"),
        ("[1, 2]", None, [1, 2]),
        ("NaN", {"number"}, "NaN"),
        ("", {"integer"}, ""),
        ("9" * 5000, {"integer"}, "9" * 5000),
    ],
)
def test_text_becomes_a_value(text: str, types: set[str] | None, value: Any) -> None:
    assert json.loads(typed(text, types)) == value


def test_a_string_is_taken_as_it_is() -> None:
    text = (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\n 3 <b> &amp; "\\n" </param\n\n</parameter>\n</function>'
    )
    for tokens in cuts(text):
        [(_, arguments)] = read(parser_of("qwen3_coder"), tokens).named
        assert arguments == {"city": ' 3 <b> &amp; "\\n" </param\n'}
