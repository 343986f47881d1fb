"""Weights of fp8 checkpoints: float8 e4m3 with one scale per tensor, per row or per block of rows and columns.

Methods fp8 (``weight_scale_inv`` per block, as DeepSeek and Qwen have it, or ``weight_scale``) and fbgemm_fp8
(``weight_scale`` per row). Scales are factors, whatever their name says; they may be powers of 2 in float8 e8m0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from common.quantization.floats import power_of_two
from common.quantization.groups import Grouped, regroup
from common.quantization.source import Make, TensorFiles, WeightSource, damaged
from common.quantization.weight import QuantizedWeight

E4M3 = "F8_E4M3"
SCALES = ("weight_scale_inv", "weight_scale")
DROPPED = ("input_scale", "activation_scale", "output_scale", "input_scale_ub", "q_scale", "k_scale", "v_scale",
           "prob_output_scale")  # fmt: skip
"""Static scales of activations and of the KV cache: both are rounded by their own values, if at all."""


def open_fp8(files: TensorFiles, settings: Mapping[str, Any]) -> WeightSource:
    """Return the weights of a checkpoint: a module is quantized if its ``weight`` is float8. Raises StartError if such
    a weight has no scale, or is no matrix."""
    given = settings.get("weight_block_size")
    block = (int(given[0]), int(given[1])) if given else None
    compact, used = dict[str, Make](), list[str]()
    for module in files.modules("weight"):
        name = f"{module}.weight"
        if not files.dtype(name).startswith("F8"):
            continue
        scale = next((f"{module}.{each}" for each in SCALES if f"{module}.{each}" in files), None)
        if scale is None or len(files.shape(name)) != 2 or files.dtype(name) != E4M3:
            kind = f"{files.dtype(name)} {list(files.shape(name))}"
            raise damaged(name, f"it is {kind}{' without a scale' if scale is None else ', which is not read'}")
        compact[name] = partial(read_fp8, files, name, scale, block)
        used += [name, *(f"{module}.{each}" for each in SCALES)]
    plain, notes = files.rest(used, DROPPED)
    return WeightSource(compact, plain, None, notes)


def read_fp8(files: TensorFiles, name: str, scale: str, block: tuple[int, int] | None) -> QuantizedWeight:
    """Return the float8 weight ``name`` with the scales ``scale``, of blocks of ``block`` rows and columns if there is
    more than one column of them."""
    codes = files.read(name).view(torch.uint8)
    if bool((codes & 0x7F == 0x7F).any()):
        raise ValueError("it has values that are no numbers")
    scales, size = scales_of_rows(files.read(scale), (codes.shape[0], codes.shape[1]), block)
    return regroup(Grouped(codes, scales, size, 8, "fp8", coding="e4m3"))


def scales_of_rows(
    scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[torch.Tensor, int]:
    """Return scales per tensor, per row or per block as [out, groups], and the columns of a group."""
    out, columns = shape
    if scales.dtype == torch.float8_e8m0fnu:
        scales = power_of_two(scales.view(torch.uint8)).float() * 2
    if scales.numel() == 1:
        return scales.view(1, 1).expand(out, 1).contiguous(), columns
    if scales.numel() == out and (scales.dim() == 1 or scales.shape[1:].numel() == 1):
        return scales.view(out, 1), columns
    if block is None or tuple(scales.shape) != (-(-out // block[0]), -(-columns // block[1])):
        raise ValueError(f"its scales {list(scales.shape)} do not fit its shape {list(shape)}")
    return scales.repeat_interleave(block[0], 0)[:out].contiguous(), block[1]
