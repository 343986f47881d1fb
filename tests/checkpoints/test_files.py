"""Beside the weights, published checkpoints have duplicates, old indexes and adapters."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from common.checkpoint import hub
from common.checkpoint.files import open_checkpoint
from common.checkpoint.generation import RANGES, clamp
from common.core.errors import StartError
from tests.checkpoints.makers import write

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TWO = {SHARDS[0]: 0, SHARDS[1]: 2}


def index(*names: str) -> dict[str, Any]:
    return {INDEX: {"weight_map": {f"t{at}": name for at, name in enumerate(names)}}}


CASES: dict[str, tuple[dict[str, Any], dict[str, int], tuple[str, ...], str]] = {
    # (JSON files, weight files, those that are chosen, words of a note)
    "one file": ({}, {"model.safetensors": 0}, ("model.safetensors",), ""),
    "shards": (index(*SHARDS), TWO, SHARDS, ""),
    "shards without index": ({}, TWO, SHARDS, ""),
    "consolidated": ({}, {"model.safetensors": 0, "consolidated.safetensors": 4}, ("model.safetensors",), ""),
    "consolidated shards": (
        index(*SHARDS),
        TWO | {"consolidated.00.safetensors": 0, "consolidated-00001-of-00002.safetensors": 4},
        SHARDS,
        "",
    ),
    "in folders": (
        {},
        {"model.safetensors": 0, "original/model.safetensors": 0, "checkpoint-100/model.safetensors": 0},
        ("model.safetensors",),
        "",
    ),
    "half precision beside": ({}, {"model.safetensors": 0, "model.fp16.safetensors": 0}, ("model.safetensors",), ""),
    "stale index": (index(*SHARDS), {"model.safetensors": 0}, ("model.safetensors",), "names files that are absent"),
    "stale index beside other shards": (
        index("model-00001-of-00003.safetensors"),
        TWO,
        SHARDS,
        "names files that are absent",
    ),
    "files that the index does not name": (index(*SHARDS), TWO | {"extra.safetensors": 0}, SHARDS, ""),
    "the same tensors twice": (
        {},
        {"model.safetensors": 0, "weights.safetensors": 0},
        ("model.safetensors",),
        "ignored, since model",
    ),
    "an adapter beside": (
        {"adapter_config.json": {"base_model_name_or_path": "a/b"}},
        {"model.safetensors": 0, "adapter_model.safetensors": 4},
        ("model.safetensors",),
        "adapter beside the weights",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    files, tensors, chosen, note = CASES[case]
    found = open_checkpoint(str(write(tmp_path, files, tensors)))
    assert tuple(path.name for path in found.weight_files) == chosen
    assert found.weight_bytes == sum((tmp_path / name).stat().st_size for name in chosen)
    assert any(note in each for each in found.notes) if note else not found.notes


REFUSED: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "an adapter alone": (
        {"adapter_config.json": {"base_model_name_or_path": "owner/base"}},
        {"adapter_model.safetensors": 0},
        "an adapter for owner/base",
    ),
    "no whole set": ({}, {"a.safetensors": 0, "b.safetensors": 1}, "both have the tensor t1"),
    "a shard missing": (index(*SHARDS), {SHARDS[0]: 0}, f"{SHARDS[1]} is missing"),
    "a broken index": ({INDEX: {"weight_map": [1]}}, {"model.safetensors": 0}, "weight_map"),
    "an index that leaves the folder": (index("../other.safetensors"), {}, "outside of the checkpoint"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_or_ambiguous_is_said(case: str, tmp_path: Path) -> None:
    files, tensors, words = REFUSED[case]
    with pytest.raises(StartError) as caught:
        open_checkpoint(str(write(tmp_path / "model", files, tensors)))
    assert words in caught.value.why and caught.value.todo


PUBLISHED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "qwen.tiktoken", INDEX, *SHARDS),
)
LEFT_OUT = (
    *("original/consolidated.00.pth", "original/params.json", "consolidated.safetensors", "pytorch_model.bin"),
    *("checkpoint-500/model.safetensors", "checkpoint-500/config.json", "model.fp16.safetensors", "modeling_x.py"),
    *("adapter_model.safetensors", "onnx/model.onnx", "onnx/config.json", "model.safetensors", "model.Q4_0.gguf"),
    *("image.png", "metal/model.bin", "nested/model.safetensors"),
)


def test_only_what_is_loaded_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own rule: files that match a pattern, and none of those to ignore."""
    local = write(tmp_path, index(*SHARDS), TWO)
    fetched = set[str]()

    def snapshot_download(_: str, *, allow_patterns: list[str], ignore_patterns: Any = None, **__: Any) -> str:
        for name in (*PUBLISHED, *LEFT_OUT):
            wanted = any(fnmatch.fnmatch(name, each) for each in allow_patterns)
            if wanted and not any(fnmatch.fnmatch(name, each) for each in ignore_patterns or ()):
                fetched.add(name)
        return str(local)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert open_checkpoint("owner/name").path == local
    assert fetched == set(PUBLISHED)
    fetched.clear()
    (local / INDEX).unlink()
    hub.download_rest("owner/name", None, local, code=True)
    assert fetched == {*PUBLISHED, "model.safetensors", "modeling_x.py"}


def test_settings_out_of_range_are_clamped_and_said(tmp_path: Path) -> None:
    given = {"temperature": 7, "top_p": 0, "top_k": -5, "min_p": 1.5, "repetition_penalty": "high", "max_length": -1}
    found = open_checkpoint(str(write(tmp_path, {"generation_config.json": given})))
    assert found.generation_config == {"temperature": 2.0, "top_p": 1e-9, "top_k": 0, "min_p": 1.0, "max_length": -1}
    assert len(found.notes) == 5 and all("generation_config.json" in note for note in found.notes)
    fine = {"temperature": 0, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    assert clamp(fine) == (fine, ())
    assert clamp({"top_k": -1}) == ({"top_k": 0}, ())  # off, as it is often written
    nan, notes = clamp(dict.fromkeys(RANGES, float("nan")))
    assert nan == {} and len(notes) == len(RANGES)


@pytest.mark.e2e
def test_shards_without_an_index_are_loaded(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers loads files of other names than ``model.safetensors`` only through an index."""
    from common.engine.loading import load_engine

    path = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    half = len(weights) // 2
    for name, part in zip(SHARDS, (list(weights)[:half], list(weights)[half:]), strict=True):
        save_file({each: weights[each] for each in part}, path / name, metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps(index("model-00001-of-00009.safetensors")[INDEX]))
    engine = load_engine(
        open_checkpoint(str(path)), dtype="float32", num_kv_blocks=20, max_batched_tokens=64, max_num_seqs=2,
        max_model_len=64, batch_hint=1,
    )  # fmt: skip
    engine.close()
    assert engine.vocab_size == 512


def test_a_number_of_hundreds_of_digits_is_clamped() -> None:
    settings, notes = clamp({"temperature": 10**400, "top_p": -(10**400)})
    assert settings == {"temperature": 2.0, "top_p": RANGES["top_p"][0]}
    assert len(notes) == 2 and all(len(note) < 120 for note in notes)
