"""The configuration of transformers' model that a GGUF file describes.

GGUF metadata has the sizes of a model under names of its own, and nothing that is the same for all models of an
architecture. What each architecture needs beside the common sizes is in :data:`ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoint.gguf import GgufModel
from common.checkpoint.gguf_rope import rope_parameters
from common.checkpoint.support import causal_models
from common.checkpoint.values import check_count
from common.core.errors import StartError

TOKENS = "tokenizer.ggml.tokens"
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
_SAFETENSORS = "use the model's checkpoint in safetensors format"
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Names of the ggml types that are not quantized."""


@dataclass(frozen=True)
class Architecture:
    """How a GGUF architecture becomes a model type of transformers.

    ``rotated_pairs``: the file has the rows of queries and keys in the order in which llama.cpp rotates adjacent pairs,
    not that of transformers. ``norms_plus_one``: it has the weights of norms + 1. ``more``: returns the fields beside
    the common ones."""

    model_type: str
    more: Callable[[GgufModel, dict[str, Any]], dict[str, Any]]
    rotated_pairs: bool = False
    norms_plus_one: bool = False


def config_of(model: GgufModel) -> dict[str, Any]:
    """Return the content of config.json. Raises StartError if the architecture is not served, or the file lacks a
    value."""
    architecture = architecture_of(model)
    heads, hidden = uniform(model, "attention.head_count"), model.count("embedding_length")
    head_dim = model.count("attention.key_length", 0, least=0) or hidden // heads
    common: dict[str, Any] = {
        "vocab_size": _embedding_rows(model),
        "hidden_size": hidden,
        "num_hidden_layers": model.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": uniform(model, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": model.count("context_length"),
        "rope_parameters": rope_parameters(model, head_dim),
        "tie_word_embeddings": OUTPUT not in model.tensors,
        "dtype": _dtype(model),
    }
    if model.get("feed_forward_length"):
        common["intermediate_size"] = uniform(model, "feed_forward_length")
    for name, key in (("rms_norm_eps", "layer_norm_rms_epsilon"), ("layer_norm_eps", "layer_norm_epsilon")):
        if model.get(f"attention.{key}") is not None:
            common[name] = model.number(f"attention.{key}", 0.0)
    for name in ("bos", "eos", "padding"):
        if isinstance(value := model.metadata.get(f"tokenizer.ggml.{name}_token_id"), int):
            common[f"{name.replace('padding', 'pad')}_token_id"] = value
    fields = architecture.more(model, common)
    model_type = fields.pop("model_type", architecture.model_type)
    classes = (causal_models() or {}).get(model_type, ())
    return {"model_type": model_type, "architectures": list(classes[:1])} | common | fields


def generation_of(model: GgufModel) -> dict[str, Any]:
    """Return the content of generation_config.json: the ids that end a sequence, a turn or a message."""
    names = ("eos", "eot", "eom")
    ids = [model.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ends = list(dict.fromkeys(each for each in ids if isinstance(each, int)))
    found: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    for name in ("bos", "padding"):
        if isinstance(value := model.metadata.get(f"tokenizer.ggml.{name}_token_id"), int):
            found[f"{name.replace('padding', 'pad')}_token_id"] = value
    return found


def architecture_of(model: GgufModel) -> Architecture:
    """Return the entry of :data:`ARCHITECTURES`. Raises StartError if there is none."""
    if found := ARCHITECTURES.get(model.architecture):
        return found
    why = NOT_SERVED.get(model.architecture, f"is not one of {', '.join(sorted(ARCHITECTURES))}")
    raise StartError(f"cannot serve {model.files[0]}", f"its architecture {model.architecture} {why}", _SAFETENSORS)


def uniform(model: GgufModel, key: str, default: int | None = None) -> int:
    """Return a number that may be given per layer. Raises StartError if it differs between layers."""
    value = model.need(key) if default is None else model.get(key, default)
    check_count(str(model.files[0]), f"{model.architecture}.{key}", value, per_layer=True)
    if not isinstance(value, list):
        return int(value)
    if len(set(value)) != 1:
        raise StartError(f"cannot serve {model.files[0]}", f"its layers differ in {key}", _SAFETENSORS)
    return int(value[0])


def _embedding_rows(model: GgufModel) -> int:
    tensor = model.tensors.get(EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        raise StartError(f"cannot serve {model.files[0]}", f"it has no {EMBEDDING}", "use a file of a whole model")
    return tensor.shape[0]


def _dtype(model: GgufModel) -> str:
    """Return the element type in which to compute: that of the matrices if they are not quantized."""
    kinds = {tensor.type for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return _FLOATS.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"


# -- architectures ----------------------------------------------------------------------------------------------------


def _llama(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    if model.count("expert_count", 0, least=0):
        return {"model_type": "mixtral", "num_local_experts": model.count("expert_count"),
                "num_experts_per_tok": model.count("expert_used_count")}  # fmt: skip
    return {"hidden_act": "silu"} | _biases(model)


def _biases(model: GgufModel) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in model.tensors, "mlp_bias": "blk.0.ffn_up.bias" in model.tensors}


def _qwen2(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return _qwen2(model, common) | {"attention_bias": "blk.0.attn_q.bias" in model.tensors}


def _experts(model: GgufModel) -> dict[str, Any]:
    return {
        "num_experts": model.count("expert_count"),
        "num_experts_per_tok": model.count("expert_used_count"),
        "moe_intermediate_size": model.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    shared = model.count("expert_shared_feed_forward_length", 0, least=0) or _rows(model, "blk.0.ffn_up_shexp.weight")
    return _qwen2(model, common) | _experts(model) | {
        "shared_expert_intermediate_size": shared, "norm_topk_prob": bool(model.get("expert_weights_norm", False)),
    }  # fmt: skip


def _rows(model: GgufModel, name: str) -> int:
    return model.tensors[name].shape[0] if name in model.tensors else 0


def _qwen3_moe(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    norm = bool(model.get("expert_weights_norm", True))
    return _qwen3(model, common) | _experts(model) | {"norm_topk_prob": norm}


def _gemma(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _alternating(model: GgufModel, common: dict[str, Any], every: int) -> dict[str, Any]:
    """Return the window of a model in which each ``every``-th layer has none."""
    layers = range(1, common["num_hidden_layers"] + 1)
    return {
        "sliding_window": model.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if at % every else "full_attention" for at in layers],
    }


def _gemma2(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    per_head = common["num_hidden_layers"] == 46  # 27B
    scalar = common["hidden_size"] // common["num_attention_heads"] if per_head else common["head_dim"]
    return _gemma(model, common) | _alternating(model, common, 2) | {
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": scalar,
    }  # fmt: skip


def _gemma3(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    per_head = common["num_hidden_layers"] == 62  # 27B
    scalar = common["hidden_size"] // common["num_attention_heads"] if per_head else common["head_dim"]
    base = model.number("rope.freq_base", 1_000_000.0)
    local = model.number("rope.freq_base_swa", 10_000.0)
    return _gemma(model, common) | _alternating(model, common, 6) | {
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": model.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "full_attention": common["rope_parameters"] | {"rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }  # fmt: skip


def _phi3(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    rope = common["rope_parameters"]
    fields: dict[str, Any] = {"sliding_window": model.count("attention.sliding_window", 0, least=0) or None}
    if "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if original := rope.get("original_max_position_embeddings"):
        fields["original_max_position_embeddings"] = original
    return fields


def _gpt_oss(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    width = model.count("expert_feed_forward_length", 0, least=0) or common.get("intermediate_size")
    rope = common["rope_parameters"]
    return _alternating(model, common, 2) | {
        "num_local_experts": model.count("expert_count"),
        "num_experts_per_tok": model.count("expert_used_count"),
        "intermediate_size": width or model.count("expert_feed_forward_length"),
        "attention_bias": True,
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _granite(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    names = {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }  # fmt: skip
    return _llama(model, common) | {name: model.number(key, 1.0) for key, name in names.items()}


def _plain(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in model.tensors}


def _starcoder2(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "norm_epsilon": common["layer_norm_eps"],
        "use_bias": "blk.0.attn_q.bias" in model.tensors,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": model.count("attention.sliding_window", 0, least=0) or None,
    }


def _cohere(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": model.number("logit_scale", 1.0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, rotated_pairs=True),
    "qwen2": Architecture("qwen2", _qwen2),
    "qwen3": Architecture("qwen3", _qwen3),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "gemma": Architecture("gemma", _gemma, norms_plus_one=True),
    "gemma2": Architecture("gemma2", _gemma2, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, norms_plus_one=True),
    "phi3": Architecture("phi3", _phi3),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss),
    "granite": Architecture("granite", _granite, rotated_pairs=True),
    "smollm3": Architecture("smollm3", _plain, rotated_pairs=True),
    "olmo2": Architecture("olmo2", _plain),
    "arcee": Architecture("arcee", _plain, rotated_pairs=True),
    "starcoder2": Architecture("starcoder2", _starcoder2),
    "command-r": Architecture("cohere", _cohere),
}
"""The architectures that are served, by ``general.architecture``."""

_STATE = "has layers with a recurrent state, not only attention: it is not served yet"
_OTHER = "is not a decoder-only language model"
_STATEFUL = (
    "mamba mamba2 jamba falcon-h1 rwkv6 rwkv6qwen2 rwkv7 lfm2 lfm2moe qwen3next qwen35 qwen35moe granitehybrid "
    "nemotron_h plamo2 kimi-linear"
).split()
_NO_DECODERS = "t5 t5encoder bert nomic-bert jina-bert-v2 modern-bert wavtokenizer-dec clip".split()
NOT_SERVED: Mapping[str, str] = {
    **dict.fromkeys(_STATEFUL, _STATE),
    **dict.fromkeys(_NO_DECODERS, _OTHER),
    "deepseek2": "splits the keys and values of latent attention: it is not served from GGUF yet",
    **dict.fromkeys(("falcon", "bloom", "mpt", "gptj"), "has an attention function of its own in transformers"),
}
"""Why other architectures are not served."""
