"""Workers of a model must have weight files that are equal in every byte, whatever type they hold the weights in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from common.checkpoint.files import open_checkpoint
from common.engine.loading import load_engine
from coordinator.cluster.registry import JoinRefused, Registry
from tests.unit.coordinator.cluster.test_registry import hello, join

SHARDS = [f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2)]


@pytest.fixture
def sharded(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a checkpoint whose weights are in two files."""
    path = Path(shutil.copytree(checkpoint("llama"), tmp_path / "sharded"))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    half = len(tensors) // 2
    weight_map = {name: SHARDS[index >= half] for index, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(held, path / shard, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def fingerprint(path: Path, **options: Any) -> str:
    fields = {"num_kv_blocks": 8, "dtype": "float32", "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
    engine = load_engine(open_checkpoint(str(path)), **(fields | options))
    engine.close()
    return engine.fingerprint


def flip_unseen(path: Path, shard: str) -> None:
    """Flip the first bit in the second half of the file that the coordinator's sample does not cover."""
    before, right = open_checkpoint(str(path)).fingerprint, (path / shard).read_bytes()
    for at in range(len(right) // 2, len(right), 512):
        changed = bytearray(right)
        changed[at] ^= 1
        (path / shard).write_bytes(changed)
        if open_checkpoint(str(path)).fingerprint == before:
            return
    raise AssertionError("the sample is everything")


@pytest.mark.parametrize("shard", SHARDS)
def test_one_other_bit_of_the_weights_is_refused_at_registration(shard: str, sharded: Path, tmp_path: Path) -> None:
    """The coordinator reads too little of the weights to see the difference, but it sees that two workers differ."""
    other = Path(shutil.copytree(sharded, tmp_path / "other"))
    flip_unseen(other, shard)
    registry = Registry(open_checkpoint(str(sharded)).fingerprint)
    join(registry, fingerprint=fingerprint(sharded))
    verdict = registry.join(hello("d1", "i1", fingerprint=fingerprint(other)), 0.0)
    assert isinstance(verdict, JoinRefused)
    assert verdict.reason.startswith("fingerprint ") and "of d0 (m), whose weight files differ" in verdict.reason


def test_workers_that_hold_the_same_weights_in_other_types_agree(sharded: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(sharded, tmp_path / "moved"))
    plain = fingerprint(sharded)
    assert fingerprint(moved, dtype="bfloat16") == plain
    rounded = fingerprint(sharded, quantization="int8")
    assert rounded.rpartition(".")[0] == plain, "the files are the same, what was made of them is not"
    registry = Registry(open_checkpoint(str(sharded)).fingerprint)
    join(registry, fingerprint=plain)
    verdict = registry.join(hello("d1", "i1", fingerprint=rounded), 0.0)
    assert isinstance(verdict, JoinRefused) and "fingerprint" in verdict.reason and "weight files" not in verdict.reason
