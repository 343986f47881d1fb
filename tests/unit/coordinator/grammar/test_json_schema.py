"""JSON schemas: the grammar accepts exactly what a validator calls valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from coordinator.grammar.errors import TOO_COMPLEX, UNSUPPORTED
from coordinator.grammar.json_schema import FORMATS, prepared
from coordinator.grammar.task import Answer, Task
from tests.unit.coordinator.grammar.matching import accepts, answer, error, random_match, verdict
from tests.unit.coordinator.grammar.random_schemas import Generator

INT = {"type": "integer"}
KEYWORDS: list[tuple[Any, list[Any]]] = [
    ({"type": "null"}, [None, 0, "null"]),
    ({"type": "boolean"}, [True, False, 0]),
    ({"type": "integer"}, [0, -5, 10**12, 1.5, "1"]),
    ({"type": "number"}, [0, -1.5, 1e3, "1"]),
    ({"type": "string"}, ["", 'é\n"\\\x00', 1]),
    ({"type": ["integer", "null"]}, [1, None, "x"]),
    ({"const": {"a": [1, None]}}, [{"a": [1, None]}, {"a": [1]}, 1]),
    ({"enum": ["a", 1, None, [2]]}, ["a", 1, None, [2], "b", 2]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["a", "ab", "é日本", "abcd"]),
    ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ["a", "ab", "abcd"]),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["abc", "", "A"]),
    ({"type": "string", "pattern": "b"}, ["abc", "b", "ac"]),
    ({"type": "integer", "minimum": -3, "maximum": 12}, [-4, -3, 0, 12, 13]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, [0, 1, 2, 3]),
    ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 2}, [0.25, 0.5, 1, 1.99, 2]),
    ({"type": "integer", "multipleOf": 3}, [0, 3, -6, 4]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2], ["x"], [1, "x"]]),
    ({"type": "array", "minItems": 1, "maxItems": 2}, [[], [1], [1, "x"], [1, 2, 3]]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, [[1], [1, 2, 2], [2], [1, 1]]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[], [1], [1, 1]]),
    ({"properties": {"a": {"const": 1}}}, [{}, {"a": 1}, {"a": 2}, {"b": 2}, [], 1]),
    ({"type": "object", "required": ["a"]}, [{}, {"a": None}]),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}, {"b": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}, {"a": "x"}]),
    (
        {"type": "object", "patternProperties": {"^x": {"const": 1}}, "additionalProperties": False},
        [{"xa": 1}, {"xa": 2}, {"a": 1}],
    ),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{}, {"a": 1}, {"a": 1, "b": 2, "c": 3}]),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        [{"a": 1}, {"a": ""}, {"c": 1}],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"xa": 1}, {}, {"a": 1}]),
    ({"type": "object", "propertyNames": {"type": "string"}}, [{"xa": 1}, {}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a", "ab", None]),
    ({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 3}]}, [0, 1, 3, 4]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "x", None]),
    ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, [1, 2, 3, 4]),
    ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "integer"}}}, [1, "x"]),
    ({"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/b"}, "b": {"const": 1}}}, [1, 2]),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "integer"}}}, [1, "x"]),
    ({"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/x", "$defs": {"x": {"type": "integer"}}}, [1, "x"]),
    ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, [{"a": 1, "b": 2}, {"b": "x"}]),
    (
        {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        },
        [{"next": None}, {"next": {"next": None}}, {"next": {}}],
    ),
    (
        {"type": "integer", "unknownKeyword": 5, "title": "x", "default": "y", "examples": [1], "deprecated": True},
        [1, "x"],
    ),
    ({"type": "integer", "format": "int32"}, [1, "x"]),
    ({"type": "string", "format": "color"}, ["red", 1]),
    ({"type": "array", "uniqueItems": False}, [[1, 1], 1]),
    ({"if": {}, "type": "integer"}, [1, "x"]),
    (True, [1, None, {}]),
]


@pytest.mark.parametrize(("schema", "values"), KEYWORDS, ids=lambda each: json.dumps(each)[:60])
def test_a_keyword_means_what_the_standard_says(schema: Any, values: list[Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    grammar = answer("json_schema", schema)
    for value in values:
        for separators in ((", ", ": "), (",", ":")):
            text = json.dumps(value, ensure_ascii=False, separators=separators)
            assert accepts(grammar, text) == validator.is_valid(value), text


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_of_strings_are_enforced(name: str) -> None:
    good = {
        "date-time": "2024-02-29T12:00:00Z",
        "time": "12:00:00Z",
        "date": "2024-02-29",
        "duration": "P1DT2H",
        "email": "a@b.org",
        "hostname": "a.b.org",
        "ipv4": "10.0.0.1",
        "ipv6": "fe80::1",
        "uuid": "123e4567-e89b-12d3-a456-426614174000",
        "uri": "https://a.b/c?d=e",
    }
    grammar = answer("json_schema", {"type": "string", "format": name})
    assert accepts(grammar, json.dumps(good[name])) and not accepts(grammar, '"not one !"')


UNSUPPORTED_SCHEMAS: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, ".not"),
    ({"properties": {"a": {"not": {}}}}, ".properties.a.not"),
    ({"if": {}, "then": {}}, ".if"),
    ({"items": {"contains": {}}}, ".items.contains"),
    ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    ({"anyOf": [{}, {"propertyNames": {"maxLength": 3}}]}, ".anyOf[1].propertyNames"),
    ({"properties": {}, "propertyNames": {"pattern": "x"}}, ".propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    ({"dependentSchemas": {"a": {}}}, ".dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, ".dependencies"),
    ({"unevaluatedProperties": False}, ".unevaluatedProperties"),
    ({"unevaluatedItems": False}, ".unevaluatedItems"),
    ({"$dynamicRef": "#x"}, ".$dynamicRef"),
    ({"$ref": "https://example.com/schema.json"}, ".$ref"),
    ({"$ref": "other.json#/a"}, ".$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"not": {}}}}}, ".$defs.a.items.not"),
    ({"properties": {"a": {"$id": "https://a.b/"}}}, ".properties.a.$id"),
    ({"type": "string", "format": "iri"}, ".format"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, ".properties.a.pattern"),
    ({"patternProperties": {"(?!x)": {}}}, ".patternProperties.(?!x)"),
    ({"properties": {"a": {}}, "minProperties": 2}, ".minProperties"),
]


@pytest.mark.parametrize(("schema", "path"), UNSUPPORTED_SCHEMAS, ids=lambda each: json.dumps(each)[:50])
def test_what_cannot_be_obeyed_is_refused_with_its_path(schema: Any, path: str) -> None:
    found = error("json_schema", schema)
    assert (found.path, found.code) == (path, UNSUPPORTED)


INVALID_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "objekt"}, ".type"),
    ({"type": []}, ".type"),
    ({"properties": []}, ".properties"),
    ({"properties": {"a": 1}}, ".properties.a"),
    ({"anyOf": []}, ".anyOf"),
    ({"anyOf": {}}, ".anyOf"),
    ({"items": "x"}, ".items"),
    ({"$ref": "#/nowhere"}, ".$ref"),
    ({"$ref": "#nowhere"}, ".$ref"),
    ({"$ref": 1}, ".$ref"),
    ({"type": "string", "pattern": "("}, ".pattern"),
]


@pytest.mark.parametrize(("schema", "path"), INVALID_SCHEMAS, ids=lambda each: json.dumps(each)[:50])
def test_a_malformed_schema_is_refused_with_its_path(schema: Any, path: str) -> None:
    found = error("json_schema", schema)
    assert found.path == path and found.code in ("invalid_value", "invalid_type")


@pytest.mark.parametrize("schema", [{"minimum": "x"}, {"maxLength": -1}, {"required": [1]}, {"enum": 1}, {"enum": []}])
def test_any_other_malformed_value_is_refused(schema: Any) -> None:
    assert error("json_schema", schema).code != UNSUPPORTED


def test_deep_schemas_are_refused_before_they_exhaust_a_stack() -> None:
    schema: Any = {}
    for _ in range(300):
        schema = {"items": schema}
    assert error("json_schema", schema).code == TOO_COMPLEX
    assert error("json_schema", '{"items":' * 50_000 + "{}" + "}" * 50_000).code == TOO_COMPLEX


def test_a_discriminated_union_of_references_becomes_any_of() -> None:
    kinds = {
        name: {"type": "object", "properties": {"kind": {"const": name}, "v": {}}, "required": ["kind"]}
        for name in ("cat", "dog")
    }
    union = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds], "discriminator": {"propertyName": "kind"}}
    made = prepared({"type": "array", "items": union, "$defs": kinds})
    assert isinstance(made, dict) and "anyOf" in json.dumps(made) and "oneOf" not in json.dumps(made)
    assert accepts(answer("json_schema", {**union, "$defs": kinds}), '{"kind": "dog", "v": 1}')


def test_annotations_do_not_count_towards_the_size_of_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * (1 << 19)}}}
    assert len(answer("json_schema", schema)) < 1000
    large = {"enum": [f"value {index}" for index in range(40_000)]}
    assert error("json_schema", large).code == TOO_COMPLEX


@pytest.mark.parametrize("seed", range(300))
def test_random_schemas(seed: int) -> None:
    generator = Generator(seed)
    schema = generator.document()
    validator = jsonschema.Draft202012Validator(schema)
    made = verdict(Task(Answer("json_schema", schema)))
    values = generator.values(schema, 20)
    if made.error:  # only because nothing matches
        assert not any(map(validator.is_valid, values)), (made.error, schema)
        return
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        if accepts(made.grammar, text):
            assert validator.is_valid(value), (schema, text)
        elif validator.is_valid(value):
            assert "format" in json.dumps(schema), (schema, text)  # an annotation to the validator
    rng = random.Random(seed)
    for _ in range(2):
        if (text := random_match(made.grammar, rng)) is not None:
            validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31", "2021-02-29", "1900-02-29", "2024-04-31", "0000-01-01"]),
        ("date-time", ["2024-02-29T23:59:59Z", "2024-02-29T23:59:59.5+01:00", "2023-02-29T00:00:00Z", "2024-02-29"]),
        ("time", ["23:59:59Z", "00:00:00-12:30", "24:00:00Z", "22:59:60Z", "12:00:00"]),
        ("hostname", ["a", "example.com", "a-b.c", "-a.b", "a-.b", "xn--a", "a..b", "a" * 64]),
    ],
)
def test_formats_that_llguidance_reads_too_widely_are_exact(form: str, values: list[str]) -> None:
    grammar = answer("json_schema", {"type": "string", "format": form})
    wrong = {"2021-02-29", "1900-02-29", "2024-04-31", "0000-01-01", "2023-02-29T00:00:00Z", "24:00:00Z", "22:59:60Z"}
    wrong |= {"12:00:00", "-a.b", "a-.b", "xn--a", "a..b", "a" * 64} | (
        {"2024-02-29"} if form == "date-time" else set()
    )
    for value in values:
        assert accepts(grammar, json.dumps(value)) == (value not in wrong), value
    both = answer("json_schema", {"type": "string", "format": form, "pattern": "2"})
    assert not accepts(both, '"x"')


NOT_IMPLEMENTED: dict[str, Any] = {
    "not": {"const": 1},
    "if": {"const": 1},
    "contains": {"const": 1},
    "uniqueItems": True,
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
}


@pytest.mark.parametrize("keyword", NOT_IMPLEMENTED)
def test_llguidance_does_not_implement_what_is_refused(keyword: str) -> None:
    """If this fails after an upgrade, the keyword can be taken out of ``_UNSUPPORTED``."""
    schema = {keyword: NOT_IMPLEMENTED[keyword], **({"then": {"type": "null"}} if keyword == "if" else {})}
    assert keyword in LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}")
    found = error("json_schema", schema)
    assert (found.code, found.path) == (UNSUPPORTED, f".{keyword}") and repr(keyword) in found.error


def test_patterns_of_properties_that_overlap_are_unsupported() -> None:
    found = error("json_schema", {"patternProperties": {"a*": INT, "aa*": INT}})
    assert (found.code, found.path) == (UNSUPPORTED, ".patternProperties")
