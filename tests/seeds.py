"""Random seeds of parametrized tests."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int, few: int) -> list[Any]:
    """Return the test parameters 0 to ``count`` - 1, of which ``--sample`` keeps only the first ``few``."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(few, count))]
