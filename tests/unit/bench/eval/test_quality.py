"""The quality cost of 8 bits per weight or KV element: read as transformers reads it, judged as figures are defined."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.eval import quality
from bench.eval.evaluate import GOLDEN
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.quantization.export import write_rounded
from coordinator.text.tokenizer import TextModel
from deploy.cli import main as cli
from tests.reference import Reference

ITEMS = 5


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Return a file with a few golden items of different skills."""
    lines = GOLDEN.read_text().splitlines()
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(lines[:: len(lines) // ITEMS][:ITEMS]))
    return path


def test_answers_are_read_as_transformers_reads_them(few: Path) -> None:
    checkpoint = open_checkpoint(str(builtin.path()))
    asked = quality.chats(checkpoint, few)
    assert len(asked) == ITEMS and len({len(chat.tokens) for chat in asked}) > 1
    found = quality.log_probabilities(checkpoint, quality.REFERENCE, asked)
    reference = Reference(checkpoint.path, quality.LONGEST)
    rows = [
        torch.from_numpy(reference.logits(chat.tokens))[chat.prompt - 1 : -1].float().log_softmax(-1) for chat in asked
    ]
    assert torch.allclose(found, torch.cat(rows), atol=1e-3)


def test_a_way_is_judged_by_its_own_likelihood_and_by_how_far_it_is_from_the_reference() -> None:
    half, most = math.log(0.5), math.log(0.75)
    reference = torch.tensor([[half, half], [most, math.log(0.25)]])
    other = torch.tensor([[most, math.log(0.25)], [math.log(0.25), most]])
    answers = torch.tensor([0, 0])
    same = quality.judge(reference, reference, answers)
    assert (same.same_token, same.divergence) == (1.0, 0.0)
    assert same.perplexity == pytest.approx(1 / math.sqrt(0.5 * 0.75))
    found = quality.judge(other, reference, answers)
    assert found.same_token == 0.5 and found.perplexity == pytest.approx(1 / math.sqrt(0.75 * 0.25))
    first = half - 0.5 * (most + math.log(0.25))
    second = 0.75 * (most - math.log(0.25)) + 0.25 * (math.log(0.25) - most)
    assert found.divergence == pytest.approx((first + second) / 2)
    changes = math.log(0.75) - half, math.log(0.25) - most
    assert found.uncertainty == pytest.approx(abs(changes[0] - changes[1])), "two standard errors of two tokens"


def test_a_text_is_predicted_in_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, text = open_checkpoint(str(builtin.path())), tmp_path / "text.txt"
    text.write_text("The red box is in the kitchen. " * 120)
    asked = quality.pieces(checkpoint, text)
    model = TextModel(checkpoint.path, vocab_size=checkpoint.vocab_size)
    whole = model.encode(text.read_text(), add_special_tokens=False)
    assert [token for each in asked for token in each.tokens] == whole[: sum(len(each.tokens) for each in asked)]
    assert {len(each.tokens) for each in asked[:-1]} == {quality.PIECE} and all(each.prompt == 1 for each in asked)
    text.write_text("One text. " * 30)
    assert cli.main(["bench", "quality", "--text", str(text)]) == 0
    assert "tokens of 1 pieces of text" in capsys.readouterr().out
    for content in (b"", b"\xff\xfe"):
        text.write_bytes(content)
        assert cli.main(["bench", "quality", "--text", str(text)]) == 1
        assert str(text) in capsys.readouterr().err


def test_quality_command_prints_and_saves_figures(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "quality.json"
    assert cli.main(["bench", "quality", "--golden", str(few), "--save", str(saved)]) == 0
    figures = json.loads(saved.read_text())
    assert figures["answers"] == ITEMS and figures["model_id"] == "built-in", "no path of this machine"
    said = capsys.readouterr().out
    assert f"of {ITEMS} answers" in said
    assert figures["float32"]["same_token"] == 1
    for name in ("int8", "int8, exact", "int4", "int4, exact", "fp8", "fp8 KV", "fp8 and fp8 KV"):
        assert 0 < figures[name]["divergence"] < 0.01, name
        change = figures[name]["perplexity"] / figures["float32"]["perplexity"] - 1
        assert f"{change:+.2%}" in next(line for line in said.splitlines() if line.startswith(f"{name} ")), name
    for way in ("int8", "int8, exact"):
        assert figures[way]["divergence"] < figures["int4, exact"]["divergence"]
    assert figures["bfloat16"]["perplexity"] == pytest.approx(figures["float32"]["perplexity"], rel=0.01)


def test_integer_products_agree_with_exact_ones(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quantized checkpoint is measured with each way of computing, not with other roundings of its weights."""
    out, saved = tmp_path / "int4", tmp_path / "quality.json"
    write_rounded(open_checkpoint(str(builtin.path())), out, 4, 64)
    assert cli.main(["bench", "quality", str(out), "--golden", str(few), "--save", str(saved)]) == 0
    figures = json.loads(saved.read_text())
    assert set(quality.QUANTIZED_WAYS) <= figures.keys() and not {"int8", "int4"} & figures.keys()
    exact, integer = figures["float32"], figures["integer"]
    assert integer["same_token"] >= 0.98 and integer["divergence"] > 0
    assert integer["perplexity"] == pytest.approx(exact["perplexity"], rel=0.005)
    assert "integer, bfloat16" in capsys.readouterr().out


def test_a_model_without_a_chat_template_is_refused(
    checkpoint: Callable[[str], Path], few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "mute")
    (path / "chat_template.jinja").unlink(missing_ok=True)
    assert cli.main(["bench", "quality", str(path), "--golden", str(few)]) == 1
    assert "this model cannot take the golden set" in capsys.readouterr().err


def test_a_golden_set_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "quality", "--golden", str(tmp_path / "nowhere")]) == 1
    assert "cannot read the golden set" in capsys.readouterr().err
