"""The Grafana dashboards: their files are those of today, and every expression reads series that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deploy.cli import dashboards
from deploy.cli.dashboards import DASHBOARDS, Dashboard
from tests.promql import OF_PROMETHEUS, grouped, selectors, series

EXPRESSIONS = [
    pytest.param(query.expr, query.legend, id=f"{dashboard.name}: {panel.title}: {query.legend}")
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for query in panel.queries
]


def test_the_files_are_those_of_today() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in dashboards.FOLDER.glob("*")}
    assert written == dashboards.files(), "run: make docs"


@pytest.mark.parametrize(("expr", "legend"), EXPRESSIONS)
def test_an_expression_reads_what_exists(expr: str, legend: str) -> None:
    known = series() | OF_PROMETHEUS
    names = set()
    labels: set[str] = set()
    for name, matched in selectors(expr):
        assert name in known, name
        assert matched <= known[name], name
        names.add(name)
        labels |= known[name]
    assert names, "it reads nothing"
    by = grouped(expr)
    assert by <= labels
    assert names == {"ALERTS"} or dashboards.CHOSEN in expr, "it reads all coordinators"
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert shown <= (by or labels), "the legend shows a label that the result does not have"
    assert by - {"le"} <= shown or not legend, "two series would have one legend"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_panels_fill_the_grid_without_overlap(dashboard: Dashboard) -> None:
    shown: Any = json.loads(dashboards.files()[f"{dashboard.name}.json"])
    cells = set()
    for panel in shown["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= dashboards.WIDTH
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    titles = [panel.title for panel in dashboard.panels]
    assert len(set(titles)) == len(titles)
    assert shown["uid"] == dashboard.name and len(dashboard.name) <= 40
    ids = [panel["id"] for panel in shown["panels"]]
    assert len(set(ids)) == len(ids)


def test_a_wrong_name_or_label_would_be_seen() -> None:
    """The reader of expressions finds names, matchers and clauses."""
    expr = 'sum by (role, le) (rate(vllm:x_bucket{a="1", b=~"x|y{2}"}[$__rate_interval])) / on (job) up or vector(0)'
    assert dict(selectors(expr.replace("{2}", ""))) == {"vllm:x_bucket": {"a", "b"}, "up": set()}
    assert grouped(expr) == {"role", "le", "job"}
