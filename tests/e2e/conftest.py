"""Systems and oracles for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.system import MODEL_LEN
from tests.reference import Reference


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """``oracle(kind)`` is the reference for a system that serves ``kind`` at the tests' context length."""
    made: dict[str, Reference] = {}

    def get(kind: str) -> Reference:
        if kind not in made:
            made[kind] = Reference(checkpoint(kind), MODEL_LEN)
        return made[kind]

    return get
