"""The spawner and the oracle for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.spawner import Spawner
from tests.e2e.system import MODEL_LEN, TandemProcess
from tests.reference import Reference


@pytest.fixture(scope="module", autouse=True)
def spawner(one_spawner: Spawner) -> Iterator[None]:
    """Let the workers of all systems in this folder share one import of torch and transformers."""
    TandemProcess.spawner = one_spawner
    yield
    TandemProcess.spawner = None


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """Return ``oracle(kind)``: the reference for a system that serves ``kind`` at the tests' context length."""
    made: dict[str, Reference] = {}

    def get(kind: str) -> Reference:
        if kind not in made:
            made[kind] = Reference(checkpoint(kind), MODEL_LEN)
        return made[kind]

    return get
