"""The benchmark of hand-offs between processes measures both ways of sending and ends."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def test_it_measures_both_ways_of_sending() -> None:
    command = [sys.executable, "-m", "bench.wire", "--tokens", "64", "--repeats", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\| (curve|none) \|(?: \d+\.\d+ \|){3}$", done.stdout, re.MULTILINE) == ["curve", "none"]
