"""What GGUF files of other converters say differently, and what none may say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.checkpoint.files import open_checkpoint
from tests.checkpoints.gguf_maker import gguf_of

END = 7
"""The id of the end-of-turn token of the tests' tokenizer, which only the chat template names."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("other", [{}, {"tokenizer__ggml__eom_token_id": 5}])
def test_ids_of_the_metadata_do_not_hide_the_end_of_turn(
    other: dict[str, int], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    found = open_checkpoint(str(gguf_of(checkpoint("llama"), tmp_path / "x.gguf", **other)))
    assert found.eos_token_ids == (1, *other.values(), END)


def test_control_tokens_that_the_file_has_as_normal_ones(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    whole, wrong = gguf_of(checkpoint("llama"), tmp_path / "a.gguf"), tmp_path / "b.gguf"
    gguf_of(checkpoint("llama"), wrong, tokenizer__ggml__token_type=[1] * 512)
    one, two = open_checkpoint(str(whole)), open_checkpoint(str(wrong))
    assert two.eos_token_ids == one.eos_token_ids == (1, END)
    texts = [Tokenizer.from_file(str(each.path / "tokenizer.json")) for each in (one, two)]
    ids = [text.encode("<|user|>What is it?<|end|><|assistant|>").ids for text in texts]
    assert ids[0] == ids[1] and END in ids[0]


def test_an_id_beyond_the_vocabulary_is_said_to_be_of_the_file(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    found = open_checkpoint(str(gguf_of(checkpoint("llama"), tmp_path / "x.gguf", tokenizer__ggml__eos_token_id=9999)))
    assert found.eos_token_ids == (END,)
    assert [note for note in found.notes if "9999" in note and "GGUF names" in note]
    assert not [note for note in found.notes if "json" in note]


YARN = 1 + 0.1 * math.log(4)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"llama__rope__scaling__yarn_attn_factor": 1.5}, 1.5),  # transformers' attention_factor
        ({"llama__rope__scaling__attn_factor": 1.0}, None),  # a multiplier of the default
        ({"llama__rope__scaling__attn_factor": 0.5}, 0.5 * YARN),
    ],
)
def test_the_attention_factor_of_yarn(
    metadata: dict[str, float], expected: float | None, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    yarn = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    found = open_checkpoint(str(gguf_of(checkpoint("llama"), tmp_path / "x.gguf", **yarn, **metadata)))
    given = json.loads((found.path / "config.json").read_text())["rope_parameters"].get("attention_factor")
    assert given == (expected if expected is None else pytest.approx(expected))
