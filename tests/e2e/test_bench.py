"""The benchmarks against real systems: the figures they measure and the advice they print."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.goals import checkpoint as checkpoints
from deploy.cli import main as cli
from tests.unit.deploy.cli.test_main import tandem

SMALL = "--dtype float32 --threads 1 --num-kv-blocks 600 --max-model-len 1024"
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.whole
def test_short_prompts_and_light_load_are_not_disaggregated(
    tmp_path: Path, mock_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every request is in time on every system, so disaggregation is not advised. The command starts and stops its own
    two systems and only sends requests to the server at ``--url``; the run lasts as long as the arrivals."""
    saved, drawn = tmp_path / "compare.json", tmp_path / "compare.png"
    words = "bench compare --systems 1p1d,1c --runs 1 --num-prompts 12 --request-rate 4 --goodput ttft:30000,tpot:10000"
    lengths = "--random-input-len 40 --random-output-len 8"
    files = ["--up-flags", SMALL, "--save", str(saved), "--plot", str(drawn)]
    assert cli.main([*words.split(), *lengths.split(), "--url", mock_url, *files]) == 0
    reported = capsys.readouterr().out
    assert "Do not disaggregate: 1p1d has" in reported and "as the server at --url" in reported
    figures = json.loads(saved.read_text())
    apart, together = (figures["systems"][name]["rounds"][0] for name in ("1p1d", "1c"))
    other = figures["systems"]["other"]["rounds"][0]
    assert apart["completed"] == together["completed"] == other["completed"] == 12
    assert apart["total_input_tokens"] == together["total_input_tokens"] == 12 * 40, "prompts are as long as asked for"
    assert apart["paths"] == {"disagg": 12} and together["paths"] == {"colocated": 12}
    assert apart["stages"]["prefill_ms"]["median_prefill_ms"] > 0
    assert figures["load"]["request_rate"] == 4 and figures["load"]["random_input_len"] == 40
    assert set(figures["systems"]["1p1d"]["busy"]) == {"prefill", "decode"}
    assert drawn.stat().st_size > 10_000


def test_a_system_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["bench", "compare", str(tmp_path / "nowhere"), "--systems", "1c,1p1d"]) == 1
    error = capsys.readouterr().err
    assert "error: 1c did not start" in error and "nowhere" in error


@pytest.mark.alone
def test_goals_are_measured_and_saved_with_their_table(
    tmp_path: Path,
    checkpoint: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Measures the coordinator's goals with workers that compute nothing; whether they are met does not matter here."""
    saved = tmp_path / "goals.json"
    words = ["bench", "goals", "--quick", "--only", "c6", str(checkpoint("llama")), "--save", str(saved)]
    assert cli.main(words) == 0
    figures = json.loads(saved.read_text())
    assert figures["quick"] is True and figures["peers"] is None and figures["failed"] == {}
    median, tail, rate = figures["rows"]
    # both are differences from a bare server over a handful of requests: chance may make them negative
    assert math.isfinite(median["value"]) and math.isfinite(tail["value"])
    assert rate["value"] > 100
    shown = capsys.readouterr().out
    assert shown == saved.with_suffix(".md").read_text() and shown.startswith("| goal | what | value |")


@pytest.mark.whole
def test_goals_of_one_core_and_of_a_start_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a checkpoint made like the goals' own, but too small for its figures to mean anything."""
    sizes = {"HIDDEN": 128, "LAYERS": 2, "HEADS": 4, "KV_HEADS": 2, "INTERMEDIATE": 256}
    for name, size in sizes.items():
        monkeypatch.setattr(checkpoints, name, size)
    saved = tmp_path / "goals.json"
    words = ["bench", "goals", str(checkpoints.make(tmp_path / "small")), "--quick", "--only", "c12,C1,C7"]
    ended = cli.main([*words, "--save", str(saved)])
    figures = json.loads(saved.read_text())
    assert figures["failed"] == {} and figures["left"] == []
    decode, turn, cold, warm = rows = figures["rows"]
    assert [row["goal"] for row in rows] == ["C1", "C7", "C12", "C12"]
    assert ended == 0, "a quick run is not judged"
    assert decode["value"] > 0 and 0 < decode["share"] < 2 and decode["limit"] > 0 and decode["ratio"] is None
    assert 0 < turn["value"] < 100 and 0.5 < cold["value"] < 120 and 0.5 < warm["value"] < 120


@pytest.mark.whole
def test_a_plan_is_made_with_costs_of_real_steps(tmp_path: Path) -> None:
    saved, cost = tmp_path / "plan.json", tmp_path / "cost.json"
    words = "bench plan --systems 1p1d,2c --num-prompts 20 --request-rate 2 --random-input-len 64 --random-output-len 8"
    done = tandem(*words.split(), "--no-lend-cores", "--cost", str(cost), "--save", str(saved), timeout_s=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(cost.read_text())
    streams = dict(map(tuple, found["streams"]))
    assert streams[1] > 0 and found["token"] > 0 and found["kv_bytes"] > 0 and 0 < found["error"] < 1
    assert found["turn"] >= 0
    systems = json.loads(saved.read_text())["systems"]
    rounds = [figures for each in systems.values() for figures in each["rounds"]]
    assert [figures["completed"] for figures in rounds] == [20] * 6
    assert systems["1p1d"]["rounds"][0]["median_ttft_ms"] >= 1000 * (streams[0] + 64 * found["token"]) * 0.99
