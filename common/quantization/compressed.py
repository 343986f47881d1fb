"""Weights of compressed-tensors checkpoints: integers of 2 to 8 bits, float8, MXFP4.

A module has ``weight_packed`` (pack-quantized: int32 [out, in * bits / 32], codes of value + 2 ** (bits - 1);
mxfp4-pack-quantized: uint8) or an int8 or float8 ``weight`` (int-quantized, naive-quantized, float-quantized), with
``weight_scale`` [out, groups], per row, per tensor or per block. With zero points it has ``weight_zero_point``, packed
along its rows if the weight is packed. ``weight_g_idx`` is the group of each input, in the order of activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from common.checkpoint.compressed_groups import arguments_of
from common.core.errors import StartError
from common.quantization.fp8 import DROPPED, read_fp8, scales_of_rows
from common.quantization.groups import Grouped, regroup
from common.quantization.mxfp4 import mxfp4_weight
from common.quantization.packing import unpack_int32, unpack_padded
from common.quantization.source import Make, TensorFiles, WeightSource
from common.quantization.weight import QuantizedWeight

_PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_DROPPED = (*DROPPED, "input_zero_point", "input_global_scale", "output_zero_point", "k_zero_point", "v_zero_point")


def open_compressed(files: TensorFiles, settings: Mapping[str, Any]) -> WeightSource:
    """Return the weights of a checkpoint: a module is quantized if it has a ``weight_packed``, or a ``weight_scale``
    beside an int8 or float8 weight. Raises StartError for float8 types that are not read."""
    compact, used = dict[str, Make](), list[str]()
    packed = set(files.modules("weight_packed"))
    for module in sorted(packed | set(files.modules("weight_scale"))):
        arguments = arguments_of(settings, module)
        if module in packed:
            mxfp4 = files.dtype(f"{module}.weight_packed") == "U8"
            make = partial(_read_mxfp4, files, module) if mxfp4 else partial(_read_packed, files, module, arguments)
        else:
            match files.dtype(f"{module}.weight") if f"{module}.weight" in files else "":
                case "I8":
                    make = partial(_read_int8, files, module, arguments)
                case "F8_E4M3":
                    weight, scale = f"{module}.weight", f"{module}.weight_scale"
                    make = partial(read_fp8, files, weight, scale, _block(arguments))
                case other if other.startswith(("F8", "I", "U")) or not other:
                    why = f"it is of type {other}, which is not read" if other else "it has scales but no weight"
                    raise StartError(f"cannot read the weight {module}.weight", why, "use another format of the model")
                case _:
                    continue  # not compressed: the scale is left out
        compact[f"{module}.weight"] = make
        used += [f"{module}.{part}" for part in _PARTS]
    plain, notes = files.rest(used, (*_DROPPED, "weight_scale", "weight_zero_point", "weight_g_idx"))
    return WeightSource(compact, plain, None, notes)


def _read_packed(files: TensorFiles, module: str, arguments: Mapping[str, Any]) -> QuantizedWeight:
    words = files.read(f"{module}.weight_packed")
    out, columns = map(int, files.read(f"{module}.weight_shape").tolist())
    bits = int(arguments.get("num_bits") or 4)
    wide = -(-columns * bits // 32)
    if words.shape == (out, wide):
        padded = torch.nn.functional.pad(words, (0, -wide % bits))  # to whole streams of 32 codes
        codes = unpack_int32(padded, bits, 1)
    elif words.shape == (out, -(-columns // (32 // bits))):  # older files: whole codes in each word
        codes = unpack_padded(words, bits)
    else:
        raise ValueError(f"it has {list(words.shape)} words for {out} x {columns} codes of {bits} bits")
    scales = files.read(f"{module}.weight_scale")
    scales, size = _scales(scales, (out, columns), arguments)
    zeros = files.find(f"{module}.weight_zero_point")
    if zeros is not None:
        zeros = _unpacked_zeros(zeros, bits, out)
        zeros = scales_of_rows(zeros, (out, columns), None)[0] if zeros.shape[1] == 1 else zeros
    return _grouped(files, module, codes[:, :columns], scales, size, bits, zeros, 1 << bits - 1)


def _unpacked_zeros(zeros: torch.Tensor, bits: int, out: int) -> torch.Tensor:
    """Return zero points as codes [out, groups]: int32 words are packed along the rows, int8 are the values."""
    if zeros.dtype != torch.int32:
        return zeros.int() + (1 << bits - 1)
    words = zeros.t()
    if words.shape[1] == -(-out * bits // 32):
        return unpack_int32(torch.nn.functional.pad(words, (0, -words.shape[1] % bits)), bits, 1).t()[:out].int()
    return unpack_padded(words, bits).t()[:out].int()


def _read_int8(files: TensorFiles, module: str, arguments: Mapping[str, Any]) -> QuantizedWeight:
    codes = files.read(f"{module}.weight").view(torch.uint8) ^ 0x80
    shape = (codes.shape[0], codes.shape[1])
    scales, size = _scales(files.read(f"{module}.weight_scale"), shape, arguments)
    zeros = files.find(f"{module}.weight_zero_point")
    if zeros is not None:
        zeros = _scales(zeros.int() + 128, shape, arguments)[0]
    return _grouped(files, module, codes, scales, size, 8, zeros, 128)


def _grouped(
    files: TensorFiles, module: str, codes: torch.Tensor, scales: torch.Tensor, size: int, bits: int,
    zeros: torch.Tensor | None, zero: int,
) -> QuantizedWeight:  # fmt: skip
    group_of = files.find(f"{module}.weight_g_idx")
    if group_of is not None:
        group_of = group_of.long()
        if int(group_of.min()) < 0 or scales.shape[1] == 1:  # -1 where there is no order
            group_of = None
        elif int(group_of.max()) >= scales.shape[1]:
            raise ValueError(f"its weight_g_idx names groups beyond the {scales.shape[1]} that it has")
    source = f"compressed-tensors {bits}-bit"
    return regroup(Grouped(codes, scales, size, bits, source, zeros, zero, group_of=group_of))


def _read_mxfp4(files: TensorFiles, module: str) -> QuantizedWeight:
    return mxfp4_weight(files.read(f"{module}.weight_packed"), files.read(f"{module}.weight_scale").view(torch.uint8))


def _scales(scales: torch.Tensor, shape: tuple[int, int], arguments: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Return scales as [out, groups], and the columns of a group."""
    out, columns = shape
    size = int(arguments.get("group_size") or 0)
    if size > 0 and scales.dim() == 2 and tuple(scales.shape) == (out, -(-columns // size)):
        return scales, size
    return scales_of_rows(scales, shape, _block(arguments))


def _block(arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    block = arguments.get("block_structure")
    if isinstance(block, str):
        block = block.lower().split("x")
    return (int(block[0]), int(block[1])) if block else None
