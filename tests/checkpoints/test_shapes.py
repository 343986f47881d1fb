"""Quantized weights of other shapes than the model's are refused when they are loaded, not served as nonsense."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.model.load_compact import load_compact
from common.quantization.open import open_source
from tests.checkpoints.format_cases import HUB
from tests.checkpoints.quantized_maker import quantized_hub, quantized_mxfp4
from tests.models import make_model

DOWN = "model.layers.0.mlp.down_proj"


def load(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    source = open_source(checkpoint)
    assert source is not None
    load_compact(checkpoint, source, "float32", exact=True, where=torch.device("cpu"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one layer: with a linear layer in float8, and experts apart and together."""
    root = tmp_path_factory.mktemp("shapes")
    sizes = {"num_hidden_layers": 1, "moe_intermediate_size": 64}
    moe = make_model("qwen3-moe", root / "qwen3-moe", **sizes)
    return {
        "linear": quantized_hub(
            make_model("llama", root / "llama", num_hidden_layers=1), root / "fp8", *HUB["fp8 per tensor"]
        ).model,
        "apart": quantized_hub(moe, root / "experts", *HUB["w8a8"]).model,
        "together": quantized_mxfp4(make_model("gpt-oss", root / "gpt-oss", num_hidden_layers=1), root / "mxfp4").model,
    }  # fmt: skip


def changed(model: Path, out: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **config: Any) -> Path:
    """Copy a checkpoint with each tensor replaced by what ``change`` makes of it, and other fields of the
    configuration."""
    shutil.copytree(model, out)
    tensors = load_file(model / "model.safetensors")
    written = {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(content | config))
    return out


def test_all_load_as_they_are(models: dict[str, Path]) -> None:
    for model in models.values():
        load(model)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_linear_layer(models: dict[str, Path], dim: int, tmp_path: Path) -> None:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(dim, 0, tensor.shape[dim] // 2) if name == f"{DOWN}.weight" else tensor

    with pytest.raises(StartError, match=r"the model has \[64, 96\]") as raised:
        load(changed(models["linear"], tmp_path / "model", change))
    assert f"{DOWN}.weight" in raised.value.what


def test_rows_of_one_expert(models: dict[str, Path], tmp_path: Path) -> None:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:-8] if "experts.2.up_proj" in name else tensor

    with pytest.raises(StartError, match=r"expert 2 has \[120, 64\], the model \[128, 64\]"):
        load(changed(models["apart"], tmp_path / "model", change))


def test_columns_of_one_of_two_matrices_that_are_joined(models: dict[str, Path], tmp_path: Path) -> None:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :32] if name.endswith("experts.1.up_proj.weight") else tensor

    with pytest.raises(StartError, match=r"expert 1 has"):
        load(changed(models["apart"], tmp_path / "model", change))


@pytest.mark.parametrize("experts", [2, 8])
def test_the_number_of_experts(models: dict[str, Path], experts: int, tmp_path: Path) -> None:
    """4 are in the file."""

    def router(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(2, *[1] * (tensor.dim() - 1))[:experts] if "router" in name else bias(name, tensor)

    def bias(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(2, 1)[:experts] if name.endswith("proj_bias") else tensor

    with pytest.raises(StartError, match=f"4 experts, the model {experts}"):
        load(changed(models["together"], tmp_path / "model", router, num_local_experts=experts))
