"""Weights that we rounded, as compressed-tensors checkpoints have them (pack-quantized)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.quantization.packing import pack_int32, unpack_nibbles
from common.quantization.weight import QuantizedWeight


def exported(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by their suffixes: ``weight_packed`` and so on.

    Raises ValueError unless ``weight`` is one of :func:`common.quantization.weight.quantize`: integers with one scale
    per group, symmetric of 8 bits or with zeros of 4 bits.
    """
    kept = {"codes", "scales", "zeros"}
    if weight.coding != "int" or not weight.tensors().keys() <= kept or weight.span != 1:
        raise ValueError(f"{weight.source or 'this weight'} is no weight of plain groups")
    if weight.zeros is None and weight.zero != 1 << weight.bits - 1:
        raise ValueError(f"a symmetric weight of {weight.bits} bits has the zero {1 << weight.bits - 1}")
    codes = unpack_nibbles(weight.codes, weight.group) if weight.bits == 4 else weight.codes
    found = {
        "weight_packed": pack_int32(codes[:, : weight.shape[1]], weight.bits),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        found["weight_zero_point"] = pack_int32(weight.zeros.t(), weight.bits).t().contiguous()
    return found


def quantization_config(bits: int, group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """Return ``quantization_config`` of a checkpoint whose linear layers, except the modules ``ignored``, are rounded
    to ``bits`` in groups of ``group``."""
    weights = {
        "num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": bits == 8,
        "dynamic": False, "actorder": None, "observer": "minmax",
    }  # fmt: skip
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group_0}, "ignore": list(ignored), "kv_cache_scheme": None,
    }  # fmt: skip
