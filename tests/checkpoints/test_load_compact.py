"""The loaded model of a quantized checkpoint computes what the dequantized one does, and holds no matrix twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common.attention.interface import bind
from common.checkpoint.files import open_checkpoint
from common.core.errors import StartError
from common.engine.loading import load_engine
from common.model.compact import CompactLinear
from common.model.compact_experts import CompactExperts
from common.model.load import detach_from_files, load_model
from common.model.load_compact import CompactModel, load_compact
from common.model.probe import TOLERANCE, Recorder, deviation, forward
from common.quantization.open import open_source
from tests.checkpoints import quantized_maker as maker
from tests.checkpoints.format_cases import Case, cases
from tests.checkpoints.quantized_maker import Pair
from tests.models import VOCAB, make_model
from tests.reference import Reference

SAMPLE = (
    *(("Q4_1 as SmolLM2", "llama"), ("Q4_K_M", "qwen3"), ("Q8_0", "gemma2"), ("Q8_0", "gemma3"), ("Q5_0", "mixtral")),
    *(("GPTQ in order of activation", "gemma2"), ("GPTQ 8-bit", "llama"), ("AWQ", "qwen3"), ("w4a16", "qwen3-moe")),
    *(("w8a8", "llama"), ("fp8 in blocks", "qwen3-moe"), ("fp8 per tensor", "qwen3"), ("MXFP4", "gpt-oss")),
    *(("Q4_0", "gpt-oss"), ("Q4_0", "qwen3-moe"), ("Q4_K_M", "qwen3-moe"), ("Q5_1", "llama")),
)
SPREAD = 1e-3
IDS = [(7 + 13 * at * at) % VOCAB for at in range(40)]


def load(path: Path, dtype: str = "float32") -> CompactModel:
    checkpoint = open_checkpoint(str(path))
    source = open_source(checkpoint)
    assert source is not None
    return load_compact(checkpoint, source, dtype, exact=True, where=torch.device("cpu"))


@torch.inference_mode()
def logits(model: nn.Module) -> torch.Tensor:
    bind(model, Recorder())
    return forward(model, torch.tensor([IDS]), torch.arange(len(IDS))[None], None)


def off(model: nn.Module, reference: Path) -> float:
    """Return the largest difference of logits from the reference's, in units of their spread."""
    wanted = torch.from_numpy(Reference(reference).logits(IDS))
    return float((logits(model) - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("case", cases(*SAMPLE), ids=str)
def test_logits_are_those_of_the_dequantized_model(case: Case, tmp_path: Path) -> None:
    pair = case.make(tmp_path)
    loaded = load(pair.model)
    assert off(loaded.model, pair.reference) <= SPREAD
    assert off(loaded.model, tmp_path / "original") > SPREAD, "quantized, it must differ"
    large = [name for name, weight in loaded.model.named_parameters() if weight.dim() > 1 and "bias" not in name]
    routers = [name for name in large if "gate.weight" in name or "router" in name]
    whole = ["model.embed_tokens.weight", "lm_head.weight"] if not pair.model.suffix else []
    if case.format == "MXFP4":  # of the experts alone
        whole += [name for name in large if "self_attn" in name]
    assert {*large} <= {*routers, *whole}, "no quantized matrix is there a second time"
    assert sum(loaded.formats.values()) >= 21 and not [note for note in loaded.notes if "dequantized" in note]


@pytest.fixture
def gptq(tmp_path: Path) -> Pair:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    return maker.quantized_hub(make_model("llama", tmp_path / "original"), tmp_path, settings, maker.gptq)


def change(pair: Pair, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit the tensors of the quantized checkpoint."""
    tensors = load_file(pair.model / "model.safetensors")
    edit(tensors)
    save_file(tensors, pair.model / "model.safetensors", {"format": "pt"})


def test_configuration_of_the_quantization_is_not_given_to_transformers(gptq: Pair) -> None:
    """It would ask for the package gptqmodel."""
    assert not hasattr(load(gptq.model).model.config, "quantization_config")


def test_biases_are_added_and_do_not_lie_in_the_file(tmp_path: Path) -> None:
    original = make_model("llama", tmp_path / "original", attention_bias=True)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32}
    pair = maker.quantized_hub(original, tmp_path, settings, maker.awq)
    model = load(pair.model).model
    assert off(model, pair.reference) <= SPREAD
    detach_from_files(model)
    before = logits(model)
    file = pair.model / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(logits(model), before)


def test_a_missing_weight_is_an_error(gptq: Pair) -> None:
    change(gptq, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(StartError) as caught:
        load(gptq.model)
    assert "model.norm.weight" in caught.value.why


def test_a_weight_of_another_shape_is_named(gptq: Pair) -> None:
    """The error is the same with and without quantization, where transformers said "look at the above report"."""
    for directory in (gptq.model, gptq.reference):
        tensors = load_file(directory / "model.safetensors")
        name = "model.embed_tokens.weight"
        tensors[name] = tensors[name][:500].clone()
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for read in (lambda: load(gptq.model), lambda: load_model(open_checkpoint(str(gptq.reference)), "float32")):
        with pytest.raises(StartError) as caught:
            read()
        assert f"{name}: 500×64, not 512×64" in caught.value.why


def test_a_missing_quantized_weight_is_an_error(gptq: Pair) -> None:
    name = "model.layers.1.mlp.up_proj"
    change(gptq, lambda tensors: [tensors.pop(f"{name}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")])
    with pytest.raises(StartError) as caught:
        load(gptq.model)
    assert f"{name}.weight" in caught.value.why


def test_layers_that_are_not_quantized_stay_plain(gptq: Pair) -> None:
    name = "model.layers.1.mlp.up_proj"
    dense = load_file(gptq.reference / "model.safetensors")[f"{name}.weight"]

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{name}.{part}")
        tensors[f"{name}.weight"] = dense

    change(gptq, restore)
    loaded = load(gptq.model)
    assert type(loaded.model.get_submodule(name)) is nn.Linear
    assert type(loaded.model.get_submodule("model.layers.0.mlp.up_proj")) is CompactLinear
    assert off(loaded.model, gptq.reference) <= SPREAD


def test_experts_of_which_some_are_plain_are_dequantized(tmp_path: Path) -> None:
    original = make_model("qwen3-moe", tmp_path / "original", moe_intermediate_size=64)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    pair = maker.quantized_hub(original, tmp_path, settings, maker.gptq)
    start = "model.layers.1.mlp.experts.2.up_proj"
    dense = load_file(pair.reference / "model.safetensors")[f"{start}.weight"]

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{start}.{part}")
        tensors[f"{start}.weight"] = dense

    change(pair, restore)
    loaded = load(pair.model)
    assert type(loaded.model.get_submodule("model.layers.0.mlp.experts")) is CompactExperts
    assert type(loaded.model.get_submodule("model.layers.1.mlp.experts")) is not CompactExperts
    assert "11 weights dequantized" in loaded.notes[0], "all others of this layer: 4 x 3 - 1"
    assert off(loaded.model, pair.reference) <= SPREAD


def test_computes_in_bfloat16(gptq: Pair) -> None:
    found = logits(load(gptq.model, "bfloat16").model)
    assert found.dtype == torch.bfloat16
    assert deviation(found, torch.from_numpy(Reference(gptq.reference).logits(IDS))) < TOLERANCE[torch.bfloat16]


def test_engine_serves_it_and_says_so(gptq: Pair) -> None:
    options = {"dtype": "float32", "num_kv_blocks": 8, "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
    engine = load_engine(open_checkpoint(str(gptq.model)), **options)  # type: ignore[arg-type]
    assert any("weights stay quantized: 21 in GPTQ 4-bit" in note for note in engine.notes)
    plain = engine.fingerprint
    engine.close()
    again = load_engine(open_checkpoint(str(shutil.copytree(gptq.model, gptq.model.with_name("copy")))), **options)  # type: ignore[arg-type]
    assert again.fingerprint == plain
    again.close()
    with pytest.raises(StartError, match="in fp8"):
        load_engine(open_checkpoint(str(gptq.model)), quantization="fp8", **options)  # type: ignore[arg-type]


def test_engine_checks_a_model_whose_embedding_is_quantized(tmp_path: Path) -> None:
    pair = Case("Q4_1 as SmolLM2", "gemma2").make(tmp_path)
    options = {"dtype": "float32", "num_kv_blocks": 8, "max_batched_tokens": 64, "max_num_seqs": 4, "batch_hint": 4}
    engine = load_engine(open_checkpoint(str(pair.model)), products="exact", **options)  # type: ignore[arg-type]
    assert any("1 in Q8_0, 28 in Q4_1" in note for note in engine.notes)
    assert off(engine.model, pair.reference) <= SPREAD
    engine.close()


def test_a_nested_configuration_is_found(gptq: Pair) -> None:
    """Models of images and text have it in ``text_config``."""
    config = json.loads((gptq.model / "config.json").read_text())
    settings = config.pop("quantization_config")
    (gptq.model / "config.json").write_text(json.dumps({**config, "compression_config": settings}))
    assert off(load(gptq.model).model, gptq.reference) <= SPREAD
