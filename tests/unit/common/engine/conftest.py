"""Fixtures shared by the tests of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fakes.device_calls import FakeDevice


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: tiny models are fastest so, above all with several ranks."""
    import torch  # not at the top, which is also read where no test needs torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return ``model(name)``: the directory of a checkpoint of :data:`tests.ranks.KINDS`, written once per session."""
    from tests.models import make_model
    from tests.ranks import KINDS

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            kind, overrides = KINDS[name]
            made[name] = make_model(kind, tmp_path_factory.mktemp("model"), **overrides)
        return made[name]

    return get


@pytest.fixture
def gpus() -> Iterator[list[FakeDevice]]:
    """The fake devices in whose memory are the pools of stand-in GPUs, as they are made."""
    from tests.ranks import fake_gpus

    with fake_gpus() as devices:
        yield devices
