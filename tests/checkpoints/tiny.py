"""Tiny random checkpoints of any model type of transformers, from its default configuration with smaller numbers."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.models import BOS, EOS, HEADS, HIDDEN, KV_HEADS, PAD, VOCAB, _draw_weights, make_tokenizer

POSITIONS = 1024
WINDOW = 48
"""Sliding windows, in tokens: longer than the start-up check, shorter than the comparison of the sweep."""
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input", "ngram_vocab_size_base"), VOCAB
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "max_target_positions"),
        POSITIONS,
    ),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(
        ("input_embedding_size", "output_embedding_size", "attention_hidden_size", "ple_embed_dim"), HIDDEN
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "dff", "d_inner", "dim_ff", "n_inner"), 96),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_hidden_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "feed_forward_size",
        ),
        96,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks"), 3
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        HEADS,
    ),
    **dict.fromkeys(("swa_num_attention_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), KV_HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "d_head", "swa_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "attention_head_size", "dim_head", "query_pre_attn_scalar"), 16),
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "rotary_dim": 8,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_kv_shared_layers": 1,
    "num_nextn_predict_layers": 0,
    "index_topk": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW),
    "attention_chunk_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "image_size": 32,
    "patch_size": 16,
    "layer_group_size": 2,
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern", "max_window_layers"), 2),
}
"""Values of fields, where the default configuration has a number in them."""
SPECIAL_TOKENS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots3_note": {"num_key_value_heads": HEADS},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "nemotron": {"head_dim": 16, "num_key_value_heads": KV_HEADS},
}
"""Fields of single types."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")


def shrunk(config: Any, special: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a small configuration like ``config``. ``special`` has the last word."""
    values = config.to_dict()
    fields: dict[str, Any] = {name: each for name, each in SPECIAL_TOKENS.items() if name in values}
    fields |= {name: small for name, small in SMALL.items() if _is_number(values.get(name))}
    count = next((values[name] for name in LAYERS if _is_number(values.get(name))), 0)
    lists = {name: each for name, each in values.items() if isinstance(each, list) and len(each) == count > 1}
    chosen = _representative(list(zip(*lists.values(), strict=True)) if lists else [()] * count)
    fields |= {name: [each[at] for at in chosen] for name, each in lists.items()}
    fields |= {name: len(chosen) for name in LAYERS if name in fields and count}
    if "kv_lora_rank" in fields:  # latent attention expands keys for every head, and rotates a part of them
        replaced = {"num_key_value_heads": HEADS, "head_dim": SMALL["qk_rope_head_dim"]}
        fields |= {name: value for name, value in replaced.items() if name in fields}
    if values.get("is_decoder") is False:
        fields["is_decoder"] = True
    if "num_experts_per_tok" in values and any("experts" in name for name in fields):
        fields["num_experts_per_tok"] = SMALL["num_experts_per_tok"]
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            fields[name] = shrunk(part, {})
    return fields | special


def _is_number(value: Any) -> bool:
    return type(value) is int and value > 0


def _representative(layers: list[Any]) -> list[int]:
    """Return the indices of three or four layers, with as many kinds as possible."""
    firsts = [at for at, kind in enumerate(layers) if kind not in layers[:at]][:4]
    return sorted({*firsts, *[at for at in range(len(layers)) if at not in firsts][: max(3 - len(firsts), 0)]})


def make_tiny(model_type: str, directory: Path, special: Mapping[str, Any]) -> Path:
    """Write a tiny checkpoint of ``model_type`` with random weights and a tokenizer."""
    kind = CONFIG_MAPPING[model_type]
    config = kind(**shrunk(kind(), SPECIAL.get(model_type, {}) | special))
    shutil.rmtree(directory, ignore_errors=True)
    torch.manual_seed(zlib.crc32(model_type.encode()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    _draw_weights(model, seed=zlib.crc32(model_type.encode()))
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)  # that of the type, also where the class has only a part of it
    make_tokenizer().save_pretrained(directory)
    return directory


def make_empty(model_type: str, directory: Path) -> Path:
    """Write a checkpoint of ``model_type`` without weights."""
    directory.mkdir(parents=True)
    CONFIG_MAPPING[model_type]().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    save_file({"none": torch.zeros(1)}, directory / "model.safetensors")
    return directory
