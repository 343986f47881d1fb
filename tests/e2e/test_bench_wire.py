"""The benchmark of hand-offs between processes measures every link, saves its results, and ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.micro.wire import LINKS
from tests.pace import scaled

pytestmark = pytest.mark.e2e


def test_it_measures_every_link(tmp_path: Path) -> None:
    saved = tmp_path / "wire.json"
    words = ["bench", "wire", "--tokens", "64", "--repeats", "2", "--save", str(saved)]
    command = [sys.executable, "-m", "deploy.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(90), check=False)
    assert done.returncode == 0, done.stderr
    names = [name for name, _, _ in LINKS]
    assert re.findall(r"^\| ([\w, ]+) \|(?: \d+\.\d+ \|){3}$", done.stdout, re.MULTILINE) == names
    rates = json.loads(saved.read_text())["bytes_per_s"]
    assert list(rates) == names and all(len(each) == 2 and min(each) > 0 for each in rates.values())
