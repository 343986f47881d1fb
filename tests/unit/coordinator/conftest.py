"""Fixtures for tests that query a coordinator over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.checkpoint import fake_checkpoint
from tests.unit.coordinator.fake_cluster import FakeCluster, HeldTokenizer, open_cluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_checkpoint(tmp_path_factory.mktemp("served"), temperature=0.7, top_k=20)


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[FakeCluster]:
    async with open_cluster(model, "prefill", "decode") as cluster:
        yield cluster


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster) -> Iterator[HeldTokenizer]:
    made = HeldTokenizer(monkeypatch, cluster)
    yield made
    made.go_on.set()
