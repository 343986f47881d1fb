"""The benchmark of control messages beside KV traffic measures every end in every phase, saves its results, and
ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import scaled

pytestmark = pytest.mark.e2e


def test_it_measures_every_end_in_every_phase(tmp_path: Path) -> None:
    saved = tmp_path / "control.json"
    words = ["bench", "control-latency", "--mib", "64", "--idle-s", "0.5", "--save", str(saved)]
    command = [sys.executable, "-m", "deploy.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(90), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(saved.read_text())
    assert found["streamed_bytes"] >= 64 << 20 and found["bytes_per_s"] > 0
    assert list(found["round_trips_ms"]) == ["alone", "beside memory", "streaming"]
    for phase in found["round_trips_ms"].values():
        assert set(phase) == {"coordinator", "prefill", "decode"}
        assert all(0 < each["p50"] <= each["p99"] for each in phase.values())
