"""How the systems under attack are started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.spawner import Spawner
from tests.e2e.system import Process


@pytest.fixture(scope="module", autouse=True)
def spawner(one_spawner: Spawner) -> Iterator[None]:
    """Workers share one import of torch and transformers, but for those of modules that have such a fixture of their
    own: how processes are started is what they attack."""
    Process.spawner = one_spawner
    yield
    Process.spawner = None
