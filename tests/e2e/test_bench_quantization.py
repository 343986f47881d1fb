"""The benchmark of quantized weights serves the same model in each way and compares the first way with the others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.kernels import cpu
from tests.pace import scaled

COMMAND = [sys.executable, "-m", "deploy.cli", "bench", "quantization"]


@pytest.mark.e2e
@pytest.mark.whole
@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels")
def test_it_serves_each_way_in_turn(tmp_path: Path) -> None:
    saved = tmp_path / "quantization.json"
    command = [*COMMAND, "--ways", "none,int8", "--rounds", "1", "--threads", "1", "--save", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(170), check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\| (none|int8) \| (.+) \| [\d.,]+ \w+(?:/s)? \| (\d+\.\d\d) \|$", done.stdout, re.MULTILINE)
    assert len(found) == 8 and {ratio for name, _, ratio in found if name == "none"} == {"1.00"}
    assert list(json.loads(saved.read_text())["ways"]) == ["none", "int8"]


@pytest.mark.e2e
@pytest.mark.whole
def test_a_model_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    done = subprocess.run([*COMMAND, str(missing)], capture_output=True, text=True, timeout=scaled(90), check=False)
    assert done.returncode == 1 and str(missing) in done.stderr and "Traceback" not in done.stderr
