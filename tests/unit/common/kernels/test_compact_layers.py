"""Models whose weights stay quantized run as fused layers, all in one call, with the numbers of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.checkpoint.files import open_checkpoint
from common.engine.loading import load_engine
from common.kernels import cpu
from common.model.compact import CompactEmbedding, CompactLinear
from common.model.layers import FusedLayer, fuse_layers
from common.model.load import load_model
from common.model.round_linears import refine
from common.quantization.weight import QuantizedWeight, quantize
from tests.unit.common.kernels.test_layers import AT_ONCE, OPTIONS, chunk_beside_decode

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="needs the compiled kernels")


@pytest.fixture(params=library.variants if (library := cpu.library()) else ())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    assert library is not None
    library.use(request.param)
    yield request.param
    library.use(library.variants[0])


def two_levels(weight: torch.Tensor) -> QuantizedWeight:
    """Groups of 16 with two levels of scales, as Q6_K has them."""
    one = quantize(weight, 8, 16)
    span = one.groups
    top = one.scales.float().amax(1, keepdim=True) / 127
    sub = (one.scales.float() / torch.where(top == 0, 1.0, top)).round().to(torch.int8)
    return replace(one, scales=top, sub_scales=sub, span=span)


def compacted(model: Any, dtype: torch.dtype, exact: bool, embedding: bool = True) -> Any:
    """Replace all linears of ``model``: v and down by two levels of scales, the others by 4 bits, the embedding and the
    output layer by 8 bits, as the files of Q4_K_M mix them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight = child.weight.detach().float()
                make = {"v_proj": two_levels, "down_proj": two_levels, "lm_head": lambda whole: quantize(whole, 8, 32)}
                rounded = make.get(name, lambda whole: quantize(whole, 4, 32))(weight)
                setattr(parent, name, CompactLinear(rounded, child.bias, dtype, exact=exact))
    if embedding:
        table = quantize(model.model.embed_tokens.weight.detach().float(), 8, 32)
        model.model.embed_tokens = CompactEmbedding(table, dtype)
    return model


def load(path: Path, dtype: str, exact: bool) -> Any:
    model = compacted(load_model(open_checkpoint(str(path)), dtype), getattr(torch, dtype), exact)
    if not exact:
        refine(model)
    return model


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exact", [True, False])
def test_layers_of_several_formats_are_fused(
    kind: str, dtype: str, exact: bool, variant: str, checkpoint: Callable[[str], Path]
) -> None:
    model = load(checkpoint(kind), dtype, exact)
    alone = [layer.self_attn.q_proj.parts[0] for layer in model.model.layers]
    assert fuse_layers(model) == len(model.model.layers) > 0
    for layer, part in zip(model.model.layers, alone, strict=True):
        assert isinstance(layer, FusedLayer) and isinstance(layer.qkv, CompactLinear)
        assert layer.qkv.parts[0] is part and len(layer.qkv.parts) == 3  # no copy of the weights
        terms = 1 if exact else 2
        assert layer.qkv.exact is exact and layer.qkv.terms == [terms] * 3
        assert layer.down.terms == [terms] and layer.out.terms == [1] and layer.gate_up.terms == [1, 1]
    assert model.lm_head.terms == [terms]


def test_a_layer_with_some_plain_linears(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v are one product, so all of them have to be compact, or none."""
    monkeypatch.setattr("common.model.layers.native_pays", lambda dtype: True)
    plain = load_model(open_checkpoint(str(checkpoint("llama"))), "float32")
    model = load(checkpoint("llama"), "float32", True)
    model.model.layers[0].self_attn.o_proj = plain.model.layers[0].self_attn.o_proj
    model.model.layers[1].self_attn.k_proj = plain.model.layers[1].self_attn.k_proj
    assert fuse_layers(model) == len(model.model.layers) - 1
    assert not isinstance(model.model.layers[1], FusedLayer)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("embedding", [True, False])
def test_all_layers_in_one_call(
    kind: str, dtype: Any, exact: bool, embedding: bool, checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The results equal those of one call per layer, and of float32 are near those of the layers in torch."""

    def loaded(*args: Any) -> Any:
        return compacted(load_model(*args), getattr(torch, dtype), exact, embedding)

    monkeypatch.setattr("common.engine.prepared.load_model", loaded)
    path = open_checkpoint(str(checkpoint(kind)))
    engine = load_engine(path, dtype=dtype, **OPTIONS)
    assert any(AT_ONCE in note for note in engine.notes)
    batch = chunk_beside_decode()
    tokens, at_once = engine.step(batch).tokens, engine.logits(batch).clone()
    engine.decoder = None
    assert engine.step(batch).tokens == tokens
    assert torch.equal(engine.logits(batch), at_once)
    engine.close()
    if dtype == "bfloat16":
        return  # torch rounds what is summed here in float32
    monkeypatch.setattr(cpu, "library", lambda: None)
    slow = load_engine(path, dtype=dtype, **OPTIONS)
    expected = slow.logits(batch).float()
    slow.close()
    assert float((at_once - expected).abs().max() / expected.std()) < (1e-4 if exact else 0.05)
