"""Whole checkpoints in the hub's quantized formats: every weight is there under the name of the unquantized model, with
the numbers of the format's definition, and damaged files end in an error in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.quantization.open import open_source
from common.quantization.source import WeightSource
from tests.checkpoints.hub_maker import METHODS, is_linear, mxfp4_of, quantized_of
from tests.models import make_model

KINDS = ("llama", "qwen3", "gemma2", "qwen3-moe", "mixtral", "phi3")


def opened(directory: Path) -> WeightSource:
    source = open_source(open_checkpoint(str(directory)))
    assert source is not None
    return source


def read_all(source: WeightSource) -> dict[str, torch.Tensor]:
    """Return all weights by name."""
    found = {name: lazy[...] for name, lazy in source.plain().items()}
    found |= {name: make().dequantize() for name, make in source.compact().items()}
    for name, experts in source.stacked().items():
        found[name] = torch.stack([weight.dequantize().t() for weight in experts()])
    return found


def check(directory: Path, compact: set[str], stacked: frozenset[str] = frozenset()) -> None:
    """See that the weights of ``directory`` are those of its dense copy, and which are quantized."""
    source, expected = opened(directory), load_file(directory / "dense" / "model.safetensors")
    assert source.compact().keys() == compact and source.stacked().keys() == stacked
    found = read_all(source)
    assert found.keys() == expected.keys()
    assert not source.notes
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def made(kind: str, out: Path) -> Path:
    """Write a checkpoint whose rows are whole groups of 32."""
    return make_model(kind, out, **({"moe_intermediate_size": 64} if kind == "qwen3-moe" else {}))


@pytest.mark.sampled
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_of_a_checkpoint(kind: str, method: str, tmp_path: Path) -> None:
    original = made(kind, tmp_path / "original")
    weights = load_file(original / "model.safetensors")
    linear = {name for name, values in weights.items() if is_linear(name, values)}
    assert any("experts" in name for name in linear) == (kind in ("qwen3-moe", "mixtral"))
    check(quantized_of(original, tmp_path / "quantized", METHODS[method]), linear)


def test_experts_of_gpt_oss(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    directory = mxfp4_of(checkpoint("gpt-oss"), tmp_path / "quantized")
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    names = [f"model.layers.{at}.mlp.experts.{part}" for at in range(layers) for part in ("gate_up_proj", "down_proj")]
    check(directory, set(), frozenset(names))


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return ``small(method)``: a checkpoint of one layer."""
    root = tmp_path_factory.mktemp("damage")
    made_before: dict[str, Path] = {}

    def make(method: str) -> Path:
        if method not in made_before:
            out = root / method.replace(" ", "-")
            if method == "mxfp4":
                original = make_model("gpt-oss", root / "original-gpt-oss", num_hidden_layers=1)
                made_before[method] = mxfp4_of(original, out)
            else:
                original = make_model("llama", root / f"{out.name}-original", num_hidden_layers=1)
                made_before[method] = quantized_of(original, out, METHODS[method])
        return made_before[method]

    return make


def changed(directory: Path, out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(directory, out, ignore=shutil.ignore_patterns("*.safetensors", "dense"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def parts_of(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors of one quantized module."""
    for module in ("model.layers.0.mlp.down_proj.", "model.layers.0.mlp.experts.down_proj_"):
        if found := [name for name in tensors if name.startswith(module) and not name.endswith("bias")]:
            return found
    raise AssertionError


ALL = [*METHODS, "mxfp4"]


@pytest.mark.parametrize("method", ALL)
def test_a_missing_tensor_is_an_error(method: str, small: Callable[[str], Path], tmp_path: Path) -> None:
    directory = small(method)
    tensors = load_file(directory / "model.safetensors")
    for at, part in enumerate(parts_of(tensors)):
        if part.endswith("g_idx") and "order" not in method:
            continue  # groups in the order of the columns
        left = {name: tensor for name, tensor in tensors.items() if name != part}
        with pytest.raises(StartError):
            read_complete(changed(directory, tmp_path / str(at), left), directory)


def read_complete(directory: Path, whole: Path) -> None:
    """Read all weights; raise StartError also if a name or a shape is wrong, as the loader does."""
    found, expected = read_all(opened(directory)), load_file(whole / "dense" / "model.safetensors")
    for name, values in expected.items():
        if name not in found or found[name].shape != values.shape:
            raise StartError(name, "has another shape", "")
        assert found[name].dtype.is_floating_point and found[name].dtype.itemsize > 1


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("dim", [0, -1])
def test_a_tensor_of_another_shape_is_an_error(
    method: str, dim: int, small: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = small(method)
    tensors = load_file(directory / "model.safetensors")
    for at, part in enumerate(parts_of(tensors)):
        tensor = tensors[part]
        if tensor.dim() == 0:
            continue
        for more in (-1, 1):
            kept = tensor.narrow(dim, 0, tensor.shape[dim] - 1) if more < 0 else twice(tensor, dim)
            wrong = tensors | {part: kept.contiguous()}
            with pytest.raises(StartError):
                read_complete(changed(directory, tmp_path / f"{at}{more}", wrong), directory)


def twice(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return torch.cat([raw, raw], dim).view(tensor.dtype)


@pytest.mark.parametrize("method", ALL)
def test_scales_that_are_no_numbers_are_an_error(method: str, small: Callable[[str], Path], tmp_path: Path) -> None:
    directory = small(method)
    tensors = load_file(directory / "model.safetensors")
    name = next(part for part in parts_of(tensors) if "scale" in part)
    for at, wrong in enumerate((float("nan"), float("inf"))):
        scales = tensors[name].clone()
        scales.view(-1)[-1] = 255 if scales.dtype == torch.uint8 else wrong
        with pytest.raises(StartError, match="numbers") as raised:
            read_all(opened(changed(directory, tmp_path / str(at), tensors | {name: scales})))
        assert "down_proj" in raised.value.what


@pytest.mark.parametrize("method", ["gptq", "w4a16", "fp8 in blocks", "mxfp4"])
def test_a_file_that_is_cut_off_is_an_error(method: str, small: Callable[[str], Path], tmp_path: Path) -> None:
    directory = changed(small(method), tmp_path / "cut", load_file(small(method) / "model.safetensors"))
    file = directory / "model.safetensors"
    with file.open("r+b") as written:
        written.truncate(file.stat().st_size - 100)
    with pytest.raises(StartError, match=r"model\.safetensors"):
        read_all(opened(directory))
