"""Parameters are counted from the tensors of weight files, in every format."""

from __future__ import annotations

from typing import Any

import pytest

from common.checkpoint.formats import GGUF, SAFETENSORS, WeightFormat, read_format
from common.checkpoint.parameters import count_parameters
from common.checkpoint.preview import Tensor

OUT, IN, GROUP = 96, 256, 64
MATRIX = OUT * IN


def quantized(method: str, **settings: Any) -> WeightFormat:
    return read_format({"quantization_config": {"quant_method": method, **settings}})


PACKED = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": GROUP}}}}
FORMATS: dict[str, tuple[WeightFormat, dict[str, Tensor]]] = {
    "plain": (SAFETENSORS, {"x.weight": Tensor("BF16", (OUT, IN)), "x.rotary_emb.inv_freq": Tensor("F32", (32,))}),
    "gptq": (
        quantized("gptq", bits=4),
        {
            "x.qweight": Tensor("I32", (IN // 8, OUT)),
            "x.qzeros": Tensor("I32", (IN // GROUP, OUT // 8)),
            "x.scales": Tensor("F16", (IN // GROUP, OUT)),
            "x.g_idx": Tensor("I32", (IN,)),
        },
    ),
    "gptq 8": (quantized("gptq", bits=8), {"x.qweight": Tensor("I32", (IN // 4, OUT))}),
    "gptq 3": (quantized("gptq", bits=3), {"x.qweight": Tensor("I32", (IN * 3 // 32, OUT))}),
    "awq": (
        quantized("awq", w_bit=4),
        {"x.qweight": Tensor("I32", (IN, OUT // 8)), "x.scales": Tensor("F16", (IN // GROUP, OUT))},
    ),
    "compressed": (
        quantized("compressed-tensors", **PACKED),
        {
            "x.weight_packed": Tensor("I32", (OUT, IN // 8)),
            "x.weight_scale": Tensor("BF16", (OUT, IN // GROUP)),
            "x.weight_shape": Tensor("I64", (2,)),
            "x.weight_zero_point": Tensor("I32", (OUT // 8, IN // GROUP)),
        },
    ),
    "fp8": (
        quantized("fp8", weight_block_size=[128, 128]),
        {"x.weight": Tensor("F8_E4M3", (OUT, IN)), "x.weight_scale_inv": Tensor("F32", (1, 2))},
    ),
    "mxfp4": (
        quantized("mxfp4"),
        {"x_proj_blocks": Tensor("U8", (1, OUT, IN // 32, 16)), "x_proj_scales": Tensor("U8", (1, OUT, IN // 32))},
    ),
    "gguf": (GGUF, {"blk.0.x.weight": Tensor("Q4_K", (OUT, IN)), "rope_freqs.weight": Tensor("F32", (32,))}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_has_as_many_parameters_in_every_format(name: str) -> None:
    weights, tensors = FORMATS[name]
    assert count_parameters(tensors, weights, {}) == (MATRIX, MATRIX)


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        ([f"model.layers.0.mlp.experts.{at}.up_proj.weight" for at in range(8)], SAFETENSORS),
        (["model.layers.0.mlp.experts.gate_up_proj"], SAFETENSORS),
        (["blk.0.ffn_up_exps.weight"], GGUF),
    ],
)
def test_a_token_uses_some_of_the_experts(names: list[str], weights: WeightFormat) -> None:
    tensors = {name: Tensor("F32", (8 // len(names), OUT, IN)) for name in names}
    rest = {
        "model.layers.0.mlp.gate.weight": Tensor("F32", (8, IN)),
        "blk.0.ffn_up_shexp.weight": Tensor("F32", (OUT, IN)),
        "model.layers.0.mlp.shared_experts.up_proj.weight": Tensor("F32", (OUT, IN)),
    }
    outside = 8 * IN + 2 * MATRIX
    for used in ("num_experts_per_tok", "moe_topk"):
        found = count_parameters(tensors | rest, weights, {"num_local_experts": 8, used: 2})
        assert found == (8 * MATRIX + outside, 2 * MATRIX + outside)
    assert count_parameters(tensors | rest, weights, {}) == (8 * MATRIX + outside,) * 2
