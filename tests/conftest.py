"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(kind)`` is the directory of a tiny random checkpoint, written once per session."""
    from tests.models import make_model  # torch and transformers: not for tests that need no model

    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(kind, tmp_path_factory.mktemp("checkpoints") / kind)
        return made[kind]

    return get
