"""The page ``docs/reference/clients.md``, from the results of the checks on each route."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTE = "<!-- Written by `make conformance`; do not edit. -->"
_SPECIAL, _ESCAPED = re.compile(r"([|<>*_])"), r"\\\1"
INTRODUCTION = """\
Each line was tried with the client itself, unchanged, against one prefill and one decode worker with the built-in
model: directly, and behind nginx and HAProxy with their defaults. Every body and every event of a stream was validated,
those of chat completions, completions, models and errors against OpenAI's published schemas, those of responses and
messages against the types of OpenAI's and Anthropic's clients. No client reached any other machine. `make conformance`
runs all of it again."""
Result = Mapping[str, Any]


def page(routes: Mapping[str, Sequence[Result] | str], versions: Mapping[str, str]) -> str:
    """``routes``: the results of each route, or why there are none; ``versions``: those of proxies."""
    first = next(results for results in routes.values() if not isinstance(results, str))
    parts = ["# Clients", NOTE, INTRODUCTION, _summary(first, routes, versions)]
    absent = [f"- {name}: not tried, {why}." for name, why in routes.items() if isinstance(why, str)]
    if absent:
        parts.append("\n".join(absent))
    refused = {result["check"]: result for result in first if result["outcome"] == "refused"}
    parts += ["## What is refused on purpose", _table(("client", "feature", "why"), map(_reason, refused.values()))]
    skipped = [result for result in first if result["outcome"] == "skipped"]
    if skipped:
        parts += ["## What could not be tried", _table(("client", "feature", "why"), map(_reason, skipped))]
    for client in dict.fromkeys(result["client"] for result in first):
        parts += [f"## {_title(client, first)}", _features(client, routes)]
    return "\n\n".join(parts) + "\n"


def counts(results: Iterable[Result]) -> dict[str, int]:
    """How many results have each outcome."""
    found = dict.fromkeys(("ok", "refused", "skipped", "failed"), 0)
    for result in results:
        found[result["outcome"]] += 1
    return found


def _title(client: str, results: Sequence[Result]) -> str:
    return next(f"{client} {result['version']}" for result in results if result["client"] == client)


def _summary(first: Sequence[Result], routes: Mapping[str, Sequence[Result] | str], versions: Mapping[str, str]) -> str:
    tried = {name: results for name, results in routes.items() if not isinstance(results, str)}
    header = ["client", *(f"{name} {versions.get(name, '')}".strip() for name in tried)]
    rows = []
    for client in dict.fromkeys(result["client"] for result in first):
        cells = [
            ", ".join(
                f"{count} {outcome}"
                for outcome, count in counts(each for each in results if each["client"] == client).items()
                if count
            )
            for results in tried.values()
        ]
        rows.append([_title(client, first), *cells])
    return _table(header, rows)


def _reason(result: Result) -> tuple[str, str, str]:
    return result["client"], result["feature"], result["reason"]


def _features(client: str, routes: Mapping[str, Sequence[Result] | str]) -> str:
    tried = {name: results for name, results in routes.items() if not isinstance(results, str)}
    rows: dict[str, list[str]] = {}
    for position, results in enumerate(tried.values()):
        for result in results:
            if result["client"] == client:
                row = rows.setdefault(result["feature"], [""] * len(tried))
                row[position] = result["outcome"]
    return _table(("feature", *tried), ((feature, *cells) for feature, cells in rows.items()))


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(header)
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    lines += [f"| {' | '.join(_SPECIAL.sub(_ESCAPED, cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)
