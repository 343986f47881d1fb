"""Random weights as the quantized formats of the hub pack them, and their values: both element by element, from the
formats' public definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def words_of(codes: Sequence[int], bits: int) -> list[int]:
    """Pack codes to int32 words: one stream from the lowest bit of the first word on."""
    stream = sum(int(code) << at * bits for at, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    unsigned = [stream >> 32 * at & 0xFFFFFFFF for at in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in unsigned]


def packed(codes: Array, bits: int, axis: int) -> torch.Tensor:
    """Pack a matrix of codes along ``axis``."""
    rows = codes if axis == 1 else codes.T
    words = np.array([words_of(row.tolist(), bits) for row in rows], dtype=np.int32)
    return torch.from_numpy(np.ascontiguousarray(words if axis == 1 else words.T))


def gptq(
    out: int, columns: int, bits: int = 4, size: int = 32, *, sym: bool = False, v2: bool = False,
    order: str = "", g_idx: bool = True, seed: int = 0,
) -> tuple[dict[str, torch.Tensor], Array]:  # fmt: skip
    """Return the tensors of a GPTQ module and its weight. ``order``: "activation" for groups in an order of their own,
    "uneven" for groups of other sizes."""
    random = np.random.default_rng(seed)
    groups = -(-columns // size)
    codes = random.integers(0, 1 << bits, (columns, out))
    most = min(1 << bits, 255)
    zeros = np.full((groups, out), 1 << bits - 1) if sym else random.integers(1, most + 1, (groups, out))
    if v2 and not sym:
        zeros -= 1
    scales = (random.random((groups, out)) * 0.02).astype(np.float16)
    group_of = np.arange(columns) // size
    if order == "activation":
        group_of = random.permutation(group_of)
    elif order == "uneven":
        group_of = random.integers(0, groups, columns)
    weight = np.zeros((out, columns), np.float32)
    for k in range(columns):
        for n in range(out):
            group = group_of[k]
            weight[n, k] = np.float32(scales[group, n]) * np.float32(int(codes[k, n]) - int(zeros[group, n]))
    tensors = {
        "qweight": packed(codes, bits, 0),
        "qzeros": packed(zeros if v2 else zeros - 1, bits, 1),
        "scales": torch.from_numpy(scales),
    }
    if g_idx:
        tensors["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return tensors, weight


def awq(out: int, columns: int, size: int = 32, seed: int = 0) -> tuple[dict[str, torch.Tensor], Array]:
    """Return the tensors of an AWQ module and its weight."""
    random = np.random.default_rng(seed)
    groups = -(-columns // size)
    codes, zeros = random.integers(0, 16, (columns, out)), random.integers(0, 16, (groups, out))
    scales = (random.random((groups, out)) * 0.02).astype(np.float16)
    weight = np.zeros((out, columns), np.float32)
    for k in range(columns):
        for n in range(out):
            weight[n, k] = np.float32(scales[k // size, n]) * np.float32(int(codes[k, n]) - int(zeros[k // size, n]))
    # word j has the columns 8j + 0, 2, 4, 6, 1, 3, 5, 7, from its lowest bits on
    order = [8 * word + at for word in range(out // 8) for at in (0, 2, 4, 6, 1, 3, 5, 7)]
    tensors = {"qweight": packed(codes[:, order], 4, 1), "qzeros": packed(zeros[:, order], 4, 1),
               "scales": torch.from_numpy(scales)}  # fmt: skip
    return tensors, weight


def pack_quantized(
    out: int, columns: int, bits: int = 4, size: int = 32, *, asymmetric: bool = False, order: bool = False,
    padded: bool = False, seed: int = 0,
) -> tuple[dict[str, torch.Tensor], Array]:  # fmt: skip
    """Return the tensors of a compressed-tensors module in pack-quantized format and its weight. ``size`` 0: one scale
    per row. ``padded``: whole codes in each word, as older writers have them."""
    random = np.random.default_rng(seed)
    half = 1 << bits - 1
    groups = -(-columns // size) if size else 1
    values = random.integers(-half, half, (out, columns))
    zeros = random.integers(-half, half, (out, groups)) if asymmetric else np.zeros((out, groups), np.int64)
    scales = torch.from_numpy(random.random((out, groups)) * 0.02).to(torch.bfloat16)
    group_of = np.arange(columns) // (size or columns)
    if order:
        group_of = random.permutation(group_of)
    weight = np.zeros((out, columns), np.float32)
    floats = scales.float().numpy()
    for n in range(out):
        for k in range(columns):
            weight[n, k] = floats[n, group_of[k]] * np.float32(values[n, k] - zeros[n, group_of[k]])
    if padded:
        each = 32 // bits
        starts = range(0, columns, each)
        rows = [[words_of((row[at : at + each] + half).tolist(), bits)[0] for at in starts] for row in values]
        words = torch.tensor(rows, dtype=torch.int32)
    else:
        words = packed(values + half, bits, 1)
    tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([out, columns])}
    if asymmetric:
        tensors["weight_zero_point"] = packed(zeros + half, bits, 0)
    if order:
        tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return tensors, weight


def int_quantized(out: int, columns: int, *, asymmetric: bool = False, tensor: bool = False, seed: int = 0
                  ) -> tuple[dict[str, torch.Tensor], Array]:  # fmt: skip
    """Return the tensors of a compressed-tensors module with int8 values, scaled per row or per tensor."""
    random = np.random.default_rng(seed)
    values = random.integers(-128, 128, (out, columns)).astype(np.int8)
    rows = 1 if tensor else out
    scales = (random.random((rows, 1)) * 0.02).astype(np.float32)
    zeros = random.integers(-128, 128, (rows, 1)).astype(np.int8) if asymmetric else np.zeros((rows, 1), np.int8)
    weight = np.zeros((out, columns), np.float32)
    for n in range(out):
        for k in range(columns):
            row = 0 if tensor else n
            weight[n, k] = scales[row, 0] * np.float32(int(values[n, k]) - int(zeros[row, 0]))
    shape = (1,) if tensor else (out, 1)
    tensors = {"weight": torch.from_numpy(values), "weight_scale": torch.from_numpy(scales.reshape(shape))}
    if asymmetric:
        tensors["weight_zero_point"] = torch.from_numpy(zeros.reshape(shape))
    return tensors, weight


def e4m3(bits: int) -> float:
    """Return the value of a float8 e4m3."""
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return -size if sign else size


def float8(out: int, columns: int, scales: Array, block: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, Array]:
    """Return a float8 weight and its values with ``scales`` [rows, columns] of blocks of ``block`` rows and columns."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 126, (out, columns)) + 128 * random.integers(0, 2, (out, columns))
    weight = np.zeros((out, columns), np.float32)
    for n in range(out):
        for k in range(columns):
            weight[n, k] = np.float32(e4m3(int(bits[n, k]))) * np.float32(scales[n // block[0], k // block[1]])
    return torch.from_numpy(bits.astype(np.uint8)).view(torch.float8_e4m3fn), weight


def mxfp4(out: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Array]:
    """Return the bytes [out, columns / 2] and scales of an MXFP4 weight, and its values."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (out, columns))
    exponents = random.integers(110, 130, (out, columns // 32)).astype(np.uint8)
    weight = np.zeros((out, columns), np.float32)
    for n in range(out):
        for k in range(columns):
            weight[n, k] = E2M1[codes[n, k]] * 2.0 ** (int(exponents[n, k // 32]) - 127)
    both = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(both), torch.from_numpy(exponents), weight
