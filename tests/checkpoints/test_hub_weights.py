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
from tests.checkpoints.format_cases import HUB
from tests.checkpoints.quantized_maker import LINEAR, Pair, quantized_hub, quantized_mxfp4
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


def check(pair: Pair, compact: set[str], stacked: frozenset[str] = frozenset()) -> None:
    """See that the weights of a checkpoint are those of its reference, and which are quantized."""
    source, expected = opened(pair.model), load_file(pair.reference / "model.safetensors")
    assert source.compact().keys() == compact and source.stacked().keys() == stacked
    found = read_all(source)
    assert found.keys() == expected.keys()
    unused = sum(name.endswith("input_scale") for name in load_file(pair.model / "model.safetensors"))
    assert source.notes == ([f"{unused} tensors input_scale not used"] if unused else [])
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def made(kind: str, out: Path) -> Path:
    """Write a checkpoint whose rows are whole groups of 32."""
    return make_model(kind, out, **({"moe_intermediate_size": 64} if kind == "qwen3-moe" else {}))


@pytest.mark.sampled
@pytest.mark.parametrize("method", HUB)
@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_of_a_checkpoint(kind: str, method: str, tmp_path: Path) -> None:
    original = made(kind, tmp_path / "original")
    weights = load_file(original / "model.safetensors")
    linear = {name for name in weights if LINEAR.fullmatch(name)}
    assert any("experts" in name for name in linear) == (kind in ("qwen3-moe", "mixtral"))
    check(quantized_hub(original, tmp_path / "quantized", *HUB[method]), linear)


def test_experts_of_gpt_oss(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    pair = quantized_mxfp4(checkpoint("gpt-oss"), tmp_path / "quantized")
    layers = json.loads((pair.model / "config.json").read_text())["num_hidden_layers"]
    names = [f"model.layers.{at}.mlp.experts.{part}" for at in range(layers) for part in ("gate_up_proj", "down_proj")]
    check(pair, set(), frozenset(names))


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Return ``small(method)``: a checkpoint of one layer."""
    root = tmp_path_factory.mktemp("damage")
    made_before: dict[str, Pair] = {}

    def make(method: str) -> Pair:
        if method not in made_before:
            out = root / method.replace(" ", "-")
            original = make_model("gpt-oss" if method == "MXFP4" else "llama", out / "original", num_hidden_layers=1)
            if method == "MXFP4":
                made_before[method] = quantized_mxfp4(original, out)
            else:
                made_before[method] = quantized_hub(original, out, *HUB[method])
        return made_before[method]

    return make


def changed(directory: Path, out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(directory, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def parts_of(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors of one quantized module, without those that are not used."""
    for module in ("model.layers.0.mlp.down_proj.", "model.layers.0.mlp.experts.down_proj_"):
        if found := [
            name for name in tensors if name.startswith(module) and not name.endswith(("bias", "input_scale"))
        ]:
            return found
    raise AssertionError


ALL = [*HUB, "MXFP4"]


@pytest.mark.parametrize("method", ALL)
def test_a_missing_tensor_is_an_error(method: str, small: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = small(method)
    tensors = load_file(pair.model / "model.safetensors")
    for at, part in enumerate(parts_of(tensors)):
        if part.endswith("g_idx") and "order" not in method:
            continue  # groups in the order of the columns
        left = {name: tensor for name, tensor in tensors.items() if name != part}
        with pytest.raises(StartError):
            read_complete(changed(pair.model, tmp_path / str(at), left), pair.reference)


def read_complete(directory: Path, reference: Path) -> None:
    """Read all weights; raise StartError also if a name or a shape is wrong, as the loader does."""
    found, expected = read_all(opened(directory)), load_file(reference / "model.safetensors")
    for name, values in expected.items():
        if name not in found or found[name].shape != values.shape:
            raise StartError(name, "has another shape", "")
        assert found[name].dtype.is_floating_point and found[name].dtype.itemsize > 1


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("dim", [0, -1])
def test_a_tensor_of_another_shape_is_an_error(
    method: str, dim: int, small: Callable[[str], Pair], tmp_path: Path
) -> None:
    pair = small(method)
    tensors = load_file(pair.model / "model.safetensors")
    for at, part in enumerate(parts_of(tensors)):
        tensor = tensors[part]
        if tensor.dim() == 0:
            continue
        for more in (-1, 1):
            kept = tensor.narrow(dim, 0, tensor.shape[dim] - 1) if more < 0 else twice(tensor, dim)
            wrong = tensors | {part: kept.contiguous()}
            with pytest.raises(StartError):
                read_complete(changed(pair.model, tmp_path / f"{at}{more}", wrong), pair.reference)


def twice(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return torch.cat([raw, raw], dim).view(tensor.dtype)


@pytest.mark.parametrize("method", ALL)
def test_scales_that_are_no_numbers_are_an_error(method: str, small: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = small(method)
    tensors = load_file(pair.model / "model.safetensors")
    name = next(part for part in parts_of(tensors) if "scale" in part)
    for at, wrong in enumerate((float("nan"), float("inf"))):
        scales = tensors[name].clone()
        scales.view(-1)[-1] = 255 if scales.dtype == torch.uint8 else wrong
        with pytest.raises(StartError, match="numbers") as raised:
            read_all(opened(changed(pair.model, tmp_path / str(at), tensors | {name: scales})))
        assert "down_proj" in raised.value.what


@pytest.mark.parametrize("method", ["GPTQ", "w4a16", "fp8 in blocks", "MXFP4"])
def test_a_file_that_is_cut_off_is_an_error(method: str, small: Callable[[str], Pair], tmp_path: Path) -> None:
    directory = changed(small(method).model, tmp_path / "cut", load_file(small(method).model / "model.safetensors"))
    file = directory / "model.safetensors"
    with file.open("r+b") as written:
        written.truncate(file.stat().st_size - 100)
    with pytest.raises(StartError, match=r"model\.safetensors"):
        read_all(opened(directory))
