"""A measurement is repeated if it was late while the host took CPU time, and for no other reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.chaos import host
from tests.chaos.host import TAKEN, TRIES, Taken, undisturbed
from tests.pace import scaled

ROOT = Path(__file__).parents[3]


class Times(NamedTuple):
    user: float
    nice: float
    system: float
    idle: float
    steal: float


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[Times]:
    """The CPU times that the system reports; the last entry is the current one."""
    monkeypatch.setattr(host, "CALM_S", 0.01)
    said = [Times(5.0, 1.0, 2.0, 100.0, 3.0)]
    monkeypatch.setattr(host.psutil, "cpu_times", lambda: said[-1])
    return said


def spend(clock: list[Times], busy_s: float, stolen_s: float) -> None:
    then = clock[-1]
    clock.append(then._replace(user=then.user + busy_s, idle=then.idle + 50.0, steal=then.steal + stolen_s))


def test_taken_share_is_relative_to_wanted_time(clock: list[Times]) -> None:
    taken = Taken()
    assert taken.share() == 0.0
    spend(clock, 3.0, 1.0)
    assert taken.share() == 0.25


@pytest.mark.parametrize(
    ("late", "share", "plays"),
    [("late", 2 * TAKEN, TRIES), ("late", TAKEN / 2, 1), ("", 0.9, 1)],
    ids=["the host's fault", "our fault", "in time"],
)
async def test_late_run_on_disturbed_host_is_repeated(clock: list[Times], late: str, share: float, plays: int) -> None:
    played = 0

    async def play() -> int:
        nonlocal played
        played += 1
        spend(clock, 1.0 - share, share)
        return played

    assert await undisturbed(play, lambda _: late) == plays == played


async def test_the_first_undisturbed_play_counts(clock: list[Times]) -> None:
    shares = iter([0.9, 0.0, 0.9])

    async def play() -> float:
        share = next(shares)
        spend(clock, 1.0 - share, share)
        return share

    assert await undisturbed(play, lambda share: "late") == 0.0


ALONE = """
import psutil, pytest
from tests.conftest import pytest_collection_modifyitems, pytest_runtest_setup
from tests.unit.harness.test_chaos_host import Times

said = Times(0.0, 0.0, 0.0, 0.0, 0.0)
psutil.cpu_times = lambda: said

def spend(busy_s, stolen_s):
    global said
    said = said._replace(user=said.user + busy_s, steal=said.steal + stolen_s)
"""
TESTS = """
import pytest, conftest

times = []

@pytest.mark.alone
@pytest.mark.parametrize("shares", [[0.5, 0.5, 0.5], [0.5, 0.0], [0.0]], ids=["taken", "calm again", "calm"])
def test_it_fails(shares):
    times.append(shares)
    share = shares[times.count(shares) - 1]
    conftest.spend(1.0 - share, share)
    assert False

@pytest.mark.alone
def test_it_is_in_time_when_the_host_is_calm():
    times.append("in time")
    conftest.spend(1.0, 1.0)
    assert times.count("in time") == 2

def test_others_are_run_once():
    conftest.spend(0.0, 1.0)
    assert False
"""


@pytest.mark.processes
def test_a_test_that_is_to_be_alone_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_times.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(ALONE)
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "--import-mode=prepend"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:randomly", "-p", "no:cacheprovider", tmp_path],
        capture_output=True, text=True, cwd=ROOT, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert "4 failed, 1 passed, 4 rerun" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("RERUN ") == 4, "and says so"
