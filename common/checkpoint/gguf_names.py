"""The names that the tensors of a GGUF file have in a checkpoint of transformers, and how their rows differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from common.checkpoint.gguf import GgufModel
from common.checkpoint.gguf_config import EMBEDDING, OUTPUT, architecture_of
from common.checkpoint.gguf_rope import LLAMA3, LONG, SHORT
from common.core.errors import StartError

Rows = Literal["", "query", "key", "gate", "up"]


@dataclass(frozen=True)
class Target:
    """Where a tensor belongs. ``name``: its name in transformers' checkpoint, with ``{}`` for the number of the expert
    if the tensor holds all experts, one after the other. ``rows``: the rows of queries or keys are in the order of
    rotated pairs (see :func:`head_order`); "gate" and "up" are the even and the odd rows of one tensor. ``minus_one``:
    1 is to be subtracted. ``unsqueeze``: a vector that is a matrix of one row there."""

    name: str
    rows: Rows = ""
    minus_one: bool = False
    unsqueeze: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the tensor holds all experts of a layer."""
        return "{}" in self.name


_TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    OUTPUT: "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Parts of a layer, as most models name them."""
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_PARTS: Mapping[str, Mapping[str, str]] = {
    "gemma2": _FOUR_NORMS,
    "gemma3": _FOUR_NORMS,
    "olmo2": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {
        "attn_post_norm": "post_attention_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps": "mlp.experts.{}.gate_up_proj",
        "ffn_up_exps": "mlp.experts.{}.gate_up_proj",
    },
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{name}" for part, name in
       (("gate", "w1"), ("down", "w2"), ("up", "w3"))},
}  # fmt: skip
_OLD_EXPERT = re.compile(r"ffn_(gate|down|up)\.(\d+)")
_LAYER = re.compile(r"blk\.(\d+)\.(.+?)\.?(weight|bias)?")
_LEFT_OUT = frozenset((LLAMA3, LONG, SHORT))
"""Tensors that become part of the configuration."""


def targets(model: GgufModel) -> dict[str, Target]:
    """Return the target of each tensor by its name in the file. Raises StartError if a tensor has none: a model without
    it would answer, but nonsense."""
    found = dict[str, Target]()
    for name in model.tensors:
        if name.rpartition("blk.")[2].partition(".")[2] in _LEFT_OUT or name in _LEFT_OUT:
            continue
        target = _target(model, name)
        if target is None:
            why = f"it has a tensor {name}, which {model.architecture} should not have"
            raise StartError(f"cannot serve {model.files[0]}", why, "use the checkpoint in safetensors format")
        found[name] = target
    return found


def _target(model: GgufModel, name: str) -> Target | None:
    architecture = architecture_of(model)
    norm = "norm" in name and architecture.norms_plus_one
    if name in _TOP:
        return Target(_TOP[name], minus_one=norm)
    if (layer := _LAYER.fullmatch(name)) is None:
        return None
    number, part, kind = layer[1], layer[2], layer[3] or "weight"
    prefix = f"model.layers.{number}"
    experts = bool(model.get("expert_count")) and model.architecture == "llama"
    if experts and (old := _OLD_EXPERT.fullmatch(part)):  # one tensor per expert, as older files have them
        mixtral = _MIXTRAL[f"ffn_{old[1]}_exps"].format(old[2])
        return Target(f"{prefix}.{mixtral}.{kind}")
    parts = {**_PARTS, **(_MIXTRAL if experts else {}), **_OTHER_PARTS.get(model.architecture, {})}
    if (there := parts.get(part)) is None:
        return None
    rows: Rows = ""
    if architecture.rotated_pairs and part in ("attn_q", "attn_k"):
        rows = "query" if part == "attn_q" else "key"
    if model.architecture == "gpt-oss" and part in ("ffn_gate_exps", "ffn_up_exps"):
        rows = "gate" if part == "ffn_gate_exps" else "up"
    suffix = "" if part == "attn_sinks" else f".{kind}"
    return Target(f"{prefix}.{there}{suffix}", rows, norm, unsqueeze=part == "ffn_gate_inp_shexp")


def head_order(heads: int, head_dim: int) -> list[int]:
    """Return the rows of a projection of queries or keys in transformers' order: row n there is row ``order[n]`` of the
    file, which has the two halves of each head interleaved."""
    half = head_dim // 2
    return [head * head_dim + 2 * at + side for head in range(heads) for side in (0, 1) for at in range(half)]
