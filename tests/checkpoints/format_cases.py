"""The grid of quantized checkpoints: formats, and families of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Type

from tests.checkpoints import quantized_maker as maker
from tests.checkpoints.quantized_maker import Pair, Recipe
from tests.models import make_model

FAMILIES = ("llama", "qwen3", "gemma2", "qwen3-moe")
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "small": {"intermediate_size": 128},
    "blocks of 256": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
}
RECIPES: Mapping[str, Recipe] = {
    "Q8_0": {"": Type.Q8_0},
    "Q4_0": {"": Type.Q4_0},
    "Q5_0": {"": Type.Q5_0},
    "Q5_1": {"": Type.Q5_1},
    "Q4_1 as SmolLM2": {"token_embd|embed_tokens": Type.Q8_0, "": Type.Q4_1},
    "Q4_K_M": {"token_embd|embed_tokens|attn_v|v_proj|ffn_down|down_proj": Type.Q6_K, "": Type.Q4_K},
}
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
BYTES = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def compressed(form: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


HUB: Mapping[str, tuple[dict[str, Any], Callable[[maker.Array], maker.Rounded]]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, maker.gptq),
    "GPTQ 8-bit": ({"quant_method": "gptq", "bits": 8, "group_size": 64}, partial(maker.gptq, bits=8, size=64)),
    "GPTQ in order of activation": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        partial(maker.gptq, order=True),
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, maker.awq),
    "w4a16": (compressed("pack-quantized", PACKED), maker.pack_quantized),
    "w8a8": (compressed("int-quantized", BYTES), maker.int_quantized),
    "fp8 per tensor": (compressed("float-quantized", FLOATS), maker.fp8_tensor),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, maker.fp8_blocks),
}


@dataclass(frozen=True)
class Case:
    """A format, and the family of the model."""

    format: str
    kind: str

    def __str__(self) -> str:
        return f"{self.format}-{self.kind}".replace(" ", "_")

    def make(self, directory: Path) -> Pair:
        """Write the checkpoint and its reference."""
        recipe = RECIPES.get(self.format, {})
        shape = SHAPES["blocks of 256" if Type.Q4_K in recipe.values() else "small"]
        sizes = {**shape, **({"moe_intermediate_size": shape["intermediate_size"]} if self.kind == "qwen3-moe" else {})}
        sizes |= {"query_pre_attn_scalar": sizes.get("head_dim", 16)} if self.kind == "gemma2" else {}
        if self.kind == "gemma3":  # the layers that a GGUF file of it stands for
            sizes |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
        original = make_model(self.kind, directory / "original", **sizes)
        if recipe:
            return maker.quantized_gguf(original, directory, recipe)
        if self.format == "MXFP4":
            return maker.quantized_mxfp4(original, directory)
        return maker.quantized_hub(original, directory, *HUB[self.format])


EVERY = (
    *(Case(name, kind) for name in (*RECIPES, *HUB) for kind in FAMILIES),
    *(Case("MXFP4", "gpt-oss"), Case("Q4_0", "gpt-oss"), Case("Q5_0", "mixtral"), Case("Q8_0", "gemma3")),
)


def cases(*sample: tuple[str, str]) -> list[Any]:
    """Return every case; those that are not in ``sample`` run in `make test-all` only."""
    assert {*sample} <= {(case.format, case.kind) for case in EVERY}
    marks = {case: () if (case.format, case.kind) in sample else pytest.mark.whole for case in EVERY}
    return [pytest.param(case, marks=mark) for case, mark in marks.items()]
