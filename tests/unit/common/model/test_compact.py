"""Layers over quantized weights, against dense products with the dequantized weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.integrations import moe

from common.engine.capture_audit import audit
from common.kernels import cpu
from common.model import compact
from common.model.compact import CompactEmbedding, CompactLinear, round_activations
from common.model.compact_experts import CompactExperts
from common.quantization.panels import Panels
from common.quantization.weight import QuantizedWeight, concatenate, quantize
from tests.device_watch import DeviceWatch
from tests.unit.common.quantization.test_weight import KINDS, random_weight


@pytest.fixture(params=["C", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute by our kernels, or in torch in small chunks."""
    monkeypatch.setattr(compact, "_CHUNK", 1000)
    if request.param == "torch":
        monkeypatch.setattr(cpu, "library", lambda: None)
    elif cpu.library() is None:
        pytest.skip("needs the compiled kernels")
    return str(request.param)


def near(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    """Return whether no element differs by more than ``share`` of the largest."""
    return float((found - expected).abs().max()) <= share * float(expected.abs().max())


def some_rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_products_are_those_of_dequantized_weights(kind: str, dtype: torch.dtype) -> None:
    weight, bias = random_weight(kind, 50), some_rows(50)
    x = some_rows(2, 3, 256).to(dtype)
    layer = CompactLinear(weight, bias, dtype, exact=True)
    expected = functional.linear(x, weight.dequantize(dtype)) + bias.to(dtype)
    found = layer(x)
    assert found.dtype == dtype and found.shape == (2, 3, 50)
    assert near(found, expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert (layer.weight.dtype, layer.weight.shape, layer.weight.is_meta) == (dtype, (50, 256), True)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_products(activation: str) -> None:
    gate, up = random_weight("int4", 10, seed=1), random_weight("int4", 10, seed=2)
    x = some_rows(4, 256) / 100
    layer = CompactLinear.joined([gate, up], [None, None], torch.float32, exact=True, activation=activation)
    act = compact.ACTIVATIONS[activation]
    expected = act(functional.linear(x, gate.dequantize())) * functional.linear(x, up.dequantize())
    assert near(layer(x), expected, 1e-5)
    assert layer.out_features == 10
    whole = concatenate([gate, up])
    assert whole is not None
    single = CompactLinear(whole, None, torch.float32, exact=True, activation=activation)
    assert torch.equal(single(x), layer(x))


def test_weights_of_several_formats_in_one_layer() -> None:
    weights = [random_weight(kind, 6, seed=at) for at, kind in enumerate(("int4", "int4", "two levels"))]
    bias = some_rows(6)
    layer = CompactLinear.joined(weights, [None, bias, None], torch.float32, exact=True)
    x = some_rows(5, 256)
    dense = torch.cat([weight.dequantize() for weight in weights])
    expected = functional.linear(x, dense, torch.cat([torch.zeros(6), bias, torch.zeros(6)]))
    assert near(layer(x), expected, 1e-5)
    assert layer.quantized is None and [part.shape[0] for part in layer.parts] == [6, 6, 6]
    assert layer.bias is not None and torch.equal(layer.bias[6:12], bias)
    with pytest.raises(ValueError, match="cannot be joined"):
        CompactLinear.joined(weights * 2, [None] * 6, torch.float32, exact=True)


def test_no_rows() -> None:
    for exact in (True, False):
        layer = CompactLinear(random_weight("int8"), None, torch.float32, exact=exact)
        assert layer(torch.zeros(2, 0, 256)).shape == (2, 0, 6)


def with_order(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, order=torch.randperm(256, generator=torch.Generator().manual_seed(3)).int())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_integer_products_round_each_group_of_activations(ordered: bool, group: int) -> None:
    weight = random_weight("int8", 9, 256 // group, group)
    weight = with_order(weight) if ordered else weight
    x = some_rows(3, 256)
    x[1, 7], x[2] = 1000.0, 0.0  # an outlier, which must not cost the other groups, and a row of zeros
    size = max(32, group)
    columns = torch.arange(256) if weight.order is None else weight.order.long()
    expected = torch.zeros_like(x)
    for row in range(3):
        for start in range(0, 256, size):
            place = columns[start : start + size]
            scale = float(x[row, place].abs().max()) / 127
            for column in place.tolist():
                expected[row, column] = round(float(x[row, column]) / scale) * scale if scale else 0.0
    found = round_activations(x, weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    layer = CompactLinear(weight, None, torch.float32, exact=False)
    assert near(layer(x), functional.linear(expected, weight.dequantize()), 1e-5)


def test_integer_products_are_near_exact_ones() -> None:
    weight = quantize(some_rows(64, 250), 4, 32)
    x = some_rows(16, 250, seed=2)
    exact, integer = (CompactLinear(weight, None, torch.float32, exact=each)(x) for each in (True, False))
    assert float((exact - integer).std() / exact.std()) < 0.01
    assert not torch.equal(exact, integer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings(dtype: torch.dtype) -> None:
    weight = random_weight("two levels", 20)
    ids = torch.tensor([[3, 19], [0, 3]], dtype=torch.int32)
    layer = CompactEmbedding(weight, dtype)
    assert torch.equal(layer(ids), weight.dequantize(dtype)[ids.long()])
    assert (layer.num_embeddings, layer.embedding_dim, layer.weight.dtype) == (20, 256, dtype)
    assert layer(torch.zeros(0, dtype=torch.int64)).shape == (0, 256)
    with pytest.raises(IndexError):
        layer(torch.tensor([20]))


def test_tied_layers_share_panels(kernels: str) -> None:
    weight = random_weight("int8", 20)
    embedding, linear = CompactEmbedding(weight, torch.float32), CompactLinear(weight, None, torch.float32, exact=True)
    assert linear.parts == [embedding.part]
    assert isinstance(embedding.part, Panels) is (kernels == "C") is bool(linear.address)


class Experts(nn.Module):
    """What a mixture's experts in transformers tell: how the gate is applied."""

    has_bias = False
    _apply_gate = moe._default_apply_gate

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.act_fn = ACT2FN[activation]


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_are_summed_by_their_weights(activation: str, stacked: bool, tokens: int) -> None:
    """An index beyond the last expert chooses none. The gate of a usual activation is part of its product."""
    gates, ups = ([random_weight("int4", 32, seed=10 * part + each) for each in range(4)] for part in (1, 2))
    downs = [random_weight("int8", 256, 1, 32, seed=each) for each in range(4)]
    dtype, gate_up = torch.float32, []
    for gate, up in zip(gates, ups, strict=True):
        whole = concatenate([gate, up])
        assert whole is not None
        one = CompactLinear(whole, None, dtype, exact=True)
        gate_up.append(one if stacked else CompactLinear.joined([gate, up], [None, None], dtype, exact=True))
    experts = CompactExperts(Experts(activation), gate_up, [CompactLinear(w, None, dtype, exact=True) for w in downs])
    assert experts.is_gated is (activation != "relu")
    x, weights = some_rows(tokens, 256) / 100, some_rows(tokens, 2, seed=2)
    index = torch.tensor([[3, 1], [4, 0], [2, 3]]).repeat(3, 1)[:tokens]
    expected = torch.zeros(tokens, 256)
    for row in range(tokens):
        for which, weight in zip(index[row].tolist(), weights[row], strict=True):
            if which < 4:
                first = ACT2FN[activation](gates[which].dequantize() @ x[row]) * (ups[which].dequantize() @ x[row])
                expected[row] += downs[which].dequantize() @ first * weight
    assert near(experts(x, index, weights), expected, 1e-5)
    assert torch.equal(experts(x[:1], torch.tensor([[4, 4]]), weights[:1]), torch.zeros(1, 256))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_a_device_make_nothing_on_the_host_and_can_be_captured(kind: str, exact: bool) -> None:
    """On meta tensors, which have no values to wait for."""
    meta = torch.device("meta")
    whole = random_weight(kind, 64)
    weight = replace(whole, **{name: tensor.to(meta) for name, tensor in whole.tensors().items()})
    bias, x = torch.empty(64, device=meta), torch.empty(3, 256, device=meta, dtype=torch.bfloat16)
    layers: list[nn.Module] = [
        CompactLinear(weight, bias, torch.bfloat16, exact=exact),
        CompactLinear(weight, None, torch.bfloat16, exact=exact, activation="silu"),
        CompactLinear.joined([weight, weight], [None, bias], torch.bfloat16, exact=exact),
    ]
    embedding, ids = CompactEmbedding(weight, torch.bfloat16), torch.zeros(3, dtype=torch.int64, device=meta)

    def step() -> None:
        with DeviceWatch(meta):
            outputs = [layer(x) for layer in layers]
            assert [out.shape[1] for out in outputs] == [64, 32, 128]
            assert embedding(ids).shape == (3, 256)

    assert audit(step) == []
