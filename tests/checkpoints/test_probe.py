"""The start-up check finds what 32 tokens do not show: windows that only the mask has, and positions that do not begin
at 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.attention.interface import Params
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.model.load import load_model
from common.model.masks import difference
from common.model.probe import Probe, probe
from tests.models import HEAD_DIM, make_of

PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_norm_epsilon": 1e-5}
ROBERTA = {"is_decoder": True, "max_position_embeddings": 514, "type_vocab_size": 1}
CPU = torch.device("cpu")


def probed(directory: Path) -> Probe:
    checkpoint = open_checkpoint(str(directory))
    return probe(load_model(checkpoint, "float32"), checkpoint)


def refusal(directory: Path) -> str:
    with pytest.raises(StartError) as caught:
        probed(directory)
    return caught.value.why


def test_a_window_that_only_the_mask_knows(tmp_path: Path) -> None:
    """phimoe makes a mask with the window but calls attention without it. 32 tokens do not reach the window."""
    said = refusal(make_of("phimoe", tmp_path, **PHIMOE, sliding_window=64))
    assert "shows the token at position 64 64 tokens, but the window it passes is none" in said


@pytest.mark.parametrize("window", [None, 4096, 9000])
def test_a_window_that_no_request_reaches_is_none(window: int | None, tmp_path: Path) -> None:
    assert len(probed(make_of("phimoe", tmp_path, **PHIMOE, sliding_window=window)).layers) == 3


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert"])
def test_positions_that_begin_behind_the_padding_id(kind: str, tmp_path: Path) -> None:
    """These number tokens from the id of padding + 1 on. With positions from 0 on, both attentions agree with each
    other and are wrong."""
    assert "gives tokens other positions than 0, 1, 2" in refusal(make_of(kind, tmp_path, **ROBERTA))


def test_a_decoder_of_the_same_kind_with_positions_from_zero(tmp_path: Path) -> None:
    assert len(probed(make_of("bert", tmp_path, **ROBERTA)).layers) == 3


def test_a_model_that_sees_later_tokens(tmp_path: Path) -> None:
    assert "tokens see later ones" in refusal(make_of("bert", tmp_path, **(ROBERTA | {"is_decoder": False})))


def test_a_declared_window_that_no_layer_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that makes its masks itself gives nothing to compare."""
    directory = make_of("llama", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    assert len(probed(directory).layers) == 3, "the mask shows that the window is not used"
    monkeypatch.setattr("common.model.masks.MaskRecorder._see", lambda *_: None)
    assert "sliding window of 64 tokens that no layer passes" in refusal(directory)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "gpt2"])
def test_models_that_pass_their_windows(kind: str, checkpoint: Callable[[str], Path]) -> None:
    assert probed(checkpoint(kind)).layers


def window_of(width: int) -> Callable[..., torch.Tensor]:
    return lambda batch, head, query, key: (key <= query) & (key > query - width)


def chunks_of(width: int) -> Callable[..., torch.Tensor]:
    return lambda batch, head, query, key: (key <= query) & (key // width == query // width)


def looked_up(length: int) -> Callable[..., torch.Tensor]:
    allowed = torch.ones(length, dtype=torch.bool)
    return lambda batch, head, query, key: (key <= query) & allowed[key]


@pytest.mark.parametrize(
    ("rule", "window", "words"),
    [
        (window_of(64), 64, ""),
        (window_of(10**9), None, ""),
        (window_of(10**9), 5000, ""),
        (window_of(64), None, "window it passes is none"),
        (window_of(64), 63, "window it passes is 63"),
        (window_of(64), 65, "window it passes is 65"),
        (window_of(10**9), 64, "window it passes is 64"),
        (chunks_of(64), None, "window it passes is none"),
        (chunks_of(64), 64, "window it passes is 64"),
        (lambda batch, head, query, key: query >= 0, None, "see later"),
        (looked_up(32), None, ""),
    ],
)
def test_masks_are_compared_with_windows(rule: Any, window: int | None, words: str) -> None:
    said = difference(rule, Params(HEAD_DIM**-0.5, window), 5000, CPU)
    assert words in said and bool(said) == bool(words)
