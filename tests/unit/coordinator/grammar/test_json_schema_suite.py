"""The official JSON-Schema-Test-Suite: no value that it calls invalid is allowed, and what is refused is named.

``make schema-suite`` fetches the suite. Without it there is nothing to test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.grammar.task import Answer, Task
from tests.unit.coordinator.grammar.matching import accepts, verdict

SUITE = Path(__file__).parents[4] / ".cache/json-schema-test-suite/tests/draft2020-12"
pytestmark = pytest.mark.skipif(not SUITE.is_dir(), reason="make schema-suite fetches the suite")


def groups() -> Iterator[Any]:
    for file in sorted([*SUITE.glob("*.json"), *SUITE.glob("optional/format/*.json")]):
        for group in json.loads(file.read_text()):
            yield pytest.param(group, id=f"{file.stem}-{group['description']}"[:80])


@pytest.mark.parametrize("group", list(groups()))
def test_the_official_suite(group: Any) -> None:
    made = verdict(Task(Answer("json_schema", group["schema"])))
    if made.error:
        assert made.code and not made.grammar
        return
    for test in group["tests"]:
        text = json.dumps(test["data"], ensure_ascii=False)
        allowed = accepts(made.grammar, text)
        assert not allowed or test["valid"], test["description"]
