"""Counts parameters, and the bytes that they take in memory, from the tensors of weight files, quantized or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from common.checkpoint.formats import WeightFormat
from common.checkpoint.preview import Preview, Tensor
from common.kv.layout import ELEMENT_BYTES, KvDtype

_HELPERS = re.compile(
    r"(qzeros|scales|g_idx|weight_scale(_inv)?|weight_zero_point|weight_shape|weight_g_idx|weight_scale_2|input_scale|"
    r"[kvq]_scale|prob_output_scale)$"
)
"""Names of tensors that belong to quantized weights: scales, zeros and orders."""
_BUFFERS = re.compile(r"(inv_freq|rope_freqs\.weight|rope_factors_(long|short)\.weight)$")
_PACKED_INTO_WORDS = re.compile(r"(qweight|weight_packed)$")
_PACKED_INTO_BYTES = re.compile(r"_blocks$")
_EXPERT = re.compile(r"\.experts\.|_exps\.|\.block_sparse_moe\.experts|\.ffn\.experts")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "experts_per_token")
GGUF_BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 8.5, "Q5_1": 9.0, "Q8_0": 8.5, "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625,
    "Q5_K": 8.625, "Q6_K": 8.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5,
}  # fmt: skip
"""Bits in memory of a weight of a GGUF type that is kept exactly, with its scales."""
EXPANDED_BITS = 8.5
"""Bits of a weight of any other quantized type, which is expanded to 8 bits in groups of 32."""
PLAIN_KINDS = frozenset({"F32", "F16", "BF16"})


def weight_bytes(found: Preview, dtype: KvDtype) -> int:
    """Return the bytes of the weights in memory, those that are not quantized in ``dtype``."""
    if not found.checkpoint.format.method:
        return found.weight_bytes * ELEMENT_BYTES[dtype] // ELEMENT_BYTES[found.dtype]
    if found.checkpoint.format.container != "gguf":
        return found.weight_bytes
    bits = 0.0
    for tensor in found.tensors.values():
        plain = tensor.kind in PLAIN_KINDS
        bits += tensor.size * (8 * ELEMENT_BYTES[dtype] if plain else GGUF_BITS.get(tensor.kind, EXPANDED_BITS))
    return int(bits / 8)


def count_parameters(
    tensors: Mapping[str, Tensor], weights: WeightFormat, config: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the number of parameters, and of those that one token uses: all, without the experts that it is not sent
    to. ``config``: that of the language model."""
    total = experts = 0
    for name, tensor in tensors.items():
        count = _count(name, tensor, weights)
        total += count
        if _EXPERT.search(name) and not name.endswith("bias"):
            experts += count
    every, used = _number(config, _COUNTS), _number(config, _USED)
    return total, total - experts + (experts * used // every if 0 < used < every else experts)


def _count(name: str, tensor: Tensor, weights: WeightFormat) -> int:
    if _BUFFERS.search(name) or (weights.method and _HELPERS.search(name)):
        return 0
    if _PACKED_INTO_BYTES.search(name):
        return 2 * tensor.size
    return tensor.size * 32 // _bits(weights) if _PACKED_INTO_WORDS.search(name) else tensor.size


def _bits(weights: WeightFormat) -> int:
    """Return the bits of each packed weight."""
    settings = weights.settings
    groups = settings.get("config_groups")
    if isinstance(groups, dict):
        found = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
        return next((int(each["num_bits"]) for each in found if "num_bits" in each), 4)
    return int(settings.get("bits") or settings.get("w_bit") or 4)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((value for name in names if type(value := config.get(name)) is int), 0)
