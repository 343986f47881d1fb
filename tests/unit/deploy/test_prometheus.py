"""Rules of Prometheus: they read series that exist, each alert has an entry in the runbook and fires on its fault."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.promql import OF_PROMETHEUS, ROOT, SCRAPED, grouped, program, selectors, series

FOLDER = ROOT / "deploy" / "prometheus"
RUNBOOK = ROOT / "docs" / "operate" / "runbook.md"
SEVERITIES = {"critical", "warning", "info"}
needs_promtool = pytest.mark.skipif(program("promtool") is None, reason="no promtool: make .cache/prometheus")


def _rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in _rules("alerts.yml")}
RECORDED = {rule["record"]: rule["expr"] for rule in _rules("recording.yml")}


def _known() -> dict[str, frozenset[str]]:
    recorded = {name: frozenset(grouped(expr)) - {"le"} for name, expr in RECORDED.items()}
    return series() | OF_PROMETHEUS | recorded


def _expressions() -> Iterator[Any]:
    for name, expr in RECORDED.items():
        yield pytest.param(expr, id=name)
    for name, rule in ALERTS.items():
        yield pytest.param(rule["expr"], id=name)


@pytest.mark.parametrize("expr", [*_expressions()])
def test_a_rule_reads_what_exists(expr: str) -> None:
    known, labels = _known(), set(SCRAPED)
    for name, matched in selectors(expr):
        assert name in known, name
        assert matched <= known[name], name
        labels |= known[name]
    assert grouped(expr) <= labels


def test_a_recorded_series_is_named_after_its_labels() -> None:
    """The first part of the name says which labels are left, as Prometheus' documentation advises."""
    for name, expr in RECORDED.items():
        level = set(name.partition(":")[0].split("_"))
        assert level | {"job"} == grouped(expr) - {"le"}, name


def test_each_alert_says_how_bad_it_is_and_where_its_entry_is() -> None:
    for name, rule in ALERTS.items():
        assert re.fullmatch(r"Tandem[A-Z]\w+", name)
        assert rule["labels"]["severity"] in SEVERITIES, name
        assert rule["annotations"]["summary"].strip().endswith("."), name
        assert rule["annotations"]["runbook_url"] == f"docs/operate/runbook.md#{name.lower()}"


def test_the_runbook_has_an_entry_for_each_alert_and_no_other() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    entries = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    assert entries[::2] == list(ALERTS), "in the order of the alerts"
    for name, entry in zip(entries[::2], entries[1::2], strict=True):
        meaning, see, do = re.split(r"^- (?:See|Do): ", entry, flags=re.MULTILINE)
        assert meaning.strip() and see.strip() and do.strip(), name


def test_the_fault_of_each_alert_is_played() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = [re.findall(r"Tandem\w+", str(test["promql_expr_test"])) for test in tests]
    assert {name for names in fired for name in names} == set(ALERTS)
    assert [] in fired, "some systems are healthy"


@needs_promtool
@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "recording.yml", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    found = program("promtool")
    assert found is not None
    done = subprocess.run([found, *words], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_loads_all_rules() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    assert sorted(config["rule_files"]) == sorted(path.name for path in FOLDER.glob("*.yml") if _has_rules(path))
    assert [each["job_name"] for each in config["scrape_configs"]] == ["tandem"], "the job that the rules name"


def _has_rules(path: Path) -> bool:
    return "groups" in yaml.safe_load(path.read_text(encoding="utf-8"))
