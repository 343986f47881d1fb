"""Runs the core cells of the failure matrix with relaxed bounds; ``make chaos`` runs all cells with the real bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import matrix
from tests.chaos.cells import CELLS, CORE
from tests.pace import scaled

BUSY_S = scaled(1.5)
"""Allowance on every bound, since tests share their machine; the bounds hold on a quiet one."""


def test_every_cell_has_a_name_of_its_own() -> None:
    names = [cell.id for cell in CELLS]
    assert len(set(names)) == len(names) >= 100
    assert len(CORE) == 16


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.alone
async def test_core_of_the_failure_matrix(tmp_path: Path, subtests: pytest.Subtests) -> None:
    cells = [replace(cell, bound_s=cell.bound_s + BUSY_S) for cell in CORE]
    for result in await matrix.run(cells, tmp_path, clusters=2):
        with subtests.test(result.cell.id):
            assert result.passed, result.wrong
