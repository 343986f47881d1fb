"""Refusals of what this server cannot do: one code for all of them, and never an ignored field."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from common.core.errors import RequestError
from coordinator.api.openai import parse_chat, parse_completion
from coordinator.api.tools import FORMER
from coordinator.api.unsupported import _NEEDED, _NEUTRAL, UNSUPPORTED

COORDINATOR = Path(__file__).parents[4] / "coordinator"
BODIES: dict[Any, dict[str, Any]] = {
    parse_chat: {"messages": [{"role": "user", "content": "hello"}]},
    parse_completion: {"prompt": "hello"},
}
WORDS = ("not supported", "unsupported", "cannot be set by clients", "cannot be false", "deprecated form")


def refusal(parse: Any, fields: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(BODIES[parse] | fields)
    return caught.value


@pytest.mark.parametrize("parse", BODIES)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_cannot_be_obeyed_is_refused(parse: Any, name: str) -> None:
    if parse is parse_chat and name in FORMER:
        return
    for value in ("x", 2, [1], {"a": 1}, {}, True):
        error = refusal(parse, {name: value})
        assert (error.status, error.code, error.param) == (400, "unsupported", name)
        assert "{" not in error.message and len(error.message) > 30
    for value in (None, *_NEUTRAL.get(name, ())):
        assert not parse(BODIES[parse] | {name: value}).options.ignored


@pytest.mark.parametrize("parse", BODIES)
@pytest.mark.parametrize("name", _NEEDED)
def test_what_is_always_so_cannot_be_turned_off(parse: Any, name: str) -> None:
    assert refusal(parse, {name: False}).code == "unsupported"
    assert not parse(BODIES[parse] | {name: True}).options.ignored


def test_every_refusal_of_something_unsupported_has_that_code() -> None:
    """Over all calls in the coordinator's source that refuse a request in such words."""
    found = 0
    for file in sorted(COORDINATOR.glob("**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            text = ast.unparse(node)
            if node.func.id not in ("refuse", "RequestError") or not any(word in text for word in WORDS):
                continue
            found += 1
            codes = ("'unsupported'", "UNSUPPORTED", "code='unsupported_")
            assert any(code in text for code in codes), f"{file.name}:{node.lineno}: {text}"
    assert found > 10
