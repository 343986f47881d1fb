"""The saved report of ``make chaos`` has every cell that there is, with the bound of today."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.cells import CELLS

REPORT = Path(__file__).parents[3] / "bench" / "results" / "chaos.md"


def test_every_cell_of_the_matrix_was_measured_against_its_bound() -> None:
    wanted: dict[tuple[str, str, str], dict[str, str]] = {}
    for cell in CELLS:
        turn = f", turn of {cell.turn_s:g}" if cell.turns else ""
        wanted.setdefault((cell.name, cell.expect, cell.measure), {})[cell.phase] = f"of {cell.bound_s:g}{turn}"
    matrix = REPORT.read_text(encoding="utf-8").split("\n## The matrix\n")[1].split("\n## ")[0]
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in matrix.splitlines() if line.startswith("| ")]
    measured = {
        (name, expect, measure): {
            phase: re.sub(r"\d+\.\d+ of", "of", entry) for phase, entry in zip("QPXDS", entries, strict=True) if entry
        }
        for name, expect, measure, *entries, _ in rows[1:]
    }
    assert measured == wanted
