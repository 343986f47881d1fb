"""A measurement reports other work on the machine."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from bench.load import neighbours

BEFORE = """cpu  9 0 9 99 9 0 0 0 0 0
cpu0 10 0 5 100 2 0 0 0 0 0
cpu1 10 0 5 100 2 0 0 0 3 0
cpu2 1 1 1 1 1 1 1 1 1 1
intr 5
"""
AFTER = """cpu  9 0 9 99 9 0 0 0 0 0
cpu0 20 5 10 180 2 0 0 0 0 0
cpu1 10 0 5 190 12 0 0 0 9 0
cpu2 9 1 1 1 1 1 1 1 1 1
intr 6
"""


def test_used_share_excludes_idle_and_iowait() -> None:
    assert neighbours.used(BEFORE, AFTER, {0}) == pytest.approx(20 / 100)
    assert neighbours.used(BEFORE, AFTER, {1}) == 0, "a guest's time is in the user's already"
    assert neighbours.used(BEFORE, AFTER, {0, 1}) == pytest.approx(20 / 200)
    assert neighbours.used(BEFORE, BEFORE, {0, 1}) == neighbours.used(BEFORE, AFTER, {7}) == 0


@pytest.mark.processes
def test_busy_share_detects_neighbour_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as busy:
        try:
            assert busy.stdout and busy.stdout.readline()
            cores = os.sched_getaffinity(0)
            assert neighbours.busy_share(cores) > 0.5 / len(cores)
        finally:
            busy.kill()


@pytest.mark.parametrize(("share", "said"), [(0.05, False), (0.64, True)])
def test_it_is_said_where_it_is_much(share: float, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "busy_share", lambda cores: share)
    shown = io.StringIO()
    neighbours.note(Console(file=shown))
    assert ("other processes take 64% of these cores" in shown.getvalue()) is said
