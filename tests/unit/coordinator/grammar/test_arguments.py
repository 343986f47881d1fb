"""Arguments that are no JSON (between tags, Python literals, quote markers) obey the schema of their tool."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import pytest

from coordinator.grammar.errors import UNSUPPORTED
from coordinator.grammar.task import Task, Tool
from coordinator.output.formats import TOOL_FORMATS, ToolFormat
from tests.unit.coordinator.grammar.matching import Model
from tests.unit.coordinator.grammar.random_schemas import Generator
from tests.unit.coordinator.grammar.test_tool_calls import family, read

TAGGED = ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v32")
PYTHONIC = ("pythonic", "olmo3")
MARKED = ("functiongemma", "gemma4")
Schema = dict[str, Any]


def written(form: ToolFormat, arguments: dict[str, Any]) -> str:
    """Return a call of the tool ``f`` as the family's template writes it."""
    if form.style == "pythonic":
        inside = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return f"{form.begin}[f({inside})]{form.end}"
    if form.style == "parameters":
        fields = "".join(map(functools.partial(_field, form), arguments, arguments.values()))
        return f"{form.section[0]}{form.begin}f{form.after_name}{fields}{form.end}{form.section[1]}"
    return f"{form.begin}f{form.after_name}{_marked(form, arguments)}{form.end}"


def _field(form: ToolFormat, name: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    after = form.after_key if isinstance(value, str) else form.after_key.replace('"true"', '"false"')
    return f"{form.key}{name}{after}{text}{form.after_value}"


def _marked(form: ToolFormat, value: object) -> str:
    match value:
        case str():
            return f"{form.quote}{value}{form.quote}"
        case dict():
            return "{" + ",".join(f"{name}:{_marked(form, each)}" for name, each in value.items()) + "}"
        case list():
            return "[" + ",".join(_marked(form, each) for each in value) + "]"
    return json.dumps(value)


@functools.lru_cache(maxsize=4)
def _grammar(name: str, schema: str, strict: bool) -> tuple[Model, str]:
    model = family(name)
    tools = (Tool("f", json.loads(schema), 0, strict),)
    return model, model.grammar(Task(tools=tools, tool_format=TOOL_FORMATS[name], forced=True))


def allowed(name: str, schema: Schema, arguments: dict[str, Any], *, strict: bool = False) -> bool:
    model, grammar = _grammar(name, json.dumps(schema), strict)
    return model.accepts(grammar, written(TOOL_FORMATS[name], arguments))


def one(schema: Any) -> Schema:
    """Return the schema of parameters of which ``x`` is needed and matches ``schema``."""
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


OPTIONAL = {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None}
INTEGER = {"type": "integer"}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "é日x<", "a\\'b"], ["a", "abcde", ""]),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ["AB-1", "XY-007"], ["ab-1", "AB-", "AB-1x"]),
    ({"type": "string", "pattern": "b+"}, ["b", "abba", "a'b"], ["a", ""]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
    ({"type": "string", "pattern": "^a", "maxLength": 3}, ["a", "abc"], ["abcd", "b"]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01", "today"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.255"], ["1.2.3", "1.2.3.256"]),
    ({"enum": ["hall", "attic", "it's"]}, ["hall", "it's"], ["cellar", "hal"]),
    ({"const": "so"}, ["so"], ["s", "soo"]),
    ({"type": "integer", "minimum": 3, "maximum": 12}, [3, 12], [2, 13, 120]),
    ({"type": "number", "exclusiveMinimum": 0}, [0.5, 3], [0, -1]),
    ({"type": "integer", "multipleOf": 5}, [10, 0], [11]),
    ({"type": "boolean"}, [True, False], [1]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3}, [[1], [1, 2, 3]], [[], [1] * 4, [[]]]),
    ({"type": "array", "items": {"type": "string", "maxLength": 2}}, [[], ["ab", "c"]], [["abc"], [1]]),
    ({"type": "array", "prefixItems": [INTEGER, {"type": "boolean"}], "items": False}, [[1, True], [1]], [[True]]),
    (POINT, [{"x": 1}, {"x": 1, "y": 2}], [{"y": 2}, {"x": True}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": []}]),
    ({"patternProperties": {"^n": INTEGER}, "additionalProperties": False, "type": "object"}, [{"na": 1}], [{"a": 1}]),
    ({"$ref": "#/$defs/p"}, [{"x": 1}], [{}]),
    (OPTIONAL, ["abc", None], ["abcd"]),
    ({"type": ["string", "integer"], "minimum": 5, "maxLength": 3}, ["abc", 7], [3, "abcd"]),
    ({"enum": ["auto", 1, 2, None]}, ["auto", 1, None], [3, "au"]),
    ({"anyOf": [POINT, {"type": "string", "maxLength": 5}]}, [{"x": 1}, "a{b}"], [{"y": 1}, "abcdef"]),
    ({"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}, ["ab"], ["a", "abcd"]),
    ({"const": {"a": [1, "x", None]}}, [{"a": [1, "x", None]}], [{"a": [1]}, {"a": [1, "y", None]}]),
]  # fmt: skip


@pytest.mark.parametrize("name", [*TAGGED, *PYTHONIC, *MARKED])
@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda each: json.dumps(each)[:40])
def test_a_value_obeys_its_schema(name: str, schema: Any, good: list[Any], bad: list[Any]) -> None:
    whole = {**one(schema), "$defs": {"p": POINT}}
    for value in good:
        assert allowed(name, whole, {"x": value}), value
    for value in bad:
        assert not allowed(name, whole, {"x": value}), value


@pytest.mark.parametrize("name", [*TAGGED, *PYTHONIC, *MARKED])
def test_which_parameters_there_are(name: str) -> None:
    named = {"type": "object", "properties": {"a": {"type": "integer"}, "b": True, "c": False}, "required": ["b"]}
    assert allowed(name, named, {"a": 1, "b": "x"}) and allowed(name, named, {"b": [1]})
    assert not allowed(name, named, {"a": 1}) and not allowed(name, named, {"b": "x", "d": 1})
    assert not allowed(name, named, {"b": "x", "c": 1})
    for free in ({"type": "object"}, {}, {"type": "object", "additionalProperties": {"type": "integer"}}):
        assert allowed(name, free, {}) and allowed(name, free, {"a": 1, "b": 2})
    assert not allowed(name, {"type": "object", "additionalProperties": {"type": "integer"}}, {"a": [1]})
    missing = {"type": "object", "required": ["z"]}
    assert allowed(name, missing, {"z": 1}) and not allowed(name, missing, {})
    by_reference = {"$ref": "#/$defs/all", "$defs": {"all": POINT}}
    assert allowed(name, by_reference, {"x": 1}) and not allowed(name, by_reference, {"y": 1})
    either = {"type": "object", "anyOf": [{"required": ["x"]}, {"required": ["y"]}], "properties": POINT["properties"]}
    assert allowed(name, either, {"x": 1}) and allowed(name, either, {"y": 1}) and not allowed(name, either, {})


@pytest.mark.parametrize("name", [*TAGGED, *PYTHONIC, *MARKED])
def test_a_schema_that_refers_to_itself(name: str) -> None:
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "l": {"$ref": "#"}}, "required": ["v"]}
    assert allowed(name, tree, {"v": 1, "l": {"v": 2, "l": {"v": 3}}})
    assert not allowed(name, tree, {"v": 1, "l": {"l": {"v": 3}}})


@pytest.mark.parametrize("name", [*TAGGED, *MARKED])
def test_a_constrained_text_does_not_contain_its_end(name: str) -> None:
    form, schema = TOOL_FORMATS[name], {"type": "string", "maxLength": 60}
    end = form.quote or form.after_value.strip()
    text = f"a{end[:-1]}b"
    assert allowed(name, one(schema), {"x": text})
    assert not allowed(name, one(schema), {"x": f"a{end}b"})


def test_a_line_break_at_an_edge_belongs_to_a_text_only_if_it_is_doubled() -> None:
    schema = one({"type": "string", "pattern": "^\\na*\\n$"})
    model, grammar = _grammar("qwen3_coder", json.dumps(schema), False)
    assert allowed("qwen3_coder", schema, {"x": "\naa\n"})
    found = read("qwen3_coder", model, model.random_match(grammar, random.Random(1)) or "", _tools(schema))
    assert [sorted(arguments) for _, arguments in found.named] == [["x"]]
    jsonschema.validate(found.named[0][1], schema)


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "gemma4"])
def test_a_strict_tool_is_obeyed_or_refused(name: str) -> None:
    model, form = family(name), TOOL_FORMATS[name]

    def refused(schema: Schema) -> tuple[str, str]:
        made = model.verdict(Task(tools=(Tool("f", schema, 2, strict=True),), tool_format=form))
        assert made.subject == 2, made
        return made.code, made.path

    assert refused(one({"type": "string", "pattern": "(?=a)b"})) == (UNSUPPORTED, ".properties.x.pattern")
    assert refused(one({"type": "string", "not": {"const": "a"}})) == (UNSUPPORTED, ".properties.x.not")
    many = {"properties": {"a": True, "b": True}, "minProperties": 1, "type": "object"}
    assert refused(many) == (UNSUPPORTED, ".minProperties")
    assert not allowed(name, {"type": "object"}, {"a": 1}, strict=True)
    assert allowed(name, one({"type": "string", "minLength": 2}), {"x": "ab"}, strict=True)


def test_what_a_tool_that_is_not_strict_cannot_have_obeyed_is_left_out() -> None:
    for name in ("qwen3_coder", "pythonic", "gemma4"):
        schema = one({"type": "string", "pattern": "(?=a)b", "maxLength": 3})
        assert allowed(name, schema, {"x": "zz"}) and not allowed(name, schema, {"x": "four"})
        assert allowed(name, {"properties": {"a": True, "b": True}, "minProperties": 1}, {"b": 1})


def _tools(schema: Schema) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "deepseek_v32", "pythonic", "gemma4"])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_random_schema_allows_is_valid(name: str, seed: int) -> None:
    made, found = Generator(seed), 0
    names = [f"p{at}" for at in range(made.rng.randint(1, 3))]
    schema = {
        "type": "object",
        "properties": {each: made.schema(2) for each in names},
        "required": [each for each in names if made.rng.random() < 0.7],
        "additionalProperties": False,
    }
    if made.definitions:
        schema["$defs"] = made.definitions
    model, grammar = _grammar(name, json.dumps(schema), False)
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(6):
        text = model.random_match(grammar, made.rng, 200)
        if text is None:
            continue
        calls = read(name, model, text, _tools(schema)).named
        assert calls, text
        for _, arguments in calls:
            validator.validate(arguments)
            found += 1
    assert found or seed
