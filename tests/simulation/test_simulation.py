"""Histories of the whole system on virtual time, and the proof that they would notice: known bugs brought back.

Each runs in an interpreter of its own, in which the order of sets is fixed: a seed that fails replays exactly with
``python -m tests.simulation --seeds SEED``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.play import KINDS

SEEDS, SAMPLED_SEEDS, CHUNK = 2000, 500, 50
"""Histories in all, with ``--sample``, and of one test."""
MUTATED_SEEDS = 30 * len(KINDS)
"""At most, as many of each kind; two of three bugs are caught by the first twenty."""
SOONER = {
    "prefill holds everything": 640,
    "fail open": 460,
    "a word is a heartbeat": 400,
    "one heart for ever": 400,
    "a broken connection is a death": 260,
    "breakers never open": 190,
}
"""Where the search begins for those that few histories show, to save time: wherever it begins, as many are played."""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        seeds = SAMPLED_SEEDS if metafunc.config.getoption("--sample") else SEEDS
        metafunc.parametrize("first", range(0, seeds, CHUNK))


def test_histories(first: int) -> None:
    done = simulate("--seeds", f"{first}:{first + CHUNK}", "--jobs", "1")
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_known_bug_is_caught(name: str) -> None:
    first = SOONER.get(name, 0)
    done = simulate("--seeds", f"{first}:{first + MUTATED_SEEDS}", "--jobs", "1", "--mutation", name)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert "caught by seed" in done.stdout


def test_one_seed_is_one_history() -> None:
    once, again = (simulate("--seeds", "7", "--trace").stdout.splitlines() for _ in range(2))
    messages = [line for line in once if " and " in line]
    assert len(messages) > 300 and messages == [line for line in again if " and " in line]
