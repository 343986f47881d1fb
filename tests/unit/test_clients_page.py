"""docs/reference/clients.md is of the pinned clients and of the refusals that `make conformance` expects."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conformance import report
from tests.conformance.refused import REFUSED

ROOT = Path(__file__).parents[2]
CONFORMANCE = ROOT / "tests" / "conformance"
PAGE = (ROOT / "docs" / "reference" / "clients.md").read_text()
PYTHON = (
    "openai",
    "anthropic",
    "langchain-openai",
    "instructor",
    "pydantic-ai-slim",
    "openai-agents",
    "litellm",
    "llm",
)


def test_nothing_has_failed_on_any_route() -> None:
    assert report.NOTE in PAGE
    assert "failed" not in PAGE
    assert "not tried" not in PAGE  # it was written where nginx and HAProxy are installed


@pytest.mark.parametrize("client", PYTHON)
def test_the_page_is_of_the_pinned_version(client: str) -> None:
    apart = "-pydantic-ai" if client == "pydantic-ai-slim" else ""
    pins = (CONFORMANCE / f"requirements{apart}.txt").read_text()
    (version,) = re.findall(rf"^{client}==(.+)$", pins, re.MULTILINE)
    assert f"## {client} {version}\n" in PAGE, "run: make conformance"


def test_the_page_is_of_the_pinned_ai_sdk() -> None:
    packages = json.loads((CONFORMANCE / "clients" / "package.json").read_text())["dependencies"]
    assert f"## AI SDK {packages['ai']}\n" in PAGE, "run: make conformance"


def test_every_refusal_is_listed_with_its_reason() -> None:
    listed = PAGE.partition("## What is refused on purpose")[2].partition("\n## ")[0]
    assert listed.count("\n| ") == len(REFUSED) + 1
    assert all(refusal.reason in listed for refusal in REFUSED.values())


def test_results_become_a_table_with_a_column_per_route() -> None:
    result = {"client": "c", "version": "1", "check": "c.a", "feature": "a_b", "outcome": "ok", "reason": ""}
    refused = {**result, "check": "c.r", "feature": "r", "outcome": "refused", "reason": "no"}
    page = report.page(
        {"direct": [result, refused], "nginx": [result], "HAProxy": "it is not installed"}, {"nginx": "2"}
    )
    assert "| client | direct | nginx 2 |" in page and "| c 1 | 1 ok, 1 refused | 1 ok |" in page
    assert "- HAProxy: not tried, it is not installed." in page
    assert r"| a\_b | ok | ok |" in page and "| r | refused |  |" in page and "| c | r | no |" in page
