"""Fixtures of whatever asks a coordinator over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.checkpoint import fake_checkpoint
from tests.unit.coordinator.house import Held, House, open_house


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_checkpoint(tmp_path_factory.mktemp("served"), temperature=0.7, top_k=20)


@pytest.fixture
async def house(model: Path) -> AsyncIterator[House]:
    async with open_house(model, "prefill", "decode") as house:
        yield house


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, house: House) -> Iterator[Held]:
    made = Held(monkeypatch, house)
    yield made
    made.go_on.set()
