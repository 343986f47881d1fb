"""Weights that are rounded when they are read: which ones, how far, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.quantization import rounded
from common.quantization.rounded import open_rounded
from common.quantization.weight import QuantizedWeight, quantize
from tests.models import make_model

KINDS = {
    # kind: ends of the names of matrices that stay as they are, and of those in 8 bits
    "llama": ((), ("embed_tokens",)),
    "llama-untied": (("embed_tokens",), ("lm_head",)),
    "gemma2": ((), ("embed_tokens",)),
    "qwen3-moe": (("embed_tokens", "mlp.gate"), ("lm_head",)),
    "mixtral": (("embed_tokens", "block_sparse_moe.gate"), ("lm_head",)),
    "gpt-oss": (("embed_tokens", "router"), ("lm_head",)),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_rounded(kind: str, bits: Literal[4, 8], checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(kind)
    source, weights = open_rounded(open_checkpoint(str(directory)), bits), load_file(directory / "model.safetensors")
    kept, eight = KINDS[kind]
    compact, plain = source.compact(), source.plain()
    assert compact.keys() | plain.keys() == weights.keys() and not compact.keys() & plain.keys()
    matrices = {name for name, values in weights.items() if values.dim() == 2 and name.endswith(".weight")}
    assert compact.keys() == {name for name in matrices if not name.removesuffix(".weight").endswith(kept)}
    assert len(compact) > 8 and source.unrounded.keys() == compact.keys()
    for name, lazy in (plain | source.unrounded).items():
        assert torch.equal(lazy[...], weights[name]), name
    for name, make in compact.items():
        weight = make()
        assert weight.bits == (8 if name.removesuffix(".weight").endswith(eight) else bits), name
        assert weight.group == 64 and weight.source == f"int{weight.bits} in groups of 64"
        check_rounding(weights[name].numpy(), weight.dequantize().numpy(), weight.bits, 64)
    assert not source.notes


def check_rounding(values: np.ndarray, found: np.ndarray, bits: int, group: int) -> None:  # type: ignore[type-arg]
    """See that each value is within half a step of its group: (largest - smallest, 0 included) / 15, or the largest
    magnitude / 127."""
    assert found.shape == values.shape
    for n in range(len(values)):
        for start in range(0, values.shape[1], group):
            given, rounded = values[n, start : start + group], found[n, start : start + group]
            spread = max(given.max(), 0) - min(given.min(), 0) if bits == 4 else np.abs(given).max()
            step = spread / (15 if bits == 4 else 127)
            error = np.abs(given - rounded).max()
            assert error <= step * (1.02 if bits == 4 else 0.52)  # an integer zero moves 4-bit codes by half a step
            assert bits == 8 or spread == 0 or error > 0


def test_rows_that_are_no_whole_groups(tmp_path: Path) -> None:
    directory = make_model("llama-untied", tmp_path, intermediate_size=72)
    source = open_rounded(open_checkpoint(str(directory)), 4, 32)
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weight = source.compact()[name]()
    assert weight.shape == (64, 72) and weight.codes.shape == (64, 48)
    check_rounding(weights[name].numpy(), weight.dequantize().numpy(), 4, 32)


def test_weights_are_read_one_by_one(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint larger than the memory is rounded tensor by tensor."""
    shapes = list[tuple[int, ...]]()

    def counted(weight: torch.Tensor, *arguments: Any) -> QuantizedWeight:
        shapes.append(tuple(weight.shape))
        return quantize(weight, *arguments)

    monkeypatch.setattr(rounded, "quantize", counted)
    source = open_rounded(open_checkpoint(str(checkpoint("llama"))), 8)
    assert not shapes
    source.compact()["model.layers.1.mlp.up_proj.weight"]()
    assert shapes == [(96, 64)]


def test_weights_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    directory = make_model("llama", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = float("nan")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    source = open_rounded(open_checkpoint(str(directory)), 4)
    with pytest.raises(StartError, match="not finite") as raised:
        source.compact()[name]()
    assert name in raised.value.what
