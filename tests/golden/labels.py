"""Parses the samples of a metrics page and their label values."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def sample(line: str) -> tuple[str, dict[str, str], float] | None:
    """Return name, labels and value of a line of the page; None for a comment."""
    if line.startswith("#") or not (found := _LINE.fullmatch(line)):
        return None
    return found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])


def seen(page: str) -> Iterator[str]:
    """Yield each labelled sample without its value: all gauges, and counters and histograms that are not 0."""
    kind = ""
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            kind = line.split(" ")[3]
        elif found := sample(line):
            name, labels, value = found
            if labels and "le" not in labels and not name.endswith(("_created", "_sum")) and (value or kind == "gauge"):
                yield f"{name}{{{','.join(f'{label}={labels[label]}' for label in labels)}}}"
