"""``tandem bench gpu``: a stage that fails costs only itself, runs can be resumed, and models are what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.commands import gpu as command
from bench.goals.figures import Row, table
from bench.gpu import pair
from bench.gpu.handoff import gather_rows
from bench.gpu.loop import nano_vllm_answers
from bench.gpu.shapes import LARGE, SMALL, TINY_LARGE, TINY_SMALL, LlamaShape, make
from bench.gpu.stages import DRY_LIMIT, STAGES, Setting, Stage, StageOutcome, run
from bench.load.results import ROOT
from common.checkpoint.files import open_checkpoint
from common.config.bench.gpu import BenchGpuConfig
from common.core.errors import StartError
from tests.fakes.device_calls import FakeDevice
from tests.pace import scaled

FAKES = "tests.fakes.gpu_stages"


def stage(name: str, limit_s: float = 120.0) -> Stage:
    return Stage(name, "a test", f"{FAKES}:{name}", limit_s)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("cpu", True, tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "failure"),
    [("good", ""), ("fails", "ValueError: no kernel of that name"), ("dies", "its process ended with exit code 7")],
)
def test_outcome_of_a_stage(setting: Setting, name: str, failure: str) -> None:
    outcome = run(setting, stage(name))
    assert outcome.failure == failure
    assert [row.what for row in outcome.rows] == (["a figure"] if name == "good" else [])


@pytest.mark.processes
def test_a_stage_that_hangs_is_ended(setting: Setting) -> None:
    limit_s = scaled(2.0)
    outcome = run(setting, stage("hangs", limit_s / DRY_LIMIT))
    assert outcome.rows == []
    assert outcome.failure == f"not done after {limit_s:.0f} s", "a dry run has more time"


def test_resuming_runs_failed_and_missing_stages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, dict[str, float]]] = []

    def fake(setting: Setting, which: Stage) -> StageOutcome:
        ran.append((which.name, dict(setting.ceilings)))
        if which.name == "kernels" and not resuming:
            return StageOutcome(failure="out of luck", seconds=1.0)
        return StageOutcome([Row("", which.name, "", 1.0, (), detail={"copy_bytes_per_s": 3.0})], "", 1.0)

    monkeypatch.setattr(command, "run_stage", fake)
    save, resuming = tmp_path / "gpu.json", False

    def go(**given: Any) -> int:
        return command.run(BenchGpuConfig(dry=True, save=str(save), checkpoints=str(tmp_path), **given))

    assert go(only="kernels,decode") == 1
    assert ran == [("ceilings", {}), ("kernels", {"copy_bytes_per_s": 3.0}), ("decode", {"copy_bytes_per_s": 3.0})]
    assert "- kernels failed: out of luck" in save.with_suffix(".md").read_text()
    resuming = True
    ran.clear()
    assert go(resume=True) == 0
    assert [name for name, _ in ran] == [name for name in STAGES if name not in ("ceilings", "decode")]
    assert set(json.loads(save.read_text())["stages"]) == set(STAGES)


def test_a_run_of_another_card_is_not_resumed(tmp_path: Path) -> None:
    (save := tmp_path / "gpu.json").write_text(json.dumps({"card": "another", "dry": False, "stages": {}}))
    with pytest.raises(StartError, match="cannot resume"):
        command.run(BenchGpuConfig(dry=True, save=str(save), resume=True, checkpoints=str(tmp_path)))


def test_a_note_of_a_row_without_a_goal_has_no_empty_name() -> None:
    rows = [Row("", "a figure", "", 1.0, (), note="right"), Row("G1", "another", "", 1.0, (), note="fast")]
    assert table(rows)[-2:] == ["- a figure: right.", "- G1, another: fast."]


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(StartError, match="no stage warp"):
        command.chosen("warp")


def test_every_stage_is_there() -> None:
    for each in STAGES.values():
        module, _, name = each.function.partition(":")
        assert callable(getattr(__import__(module, fromlist=[name]), name))


@pytest.mark.parametrize("shape", [SMALL, LARGE, TINY_SMALL, TINY_LARGE], ids=lambda shape: shape.name)
def test_weights_are_those_of_transformers(shape: LlamaShape) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in shape.config().items() if k != "architectures"}))
    counted = sum(part.numel() for name, part in model.named_parameters() if part.dim() == 2 and "embed" not in name)
    assert shape.linear_weights == counted + (shape.hidden * shape.vocabulary if shape.tied else 0)


def test_a_checkpoint_is_whole_and_random(tmp_path: Path) -> None:
    path = make(TINY_SMALL, tmp_path, torch.device("cpu"))
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert open_checkpoint(str(path)).vocab_size == TINY_SMALL.vocabulary
    assert all(0.5 < part.std() / 0.02 < 2 for part in model.parameters() if part.dim() == 2)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert make(TINY_SMALL, tmp_path, torch.device("cpu")) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_the_rate_of_gathering_is_measured_in_each_way() -> None:
    ways = {"one way": FakeDevice(), "another way": FakeDevice()}
    rows = gather_rows(ways, 64, 1, 1e9)
    assert [row.what for row in rows] == ["gather 8 MiB of KV one way", "gather 8 MiB of KV another way"]
    assert all(row.value > 0 and row.share is not None and row.limit == 0.5 for row in rows)
    assert not any(device.allocated for device in ways.values())


def test_the_requests_of_the_batch_are_as_stated() -> None:
    answers = nano_vllm_answers()
    assert len(answers) == 256
    assert all(100 <= length <= 1024 for answer in answers for length in answer)


class _Server:
    """Answers without a hand-off."""

    def __init__(self, url: str, timeout_s: float) -> None: ...

    def model(self) -> str:
        return "tiny"

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"token_ids": [1]}], "tandem": {"path": "local"}}


def test_a_pair_that_hands_nothing_off_fails_in_words(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "running", lambda *_, **__: nullcontext("http://nowhere"))
    monkeypatch.setattr(pair, "HttpClient", _Server)
    with pytest.raises(StartError, match="not handed off: its path is local"):
        pair._answers(setting, setting.folder, [[1, 2, 3]])


@pytest.mark.processes
def test_the_stages_need_no_package_that_only_serving_needs() -> None:
    """The machine of ``make gpu`` may have no network: what it lacks is carried there as wheels."""
    modules = ", ".join(sorted({stage.function.partition(":")[0] for stage in STAGES.values()}))
    code = (
        "import sys\n"
        "for name in ('llguidance', 'prometheus_client', 'jinja2', 'regex', 'yaml'): sys.modules[name] = None\n"
        f"import bench.commands.gpu, common.engine.loading, {modules}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(120), check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_a_dry_run_goes_through_every_stage_without_packages_that_are_not_carried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ("llguidance", "gguf"):
        (absent / f"{name}.py").write_text(f'raise ModuleNotFoundError("No module named {name}", name="{name}")\n')
    monkeypatch.setenv("PYTHONPATH", f"{absent}:{ROOT}")
    options = BenchGpuConfig(dry=True, save=str(tmp_path / "gpu.json"), checkpoints=str(tmp_path))
    assert command.run(options) == 0, capsys.readouterr().out
    goals = {
        row["goal"]
        for stage in json.loads((tmp_path / "gpu.json").read_text())["stages"].values()
        for row in stage["rows"]
    }
    assert goals == {"", *(f"G{number}" for number in range(1, 9))}
