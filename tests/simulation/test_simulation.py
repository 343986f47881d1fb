"""Plays histories of the whole system on virtual time, and verifies that they catch known bugs.

Histories run in a separate interpreter with a fixed iteration order of sets, so that a failing seed replays exactly
with ``python -m tests.simulation --seeds SEED``. Each must also equal its frozen history: ``tests/golden/README.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.golden.mutations import seed_of
from tests.simulation.mutations import MUTATIONS

SEEDS, SAMPLED_SEEDS, CHUNK = 2000, 200, 50
"""Number of histories by default, with ``--sample``, and per test."""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def seeds_of(config: pytest.Config) -> int:
    return SAMPLED_SEEDS if config.getoption("--sample", False) else SEEDS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", range(0, seeds_of(metafunc.config), CHUNK))


@pytest.mark.slow
def test_histories(first: int) -> None:
    done = simulate("--seeds", f"{first}:{first + CHUNK}", "--jobs", "1", "--golden")
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def caught(pytestconfig: pytest.Config) -> set[str]:
    """Return the bugs caught by their histories in ``tests/golden/mutations.txt``, which pass without the bugs (those
    of small seeds in ``test_histories``)."""
    command = [sys.executable, "-m", "tests.golden.mutations", str(seeds_of(pytestconfig))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_known_bug_is_caught(name: str, caught: set[str]) -> None:
    assert name in caught, f"not by seed {seed_of(name)}; to find one that does: make golden ARGS=mutations"


def test_one_seed_is_one_history() -> None:
    once, again = (simulate("--seeds", "7", "--trace").stdout.splitlines() for _ in range(2))
    messages = [line for line in once if " and " in line]
    assert len(messages) > 300 and messages == [line for line in again if " and " in line]
