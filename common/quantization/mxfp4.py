"""Weights of MXFP4 checkpoints: 4-bit floats e2m1 in groups of 32 with a power of 2 as the scale.

gpt-oss has the experts of a layer as ``…experts.gate_up_proj_blocks`` uint8 [experts, out, in / 32, 16] and ``_scales``
uint8 [experts, out, in / 32]. The low half of byte j is element 2j, the high half element 2j + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from common.quantization.floats import FP4_VALUES, power_of_two
from common.quantization.packing import pack_nibbles
from common.quantization.source import TensorFiles, WeightSource, damaged
from common.quantization.weight import QuantizedWeight

GROUP = 32


def open_mxfp4(files: TensorFiles) -> WeightSource:
    """Return the weights of a checkpoint of gpt-oss. Raises StartError if its tensors do not fit together."""
    stacked, used = dict[str, Callable[[], list[QuantizedWeight]]](), list[str]()
    for name in (name.removesuffix("_blocks") for name in files.names if name.endswith("_blocks")):
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if scales not in files or files.shape(blocks) != (*files.shape(scales), GROUP // 2):
            raise damaged(name, "its blocks and scales do not fit together")
        stacked[name] = partial(_read, files, blocks, scales)
        used += [blocks, scales]
    plain, notes = files.rest(used)
    return WeightSource({}, plain, stacked, notes)


def _read(files: TensorFiles, blocks: str, scales: str) -> list[QuantizedWeight]:
    experts = zip(files.read(blocks), files.read(scales), strict=True)
    return [mxfp4_weight(packed.flatten(1), exponents) for packed, exponents in experts]


def mxfp4_weight(packed: torch.Tensor, exponents: torch.Tensor) -> QuantizedWeight:
    """Return the weight of ``packed`` uint8 [out, in / 2], two elements per byte, and ``exponents`` uint8
    [out, in / 32]: the scale is ``2 ** (exponent - 127)``."""
    codes = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    if codes.shape[1] != exponents.shape[1] * GROUP:
        raise ValueError(f"it has {list(exponents.shape)} scales for {list(codes.shape)} codes")
    if bool((exponents == 255).any()):
        raise ValueError("it has scales that are no numbers")
    table = torch.tensor(FP4_VALUES, dtype=torch.float32)  # doubled, and so are the scales halved
    shape = (codes.shape[0], codes.shape[1])
    return QuantizedWeight(
        shape, 4, GROUP, pack_nibbles(codes, GROUP), power_of_two(exponents), coding="table", table=table, most=15,
        source="MXFP4",
    )  # fmt: skip
