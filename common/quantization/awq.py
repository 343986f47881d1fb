"""Weights of AWQ checkpoints, version gemm: 4 bits.

A module has ``qweight`` int32 [in, out / 8], ``qzeros`` int32 [groups, out / 8] and ``scales`` [groups, out]. The codes
of a word belong to the columns 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from common.quantization.groups import Grouped, regroup
from common.quantization.packing import unpack_int32
from common.quantization.source import TensorFiles, WeightSource
from common.quantization.weight import QuantizedWeight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = ("qweight", "qzeros", "scales")


def open_awq(files: TensorFiles, settings: Mapping[str, Any]) -> WeightSource:
    """Return the weights of a checkpoint: a module is quantized if it has a ``qweight``."""
    modules = files.modules("qweight")
    plain, notes = files.rest(f"{module}.{part}" for module in modules for part in _PARTS)
    size = int(settings.get("group_size") or settings.get("q_group_size") or -1)
    compact = {f"{module}.weight": partial(_read, files, module, size) for module in modules}
    return WeightSource(compact, plain, None, notes)


def _read(files: TensorFiles, module: str, size: int) -> QuantizedWeight:
    scales = files.read(f"{module}.scales").t().contiguous()
    words = files.read(f"{module}.qweight")
    if words.shape[1] * 8 != scales.shape[0]:
        raise ValueError("its qweight is not packed as AWQ gemm with 4 bits is")
    codes = unpack_int32(words, 4, 1, ORDER).t()
    columns, groups = codes.shape[1], scales.shape[1]
    if size < 1 or -(-columns // size) != groups:
        size = -(-columns // groups)
    zeros = unpack_int32(files.read(f"{module}.qzeros"), 4, 1, ORDER).t().int()
    return regroup(Grouped(codes, scales, size, 4, "AWQ 4-bit", zeros))
