"""The shape of keys and values, from the configuration of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.kv.layout import LayerLayout

_BY_KIND = ("global_head_dim", "num_global_key_value_heads", "swa_head_dim", "swa_num_key_value_heads")
"""Fields with which layers differ by their kind, in ways of their own."""
_OF_THEIR_OWN = ("jetmoe", "mimo_v2_flash")
"""Model types whose attention has other heads than the fields say."""


def layers_of(config: dict[str, Any]) -> tuple[LayerLayout, ...] | None:
    """Return the KV shape of each layer, or None if ``config`` does not determine it."""
    count = config.get("num_hidden_layers", config.get("n_layer"))
    if not isinstance(count, int) or config.get("model_type") in _OF_THEIR_OWN:
        return None
    own = config.get("per_layer_config")
    fields = {int(at): each for at, each in own.items()} if isinstance(own, dict) else {}
    found = [_layer(config | fields.get(at, {})) for at in range(count)]
    return None if None in found else tuple(layer for layer in found if layer is not None)


def _layer(config: Mapping[str, Any]) -> LayerLayout | None:
    heads = config.get("num_attention_heads", config.get("n_head"))
    hidden = config.get("hidden_size", config.get("n_embd"))
    if not (isinstance(heads, int) and isinstance(hidden, int)) or any(config.get(name) for name in _BY_KIND):
        return None
    if "kv_lora_rank" in config:
        nope, rope, value = (config.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if not (isinstance(nope, int) and isinstance(rope, int) and isinstance(value, int)):
            return None
        return LayerLayout(heads, nope + rope, value)
    dim = config.get("head_dim") or hidden // heads
    keys = 1 if config.get("multi_query") else config.get("num_key_value_heads") or heads
    return LayerLayout(keys, dim, dim) if isinstance(dim, int) and isinstance(keys, int) else None  # or per layer
