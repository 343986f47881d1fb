"""Each kind of constraint: which texts its grammar accepts, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from coordinator.grammar.errors import UNSUPPORTED
from tests.unit.coordinator.grammar.matching import accepts, answer, begins, error


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("{}", True),
        ('{"a": 1}', True),
        ('{"a":{"b":[1,2.5e3,null,true,"x"]}}', True),
        ("[]", False),
        ('"a"', False),
        ("{", False),
        ('{"a": 1} and more', False),
        ("", False),
    ],
)
def test_json_object_accepts_any_object_and_nothing_else(text: str, fits: bool) -> None:
    assert accepts(answer("json"), text) == fits


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":[1,2],"b":{}}', True),
        ('{"a": [1, 2], "b": {}}', True),
        ('{\n  "a": [\n    1,\n    2\n  ],\n  "b": {}\n}', True),
        ('{\n\t"a": [1]\n}', True),
        ('{ "a" : 1 }', True),
        ('{"a":  1}', False),
        ('{\n\n"a": 1}', False),
        (' {"a": 1}', False),
        ('{"a": 1}\n', False),
        ("{\n" + " " * 33, False),
    ],
)
def test_json_has_at_most_one_space_or_one_indented_line_between_its_tokens(text: str, fits: bool) -> None:
    assert begins(answer("json"), text) == fits


def test_no_white_space_and_the_client_s_own() -> None:
    compact = answer("json", whitespace="")
    assert accepts(compact, '{"a":[1,2]}') and not begins(compact, '{"a": ') and not begins(compact, "{ ")
    own = answer("json", whitespace="\t{1,3}")
    assert accepts(own, '{"a":\t\t1}') and not begins(own, '{"a": ') and not begins(own, '{"a":\t\t\t\t')
    assert error("json", whitespace="(").code == "invalid_value"


PATTERNS = (
    *("a+b?", "", "[0-9]{3}-[0-9]{2}", "yes|no", "(?:ab|c)*", "[^a]", ".*", "é|日本", "a/b", "^x$"),
    *(r"\d\.\d", r"\w+@\w+\.com"),
)
TEXTS = (
    *("", "a", "aab", "ab", "123-45", "123-456", "yes", "no", "yesno", "abcab", "b", "x", "é", "日本", "a/b", "1.2"),
    *("me@it.com", "xy", "x\n"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_matches_as_a_whole(pattern: str) -> None:
    grammar = answer("regex", pattern)
    for text in TEXTS:
        assert accepts(grammar, text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", r"a\b", "(?<!a)b"])
def test_what_regular_expressions_cannot_do_is_unsupported(pattern: str) -> None:
    assert error("regex", pattern).code == UNSUPPORTED


@pytest.mark.parametrize("pattern", ["(", "[", "a{2,1}", "*", r"\Z"])
def test_a_malformed_regular_expression_is_invalid(pattern: str) -> None:
    found = error("regex", pattern)
    assert found.code == "invalid_value" and "\n" not in found.error


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        ["a", "ab", "abc"],
        ["é\n", '"q"\\', "\x7f\x01", "/*#//"],
        ["only"],
        ["", "a"],
        ["<tool_call"],
    ],
)
def test_a_choice_is_exactly_one_of_its_strings(choices: list[str]) -> None:
    grammar = answer("choice", choices)
    for text in choices:
        assert accepts(grammar, text)
        assert text + "x" in choices or not accepts(grammar, text + "x")
    assert "" in choices or not accepts(grammar, "")


def test_grammars_in_lark_and_in_gbnf() -> None:
    for text in (
        'start: "a" b+\nb: "b" | "c"',
        '?start: "a" b+\n?b: "b" | "c"',
        '// ::= is no rule here\nstart: "a" b+\nb: "b" | "c" | "::=" "x"',
        'root ::= "a" b+\nb ::= "b" | "c"',
    ):
        grammar = answer("lark", text)
        assert accepts(grammar, "abcb") and not accepts(grammar, "a") and not begins(grammar, "b")
    with_json = answer("lark", 'start: "x=" value\nvalue: %json {"type": "integer", "minimum": 3}')
    assert accepts(with_json, "x=12") and not accepts(with_json, "x=2")


@pytest.mark.parametrize(
    "text",
    [
        *("", "   ", "nonsense", 'start: "a', "start: b", '{"grammars": []}', "start: <|unknown|>"),
        "start: ((",
    ],
)
def test_a_malformed_grammar_is_refused_in_one_line(text: str) -> None:
    found = error("lark", text)
    assert found.error.endswith(".") and "\n" not in found.error and "available" not in found.error


def test_a_grammar_that_no_text_matches_is_refused() -> None:
    assert "no output" in error("json_schema", {"$ref": "#"}).error
    assert error("json_schema", False).error
    assert error("json_schema", {"type": "string", "minLength": 5, "maxLength": 3}).error


def test_schemas_may_be_json_text() -> None:
    assert accepts(answer("json_schema", '{"type": "integer"}'), "12")
    assert "not valid JSON" in error("json_schema", '{"type": ').error
    assert error("json_schema", "[" * 100_000).error
    assert error("json_schema", "[]").code == "invalid_type"


@pytest.mark.parametrize(
    ("strict", "closed", "extra"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_strict_and_closed_schemas_allow_only_named_properties(strict: bool, closed: bool, extra: bool) -> None:
    inner = {"type": "object", "properties": {"b": {}}}
    schema: Any = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    grammar = answer("json_schema", schema, strict=strict, closed=closed)
    assert accepts(grammar, '{"a": {"b": 1}}')
    assert accepts(grammar, '{"a": {"b": 1}, "c": 1}') == extra
    assert accepts(grammar, '{"a": {"b": 1, "c": 1}}') == extra
    open_schema = {**schema, "additionalProperties": True}
    assert accepts(answer("json_schema", open_schema, strict=strict, closed=closed), '{"a": {}, "c": 1}')


def test_a_client_cannot_set_llguidance_s_own_options() -> None:
    grammar = answer("json_schema", {"x-guidance": {"lenient": True, "whitespace_flexible": True}, "type": "object"})
    assert not begins(grammar, '{"a":  ')
