"""What GGUF files of other converters say differently, and what none may say."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from tests.checkpoints.gguf_maker import gguf_of
from tests.models import make_model

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


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    # metadata -> what is said of them
    "layers as text": ({"llama__block_count": "two"}, "its llama.block_count is 'two'"),
    "context 0": ({"llama__context_length": 0}, "its llama.context_length is 0"),
    "no heads": ({"llama__attention__head_count": 0}, "its llama.attention.head_count is 0"),
    "no heads of keys": ({"llama__attention__head_count_kv": [0, 0]}, "its llama.attention.head_count_kv is [0, 0]"),
    "base as text": ({"llama__rope__freq_base": "1e4"}, "its llama.rope.freq_base is '1e4'"),
    "infinite factor": ({"llama__rope__scaling__factor": math.inf}, "its llama.rope.scaling.factor is inf"),
    "epsilon": ({"llama__attention__layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan"),
    "shards as text": ({"split__count": "two"}, "its split.count is 'two'"),
    "a shard under another name": ({"split__count": 2}, "its name is not that of shard 1 of 2"),
    "an adapter": ({"general__type": "adapter"}, "it is an adapter"),
    "too few layers": ({"llama__block_count": 2}, "name 2 layers, but it has tensors of layer 2"),
    "too many layers": ({"llama__block_count": 5}, "name 5 layers, but it has no tensor of layer 3"),
    "other heads": ({"llama__attention__head_count": 3}, "is 64×64, but its metadata ask for 64×48"),
    "no vocabulary": ({"tokenizer__ggml__tokens": None}, "its vocabulary is empty"),
}


def why_not(file: Path) -> str:
    with pytest.raises(StartError) as caught:
        open_checkpoint(str(file))
    assert caught.value.what and caught.value.todo
    return caught.value.why


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_cannot_be_are_named(case: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    metadata, words = WRONG[case]
    assert words in why_not(gguf_of(checkpoint("llama"), tmp_path / "x.gguf", **metadata))


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.2.ffn_down.weight", "output_norm.weight"])
def test_a_tensor_that_is_absent_is_named(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    assert f"it has no {name}" in why_not(gguf_of(checkpoint("llama"), tmp_path / "x.gguf", without=[name]))


def test_whole_numbers_are_no_weights(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def encode(name: str, values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        return (values.astype(np.int32), None) if name == "blk.0.attn_q.weight" else (values, None)

    assert "of type I32" in why_not(gguf_of(checkpoint("llama"), tmp_path / "x.gguf", encode=encode))


@pytest.mark.parametrize("kind", [Type.Q8_1, Type.Q8_K])
def test_types_that_are_not_read_are_named(kind: Type, tmp_path: Path) -> None:
    """They are for sums between products, and no file should have them."""

    def encode(name: str, values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        if name != "blk.0.ffn_down.weight":
            return values, None
        block, size = GGML_QUANT_SIZES[kind]
        return np.zeros((64, 256 // block * size), np.uint8), kind

    model = make_model("llama", tmp_path / "model", intermediate_size=256)
    assert f"of type {kind.name}, which is not read" in why_not(gguf_of(model, tmp_path / "x.gguf", encode=encode))


def test_a_directory_of_gguf_files_with_a_configuration(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    file = gguf_of(checkpoint("llama"), tmp_path / "x.gguf")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert open_checkpoint(str(tmp_path)).source == file


def test_shards_in_a_folder_of_the_directory(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "Q8_0").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    file = gguf_of(checkpoint("llama"), tmp_path / "Q8_0" / "x-Q8_0.gguf", shards=3)
    assert open_checkpoint(str(tmp_path)).source == file


def test_a_directory_with_an_encoder_of_images_alone(tmp_path: Path) -> None:
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"GGUF")
    assert "no language model: mmproj-f16.gguf" in why_not(tmp_path)


def test_a_generated_directory_that_lost_a_file_is_made_again(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    file = gguf_of(checkpoint("llama"), tmp_path / "x.gguf")
    text = open_checkpoint(str(file)).path
    (text / "tokenizer.json").unlink()
    assert open_checkpoint(str(file)).path == text and (text / "tokenizer.json").is_file()


def test_a_full_disk_is_said(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = gguf_of(checkpoint("llama"), tmp_path / "x.gguf")
    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left" in why_not(file)
