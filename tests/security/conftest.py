"""The spawner for the systems under attack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.spawner import Spawner
from tests.e2e.system import TandemProcess


@pytest.fixture(scope="module", autouse=True)
def spawner(one_spawner: Spawner) -> Iterator[None]:
    """Let the workers share one import of torch and transformers. Modules that test how processes are started override
    this fixture."""
    TandemProcess.spawner = one_spawner
    yield
    TandemProcess.spawner = None
