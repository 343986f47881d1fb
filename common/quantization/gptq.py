"""Weights of GPTQ checkpoints, formats gptq and gptq_v2: 2, 3, 4 and 8 bits.

A module has ``qweight`` int32 [in * bits / 32, out], packed along its rows, ``qzeros`` int32
[groups, out * bits / 32], packed along its columns, ``scales`` [groups, out], and ``g_idx`` int32 [in], the group of
each input. In the older format the stored zeros are 1 less than the zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from common.quantization.groups import Grouped, regroup
from common.quantization.packing import unpack_int32
from common.quantization.source import TensorFiles, WeightSource
from common.quantization.weight import QuantizedWeight

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_BITS = (2, 3, 4, 8)


def open_gptq(files: TensorFiles, settings: Mapping[str, Any]) -> WeightSource:
    """Return the weights of a checkpoint: a module is quantized if it has a ``qweight``, whatever ``settings`` (its
    ``quantization_config``) say."""
    modules = files.modules("qweight")
    used = [f"{module}.{part}" for module in modules for part in _PARTS]
    plain, notes = files.rest(used)
    compact = {f"{module}.weight": partial(_read, files, module, settings) for module in modules}
    return WeightSource(compact, plain, None, notes)


def _read(files: TensorFiles, module: str, settings: Mapping[str, Any]) -> QuantizedWeight:
    words, scales = files.read(f"{module}.qweight"), files.read(f"{module}.scales").t()
    group_of = files.find(f"{module}.g_idx")
    packed_zeros = files.read(f"{module}.qzeros")
    bits = _bits(words, group_of, packed_zeros, len(scales), settings)
    columns = words.shape[0] * 32 // bits
    groups = scales.shape[1]
    size = int(settings.get("group_size") or -1)
    if size < 1 or -(-columns // size) != groups:  # modules may have settings of their own
        size = -(-columns // groups)
    zeros = unpack_int32(packed_zeros, bits, 1).t()
    if len(zeros) - 32 >= len(scales):
        raise ValueError(f"its qzeros are for {len(zeros)} rows, not {len(scales)}")
    zeros = zeros[: len(scales)].int()
    if "v2" not in str(settings.get("checkpoint_format") or settings.get("format") or ""):
        zeros = zeros + 1
    if group_of is None and settings.get("desc_act"):
        raise ValueError("it has no g_idx, which says the order of its columns")
    if group_of is not None:
        group_of = group_of.long()
        if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
            raise ValueError(f"its g_idx names groups beyond the {groups} that it has")
        if groups == 1 or (not bool(group_of.any()) and not settings.get("desc_act")):
            group_of = None  # some files without an order have only zeros
    codes = unpack_int32(words, bits, 0).t()
    return regroup(Grouped(codes, scales.contiguous(), size, bits, f"GPTQ {bits}-bit", zeros, group_of=group_of))


def _bits(
    words: torch.Tensor, group_of: torch.Tensor | None, zeros: torch.Tensor, rows: int, settings: Mapping[str, Any]
) -> int:
    """Return the bits of a code: those that the shapes say, since modules may have settings of their own. Without
    ``group_of`` these are the packed ``zeros`` of all ``rows``."""
    if group_of is not None and group_of.numel():
        bits, rest = divmod(words.shape[0] * 32, group_of.numel())
        if rest:
            raise ValueError(f"its g_idx has {group_of.numel()} entries, which does not fit its qweight")
    else:
        usual = int(settings.get("bits") or 4)
        fitting = [bits for bits in (usual, *_BITS) if zeros.shape[1] == -(-rows * bits // 32)]
        bits = fitting[0] if fitting else usual
    if bits not in _BITS:
        raise ValueError(f"GPTQ with {bits} bits is not read")
    return bits
