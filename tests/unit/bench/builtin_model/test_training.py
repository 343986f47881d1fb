"""The training of the built-in model, in miniature: it learns, resumes exactly, and writes files for others to load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from bench.builtin_model.corpus import LATER_SHARES, SHARES, Conversation, conversation, golden
from bench.builtin_model.training import data, export, figures, plot
from bench.builtin_model.training.data import Batches
from bench.builtin_model.training.recipe import DRAFT, MODEL, Recipe
from bench.builtin_model.training.tokenizer import Encoder
from bench.builtin_model.training.train import train
from common.builtin import path

TINY = Recipe(hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, steps=6, batch_tokens=512, piece_tokens=512, seed=3)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(str(path() / "tokenizer.json")))


def losses(room: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (room / "history.jsonl").read_text().splitlines()]


def test_a_stopped_run_goes_on_as_if_it_had_not_been(encoder: Encoder, tmp_path: Path) -> None:
    whole = train(TINY, encoder, tmp_path / "whole", threads=2)
    train(TINY, encoder, tmp_path / "parts", stop_at=3)
    parts = train(TINY, encoder, tmp_path / "parts")
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "parts"), rel=1e-3)
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    for ours, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_a_checkpoint_is_read_as_it_was_written_and_its_draft_beside_it(encoder: Encoder, tmp_path: Path) -> None:
    model = train(TINY, encoder, tmp_path / "model", stop_at=1)
    export.write(model, encoder, tmp_path / "out", path())
    teacher = export.read(tmp_path / "out")
    torch.testing.assert_close(teacher.lm_head.weight.float(), model.lm_head.weight, rtol=1e-2, atol=1e-2)
    draft = train(replace(TINY, seed=4), encoder, tmp_path / "draft", teacher=teacher, stop_at=1)
    items = golden()[:4]
    assert figures.agreement(model, model, encoder, items) == 1.0
    draft.model.norm.weight.data.neg_()  # the least likely token becomes the most likely one
    assert figures.agreement(model, draft, encoder, items) == 0.0
    export.write_card({"world": 0.5}, {"world": 4}, model, draft, tmp_path / "out")
    assert "| world | 4 | 50.0% |" in (tmp_path / "out" / "MODEL_CARD.md").read_text()


def test_batched_answers_equal_single_answers(encoder: Encoder, tmp_path: Path) -> None:
    model = train(TINY, encoder, tmp_path / "model", stop_at=2)
    items = golden()[:3]
    together = figures.answers(model, encoder, items)
    assert together == [figures.answers(model, encoder, [item])[0] for item in items]
    assert set(figures.per_skill(figures.judged(model, encoder, items))) == {"smalltalk"}


def test_the_loss_curve_is_a_picture(encoder: Encoder, tmp_path: Path) -> None:
    train(TINY, encoder, tmp_path, look=lambda model, step: {"world": step / 10}, look_every=2)
    picture = plot.loss_curve(tmp_path, tmp_path)
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")


def test_batches_are_repeatable_and_give_padding_no_weight(encoder: Encoder) -> None:
    batches = Batches(encoder, TINY)
    pieces, again = batches[4], batches[4]
    batches.close()
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(pieces, again, strict=True))
    for ids, weights in pieces:
        assert weights[ids == encoder.pad].sum() == 0
        assert (weights.sum(1) > 0).all()
        assert (ids[:, 0] == encoder.bos).all()


def test_later_batches_are_drawn_by_other_shares(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def note(rng: Random, shares: Mapping[str, int]) -> Conversation:
        drawn.append(shares)
        return conversation(rng, shares)

    monkeypatch.setattr(data, "conversation", note)
    batches = Batches(encoder, replace(TINY, steps=10, later=0.5))
    for step, shares in ((0, SHARES), (4, SHARES), (5, LATER_SHARES), (9, LATER_SHARES)):
        drawn.clear()
        batches._make(step)
        assert all(each is shares for each in drawn)
    batches.close()


def test_the_recipes_make_models_of_the_promised_sizes() -> None:
    from transformers import LlamaForCausalLM

    sizes = [
        sum(weight.numel() for weight in LlamaForCausalLM(recipe.config(0, [1], 2)).parameters())
        for recipe in (MODEL, DRAFT)
    ]
    assert 3e6 <= sizes[0] <= 8e6
    assert sizes[1] <= 1e6
