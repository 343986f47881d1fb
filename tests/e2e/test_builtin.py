"""The built-in model on real systems: its results on the golden set are those of the model card in every topology."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.eval.evaluate import EvaluationReport, drops, evaluate
from common import builtin
from tests.e2e.system import RunningSystem

pytestmark = pytest.mark.e2e

BASELINE = Path(__file__).parents[2] / "bench" / "eval" / "golden" / "baseline.json"
SMALL = ("--threads", "1", "--num-kv-blocks", "1024")
Figures = Callable[..., EvaluationReport]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """Return a function that starts a system, evaluates the golden set on it, and stops it."""

    def measure(*flags: str, model: Path | None = None) -> EvaluationReport:
        with RunningSystem.up(
            tmp_path_factory.mktemp("served"), model or builtin.path(), *flags, small=SMALL
        ) as system:
            return asyncio.run(evaluate(system.url, concurrency=16))

    return measure


@pytest.fixture(scope="module")
def baseline() -> EvaluationReport:
    return EvaluationReport.load(BASELINE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="1P1D"),
        pytest.param(("--colocated", "1"), id="colocated", marks=pytest.mark.whole),
        pytest.param(("--dtype", "float32"), id="1P1D in float32", marks=pytest.mark.whole),
    ],
)
def test_the_figures_are_the_same_whatever_serves_it(
    flags: tuple[str, ...], figures: Figures, baseline: EvaluationReport
) -> None:
    report = figures(*flags)
    assert not drops(report, baseline, 0.01, 0.05)
    assert abs(report.total.share - baseline.total.share) <= 0.01


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_damaged_weights_show_as_a_drop(figures: Figures, baseline: EvaluationReport, tmp_path: Path) -> None:
    """Noise with the weights' own standard deviation in one projection of one layer lowers the results."""
    model = tmp_path / "damaged"
    shutil.copytree(builtin.path(), model, ignore=shutil.ignore_patterns(builtin.draft_path().name))
    weights = load_file(model / "model.safetensors")
    name = "model.layers.2.self_attn.q_proj.weight"
    noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    weights[name] += (noise * weights[name].float().std()).to(weights[name].dtype)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert any(found.startswith("all fell") for found in drops(figures(model=model), baseline, 0.01, 0.05))


def test_model_card_matches_evaluation_baseline(baseline: EvaluationReport) -> None:
    text = (builtin.path() / "MODEL_CARD.md").read_text(encoding="utf-8")
    reported = dict(re.findall(r"^\| (\w+) \| \d+ \| ([\d.]+)% \|$", text, re.MULTILINE))
    skills = {skill: f"{100 * found.share:.1f}" for skill, found in baseline.skills.items()}
    assert {skill: reported.get(skill) for skill in skills} == skills
    assert float(reported["draft_agreement"]) >= 60


def test_it_is_as_small_as_promised() -> None:
    files = [path for path in builtin.path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16 * 2**20
    config = json.loads((builtin.path() / "config.json").read_text())
    draft = json.loads((builtin.draft_path() / "config.json").read_text())
    assert config["vocab_size"] == draft["vocab_size"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (builtin.path() / name).read_bytes() == (builtin.draft_path() / name).read_bytes()
