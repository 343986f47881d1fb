"""The benchmark of lent cores measures every step with and without one, and gives the reason where it cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.micro import lent_core
from common.kernels import cpu
from tests.pace import scaled

pytestmark = pytest.mark.e2e
COMMAND = [sys.executable, "-m", "deploy.cli", "bench", "lent-core", "--repeats", "2"]


@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_it_measures_each_step_alone_and_with_a_lent_core(tmp_path: Path) -> None:
    command = [*COMMAND, "--save", str(saved := tmp_path / "lent.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(90), check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\| (.+) \| \d+\.\d\d ms \| \d+\.\d\d ms \| \d+\.\d\d \|$", done.stdout, re.MULTILINE)
    assert found == [name for name, _ in lent_core.batches(16)] == list(json.loads(saved.read_text())["steps"])


def test_one_core_cannot_be_lent_to_itself() -> None:
    one = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(one), *COMMAND], capture_output=True, text=True, timeout=scaled(90), check=False
    )
    assert done.returncode == 1 and "one core" in done.stderr and not done.stdout
