"""Values in JSON, Python's and other notations, rewritten as JSON."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.output.text_stream import TextStream
from coordinator.output.values import JSON, PYTHON, Notation, read_value, scalar

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=8,
)


def rewritten(text: str, notation: Notation = JSON) -> tuple[bool, str, str]:
    """Return whether ``text`` begins with a well-formed value, that value as JSON, and the unread rest. Checks that all
    cuts of the text give the same."""
    found = set[tuple[bool, str, str]]()
    for size in (1, 2, 3, 7, len(text) or 1):
        stream, parts = TextStream(), list[str]()
        reading = read_value(stream, parts.append, notation)
        pushed = [text[at : at + size] for at in range(0, len(text), size)]
        try:
            next(reading)
            while True:
                stream.ended = not pushed
                if pushed:
                    stream.push(pushed.pop(0))
                next(reading)
        except StopIteration as stop:
            found.add((stop.value, "".join(parts), stream.text[stream.at :] + "".join(pushed)))
    [only] = found
    json.loads(only[1])
    return only


@settings(max_examples=100, deadline=None)
@given(value=_VALUES, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans())
def test_json_is_passed_on_unchanged(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert rewritten(text + " x")[:2] == (True, text)


@settings(max_examples=100, deadline=None)
@given(value=_VALUES)
def test_python_literals_become_their_value(value: Any) -> None:
    whole, text, _ = rewritten(repr(value) + " ", PYTHON)
    assert whole and json.loads(text) == value


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab\\\"'nx0u1{}N\n", max_size=10), quote=st.sampled_from("\"'"))
def test_python_strings_are_read_as_python_reads_them(text: str, quote: str) -> None:
    if quote in re.sub(r"\\.", "", text) or "\\N" in text or re.search(r"\\[01]", text):
        return  # the string ends before, or has names of characters or octal numbers, which are not read
    try:
        value = ast.literal_eval(quote + text + quote)
    except (SyntaxError, ValueError):
        return
    assert json.loads(rewritten(quote + text + quote, PYTHON)[1]) == value


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("{'a': 1}", '{"a": 1}'),
        ("{a: b}", '{"a": "b"}'),
        ("[1, 2, ]", "[1, 2 ]"),
        ('{"a": 1,}', '{"a": 1}'),
        ("[True, None, NaN]", "[true, null, null]"),
        ('"a\tb"', '"a\\tb"'),
        ('"\\q\\\'"', '"\\\\q\'"'),
        ("'say \"x\"'", '"say \\"x\\""'),
        ('"\\u12"', '"\\\\u12"'),
        ("(1, (2,))", "[1, [2]]"),
        ("{}", "{}"),
    ],
)
def test_nearly_json_is_corrected(text: str, written: str) -> None:
    assert rewritten(text) == (True, written, "")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("", "null"),
        ("{", "{}"),
        ('{"a', '{"a": null}'),
        ('{"a"', '{"a": null}'),
        ('{"a":', '{"a": null}'),
        ('{"a": "b\\', '{"a": "b"}'),
        ('{"a": "\\u00', '{"a": ""}'),
        ('{"a": fal', '{"a": null}'),
        ('{"a": -12', '{"a": -12}'),
        ('{"a": [1, {"b": 2', '{"a": [1, {"b": 2}]}'),
        ('{"a": [1,', '{"a": [1]}'),
        ('{"a": 1 "b": 2}', '{"a": 1}'),
        ('{"a": [1}', '{"a": [1]}'),
        ('{"a" 1}', '{"a": null}'),
        ("{,}", "{}"),
        ("]", "null"),
    ],
)
def test_what_cannot_be_continued_is_closed(text: str, written: str) -> None:
    assert rewritten(text)[:2] == (False, written)


def test_marked_strings_are_not_escaped() -> None:
    text = '{a:<|"|>x "\\n" {<|"|>,b:[<|"|><|"|>,2]}'
    assert rewritten(text, Notation(quote='<|"|>')) == (True, '{"a":"x \\"\\\\n\\" {","b":["",2]}', "")


@pytest.mark.parametrize(
    ("word", "written"),
    [("007", '"007"'), ("1_000", "1000"), (".5", "0.5"), ("+3", "3"), ("0x1F", "31"), ("1e999x", '"1e999x"')],
)
def test_words(word: str, written: str) -> None:
    assert scalar(word) == written
