"""Reads PromQL expressions as far as tests need it, and knows the series of ``GET /metrics``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from coordinator.cluster.registry import Registry
from coordinator.metrics import Metrics

ROOT = Path(__file__).parents[1]
PROMETHEUS = ROOT / ".cache" / "prometheus" / "usr" / "bin"
"""Where ``make .cache/prometheus`` puts Debian's programs."""
SCRAPED = frozenset({"job", "instance"})
"""Labels that Prometheus adds to every series that it scrapes."""
OF_PROMETHEUS = {"up": SCRAPED, "ALERTS": SCRAPED | {"alertname", "alertstate", "severity"}}
"""Labels of the series that Prometheus makes itself."""
_RANGE = re.compile(r"\[[^\]]*\]")
_CLAUSE = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\}|\()?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
_WORDS = {"and", "or", "unless", "bool", "offset", "group_left", "group_right"}


def program(name: str) -> Path | None:
    """Return the path of ``prometheus`` or ``promtool``; None if it is not installed."""
    if (own := PROMETHEUS / name).exists():
        return own
    return Path(found) if (found := shutil.which(name)) else None


@cache
def series() -> dict[str, frozenset[str]]:
    """Return the labels of every series of ``GET /metrics`` by its name, with those that Prometheus adds."""
    registry = Metrics("model", Registry(None)).registry
    found: dict[str, frozenset[str]] = {}
    for family in registry.collect():
        owner = family if hasattr(family, "_labelnames") else registry._names_to_collectors[family.name]
        labels = SCRAPED | frozenset(getattr(owner, "_labelnames", ()))
        match family.type:
            case "counter":
                found[f"{family.name}_total"] = labels
            case "histogram":
                found |= {f"{family.name}_sum": labels, f"{family.name}_count": labels}
                found[f"{family.name}_bucket"] = labels | {"le"}
            case _:
                found[family.name] = labels
    return found


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the name of every series that ``expr`` reads, and the labels by which it selects."""
    bare = _CLAUSE.sub(" ", _RANGE.sub(" ", expr))
    for name, rest in _SELECTOR.findall(re.sub(r'"[^"]*"(?![^{]*\})', '""', bare)):
        if rest != "(" and name not in _WORDS and not re.fullmatch(r"[smhd]|e|inf|nan", name, re.IGNORECASE):
            yield name, set(_MATCHER.findall(rest))


def grouped(expr: str) -> set[str]:
    """Return all labels in the clauses ``by``, ``without``, ``on`` and ``ignoring`` of ``expr``."""
    return {label.strip() for clause in _CLAUSE.findall(expr) for label in clause.split(",")} - {""}
