"""Strings that track which of their characters the template wrote: equal to plain strings, with correct origins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.traced import Traced, join, origins, written

own, foreign = st.text("ab -%", max_size=6), st.text("xy\n", max_size=6)
traced = st.lists(own.map(written) | foreign, max_size=5).map(join)
any_text = traced | own.map(written) | foreign
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda text, other: text + other,
    "radd": lambda text, other: other + text,
    "times": lambda text, _: text * 2,
    "join": lambda text, other: text.join([other, other, text]),
    "slice": lambda text, other: text[len(other) :],
    "reverse": lambda text, _: text[::-1],
    "strip": lambda text, _: text.strip(),
    "strip of": lambda text, other: text.strip(other or None),
    "lstrip": lambda text, _: text.lstrip("ax"),
    "rstrip": lambda text, _: text.rstrip(),
    "split": lambda text, _: text.split(),
    "split once": lambda text, _: text.split(None, 1),
    "split at": lambda text, other: text.split(other or "a", 2),
    "rsplit": lambda text, _: text.rsplit(None, 1),
    "rsplit at": lambda text, other: text.rsplit(other or "x", 1),
    "lines": lambda text, _: text.splitlines(),
    "lines with ends": lambda text, _: text.splitlines(True),
    "partition": lambda text, other: text.partition(other or "a"),
    "rpartition": lambda text, other: text.rpartition(other or "x"),
    "replace": lambda text, other: text.replace("a", other),
    "replace one": lambda text, other: text.replace(other or "x", text, 1),
    "prefix": lambda text, other: text.removeprefix(other),
    "suffix": lambda text, other: text.removesuffix(other),
    "upper": lambda text, _: text.upper(),
    "title": lambda text, _: text.title(),
    "letters": lambda text, _: list(text),
    "first": lambda text, _: text[:1] and text[0],
    "percent": lambda text, other: (text.replace("%", "") + written("%s") + text[:0]) % other,
}


@given(text=traced, other=any_text, name=st.sampled_from(sorted(OPERATIONS)))
@settings(max_examples=500, deadline=None)
def test_operations_are_those_of_strings_and_keep_origins(text: Traced, other: str, name: str) -> None:
    operation = OPERATIONS[name]
    result, plain = operation(text, other), operation(str.__str__(text), str.__str__(other))
    results, plains = ([result], [plain]) if isinstance(result, str) else (list(result), list(plain))
    assert results == plains
    for piece in results:
        assert isinstance(piece, Traced) or not piece or not any(origins(text))
        assert [bool(each) for each in origins(piece)] == [char.lower() in "ab -%" for char in piece]


@given(other=foreign)
def test_traced_string_marks_unknown_operands_as_client_text(other: str) -> None:
    mine = written("a{}%d")
    for result in (mine.format(other), mine.center(20), mine.replace("", other), mine % 5, f"{mine}{other}"):
        assert not any(origins(result))
