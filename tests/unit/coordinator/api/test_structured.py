"""The fields that constrain an output, and the one constraint that they become."""

from __future__ import annotations

from typing import Any

import pytest

from common.core.errors import RequestError
from coordinator.api.fields import Fields
from coordinator.api.structured import format_constraint, parse_constraint
from coordinator.requests.spec import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
FORMAT = "response_format"


def parsed(**body: Any) -> Constraint | None:
    return parse_constraint(Fields(body))


def format_of(**form: Any) -> dict[str, Any]:
    return {FORMAT: form}


ACCEPTED: list[tuple[dict[str, Any], Constraint | None]] = [
    ({}, None),
    ({FORMAT: None}, None),
    (format_of(type="text"), None),
    (format_of(type="json_object"), Constraint(kind="json", param="response_format.type")),
    (
        format_of(type="json_object", schema=SCHEMA),
        Constraint(kind="json_schema", value=SCHEMA, param="response_format.schema"),
    ),
    (
        format_of(type="json_schema", json_schema={"name": "x", "schema": SCHEMA, "strict": True}),
        Constraint(kind="json_schema", value=SCHEMA, param="response_format.json_schema.schema", strict=True),
    ),
    (
        format_of(type="json_schema", json_schema={"name": "x", "schema": SCHEMA, "strict": None}),
        Constraint(kind="json_schema", value=SCHEMA, param="response_format.json_schema.schema"),
    ),
    (
        format_of(type="json_schema", json_schema={"name": "x"}),
        Constraint(kind="json", param="response_format.json_schema"),
    ),
    (
        format_of(type="json_schema", name="x", schema=SCHEMA, strict=True),
        Constraint(kind="json_schema", value=SCHEMA, param="response_format.schema", strict=True),
    ),
    (
        format_of(type="structural_tag", **TAG),
        Constraint(kind="structural_tag", value={"type": "structural_tag", **TAG}, param="response_format"),
    ),
    *(
        (
            {holder: {name: value}} if holder else {f"guided_{name}": value},
            Constraint(kind=kind, value=kept, param=param),
        )
        for name, value, kind, kept in (
            ("json", SCHEMA, "json_schema", SCHEMA),
            ("json", '{"type": "integer"}', "json_schema", '{"type": "integer"}'),
            ("regex", "a+", "regex", "a+"),
            ("choice", ["a", "b"], "choice", ["a", "b"]),
            ("grammar", 'start: "a"', "lark", 'start: "a"'),
            ("json_object", True, "json", None),
        )
        for holder, param in (("structured_outputs", f"structured_outputs.{name}"), ("", f"guided_{name}"))
    ),
    (
        {"structured_outputs": {"structural_tag": TAG}},
        Constraint(kind="structural_tag", value=TAG, param="structured_outputs.structural_tag"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?", "disable_any_whitespace": True}},
        Constraint(kind="json_schema", value=SCHEMA, param="structured_outputs.json", whitespace="[ ]?"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True}},
        Constraint(kind="json_schema", value=SCHEMA, param="structured_outputs.json", whitespace="", closed=True),
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
        Constraint(kind="json_schema", value=SCHEMA, param="guided_json", whitespace=" "),
    ),
    (
        {"structured_outputs": {"regex": "a", "json_object": False, "json": None}, "guided_json_object": False},
        Constraint(kind="regex", value="a", param="structured_outputs.regex"),
    ),
]


@pytest.mark.parametrize(("body", "constraint"), ACCEPTED)
def test_each_form_becomes_a_constraint(body: dict[str, Any], constraint: Constraint | None) -> None:
    assert parsed(**body) == constraint


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({FORMAT: "json_object"}, "response_format", "invalid_type"),
    (format_of(), "response_format.type", "missing_required_parameter"),
    (format_of(type="xml"), "response_format.type", "invalid_value"),
    (format_of(type="json_schema"), "response_format.json_schema", "missing_required_parameter"),
    (format_of(type="json_schema", json_schema=[]), "response_format.json_schema", "invalid_type"),
    (
        format_of(type="json_schema", json_schema={"strict": True}),
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (format_of(type="json_schema", json_schema={"schema": 1}), "response_format.json_schema.schema", "invalid_type"),
    (
        format_of(type="json_schema", json_schema={"schema": {}, "strict": "yes"}),
        "response_format.json_schema.strict",
        "invalid_type",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "invalid_type"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "invalid_type"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "invalid_type"),
    ({"structured_outputs": {"structural_tag": 1}}, "structured_outputs.structural_tag", "invalid_type"),
    ({"structured_outputs": {"regex": "a", "magic": 1}}, "structured_outputs.magic", "unsupported"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "invalid_value"),
    ({**format_of(type="json_object"), "guided_regex": "a"}, "guided_regex", "invalid_value"),
    (
        {**format_of(type="json_object"), "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
        "invalid_value",
    ),
    ({"guided_regex": "a" * (1 << 19)}, "guided_regex", "invalid_value"),
]


@pytest.mark.parametrize(("body", "param", "code"), REFUSED)
def test_what_is_no_constraint_or_several_is_refused(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_the_format_of_responses_has_its_schema_beside_its_type() -> None:
    form = Fields({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, "text.format")
    assert format_constraint(form) == Constraint(
        kind="json_schema", value=SCHEMA, param="text.format.schema", strict=True
    )
