"""Calls written from the table of formats, as its documentation says, are read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.output.formats import TOOL_FORMATS, ToolFormat
from tests.unit.coordinator.output.reading import parser_of, random_cuts, read

Call = tuple[str, dict[str, Any]]

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_NESTED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=5,
)
_WEATHER = st.fixed_dictionaries(
    {},
    optional={
        "city": _TEXTS,
        "days": st.integers(-(10**9), 10**9),
        "units": st.sampled_from(["C", "F"]),
        "exact": st.booleans(),
        "where": st.dictionaries(_TEXTS, _NESTED, max_size=3),
        "tags": st.lists(_NESTED, max_size=3),
    },
)
_CALLS = st.lists(
    st.tuples(st.just("get_weather"), _WEATHER) | st.tuples(st.just("now"), st.just(dict[str, Any]())),
    min_size=1,
    max_size=3,
)


def written(format: ToolFormat, calls: list[Call]) -> str:
    """Write ``calls`` as the docstring of the module of formats says."""
    if format.style == "pythonic":
        texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in some.items())})" for name, some in calls]
        return f"{format.begin}[{', '.join(texts)}]{format.end}"
    if format.style == "json":
        keys = format.name_key, format.arguments_key
        objects = [json.dumps({keys[0]: name, keys[1]: some} if keys[0] else {name: some}) for name, some in calls]
        if format.listed:
            return f"{format.section[0]}{format.begin}[{', '.join(objects)}]{format.end}{format.section[1]}"
        return format.section[0] + format.between.join(format.begin + each + format.end for each in objects)
    texts = [
        "".join(
            (
                format.begin,
                name if not format.numbered else f"{format.name_prefix}{name}:{number}",
                format.after_name,
                _parameters(format, some) if format.style == "parameters" else _object(format, some),
                format.end,
            )
        )
        for number, (name, some) in enumerate(calls)
    ]
    return format.section[0] + format.between.join(texts) + format.section[1]


def _parameters(format: ToolFormat, some: dict[str, Any]) -> str:
    text = ""
    for key, value in some.items():
        is_text = isinstance(value, str)
        after_key = format.after_key if is_text else format.after_key.replace('"true"', '"false"')
        text += format.key + key + after_key + (value if is_text else json.dumps(value)) + format.after_value
    return text


def _object(format: ToolFormat, value: Any) -> str:
    if not format.quote:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_key(format, key)}:{_object(format, each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_object(format, each) for each in value) + "]"
    return f"{format.quote}{value}{format.quote}" if isinstance(value, str) else json.dumps(value)


def _key(format: ToolFormat, key: str) -> str:
    return key if key.isidentifier() else f"{format.quote}{key}{format.quote}"


def _contains(value: Any, *texts: str) -> bool:
    if isinstance(value, dict):
        return any(_contains(each, *texts) for each in (*value, *value.values()))
    if isinstance(value, list):
        return any(_contains(each, *texts) for each in value)
    return isinstance(value, str) and any(text and text in value for text in texts)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@settings(max_examples=15, deadline=None)
@given(calls=_CALLS, before=st.sampled_from(["", "I look. ", "\n"]), seed=st.integers(0, 1000))
def test_calls_that_are_written_are_read(name: str, calls: list[Call], before: str, seed: int) -> None:
    format = TOOL_FORMATS[name]
    if _contains([some for _, some in calls], format.quote, format.after_value.strip()):
        return  # notations without escapes cannot write their own markers
    before = before if format.trigger and format.style != "channels" else ""
    found = read(parser_of(name), random_cuts(before + written(format, calls), seed))
    assert found.named == calls
    assert found.content == before.strip()
