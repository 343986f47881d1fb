"""The shape of keys and values is that of the configuration, or unknown."""

from __future__ import annotations

from typing import Any

import pytest

from common.checkpoint.kv_shape import layers_of
from common.kv.layout import LayerLayout

BASE: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
EQUAL = (LayerLayout(4, 16, 16),) * 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, EQUAL),
        ({"num_key_value_heads": 2, "head_dim": 32}, (LayerLayout(2, 32, 32),) * 3),
        ({"multi_query": True}, (LayerLayout(1, 16, 16),) * 3),
        (
            {"kv_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
            (LayerLayout(4, 24, 12),) * 3,
        ),
        ({"kv_lora_rank": 8}, None),
        (
            {"per_layer_config": {"01": {"head_dim": 32, "num_key_value_heads": 2}}},
            (LayerLayout(4, 16, 16), LayerLayout(2, 32, 32), LayerLayout(4, 16, 16)),
        ),
        ({"swa_num_key_value_heads": 2}, None),
        ({"global_head_dim": 512}, None),
        ({"global_head_dim": None}, EQUAL),
        ({"model_type": "jetmoe"}, None),
        ({"num_hidden_layers": None}, None),
        ({"num_attention_heads": None}, None),
        ({"num_key_value_heads": [2, 2, 4]}, None),
        ({"head_dim": [16, 16, 32]}, None),
    ],
)
def test_shapes(fields: dict[str, Any], expected: tuple[LayerLayout, ...] | None) -> None:
    assert layers_of(BASE | fields) == expected


def test_names_of_gpt2() -> None:
    assert layers_of({"n_layer": 3, "n_head": 4, "n_embd": 64}) == EQUAL
