"""Counts parameters, and the bytes that they take in memory, from the tensors of weight files, quantized or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from common.checkpoint.formats import WeightFormat, bits_of
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
PLAIN_KINDS = frozenset({"F32", "F16", "BF16"})


def weight_bytes(found: Preview, dtype: KvDtype) -> int:
    """Return the bytes of the weights in memory, those that are not quantized in ``dtype``."""
    if (sizes := found.checkpoint.sizes) is not None:
        return sizes.bytes_in(ELEMENT_BYTES[dtype])
    return found.weight_bytes * ELEMENT_BYTES[dtype] // ELEMENT_BYTES[found.dtype]


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
    return tensor.size * 32 // bits_of(weights.settings, name) if _PACKED_INTO_WORDS.search(name) else tensor.size


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((value for name in names if type(value := config.get(name)) is int), 0)
