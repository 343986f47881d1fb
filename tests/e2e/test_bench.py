"""The bench against real systems: what it measures of them, and what it advises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import cli

SMALL = "--dtype float32 --threads 1 --num-kv-blocks 600 --max-model-len 1024"
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_short_prompts_and_light_load_are_not_disaggregated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is in time either way; the run takes as long as its arrivals. Both systems are started and stopped."""
    saved, drawn = tmp_path / "compare.json", tmp_path / "compare.png"
    words = "bench compare --systems 1p1d,1c --runs 1 --num-prompts 12 --request-rate 4 --goodput ttft:30000,tpot:10000"
    lengths = "--random-input-len 40 --random-output-len 8"
    files = ["--up-flags", SMALL, "--save", str(saved), "--plot", str(drawn)]
    assert cli.main([*words.split(), *lengths.split(), *files]) == 0
    assert "Do not disaggregate: 1p1d has" in capsys.readouterr().out
    figures = json.loads(saved.read_text())
    apart, together = (figures["systems"][name]["rounds"][0] for name in ("1p1d", "1c"))
    assert apart["completed"] == together["completed"] == 12
    assert apart["total_input_tokens"] == together["total_input_tokens"] == 12 * 40, "prompts are as long as asked for"
    assert apart["paths"] == {"disagg": 12} and together["paths"] == {"colocated": 12}
    assert apart["stages"]["prefill_ms"]["median_prefill_ms"] > 0
    assert set(figures["systems"]["1p1d"]["busy"]) == {"prefill", "decode"}
    assert drawn.stat().st_size > 10_000


def test_a_system_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["bench", "compare", str(tmp_path / "nowhere"), "--systems", "1c,1p1d"]) == 1
    error = capsys.readouterr().err
    assert "error: 1c did not start" in error and "nowhere" in error
