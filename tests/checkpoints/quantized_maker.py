"""Quantizes the tests' tiny checkpoints as the hub's and llama.cpp's formats define it, and writes beside each the same
model in float32, dequantized: what the served one must compute.

Everything is plain numpy from the public definitions, or the gguf package's own; nothing is shared with the readers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from tests.checkpoints.gguf_maker import gguf_of

Array = np.ndarray[Any, Any]
Rounded = tuple[dict[str, torch.Tensor], Array]
"""The tensors of a module by the ends of their names, and the weight that they stand for, float32 [out, in]."""
Recipe = Mapping[str, Type]
"""ggml types of matrices, by patterns of their names in the file and in the checkpoint; the first that matches."""
LINEAR = re.compile(r"model\.layers\..*(_proj|\.w[123])\.weight")
"""Names of the matrices that quantizers round."""
E4M3_LARGEST, BLOCK = 448.0, 128
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Pair:
    """A quantized checkpoint, and the same model in float32."""

    model: Path
    reference: Path


# -- GGUF -------------------------------------------------------------------------------------------------------------


def quantized_gguf(original: Path, directory: Path, recipe: Recipe, shards: int = 1) -> Pair:
    """Write the checkpoint ``original`` as a GGUF file. Routers, norms and biases stay in float32."""
    directory.mkdir(parents=True, exist_ok=True)

    def encode(name: str, values: Array) -> tuple[Array, Any]:
        kind = _type_of(recipe, name, values)
        return (values, None) if kind is None else (blocks_of(values, kind), kind)

    file = gguf_of(original, directory / "model.gguf", encode=encode, shards=shards)

    def rounded(name: str, values: torch.Tensor) -> torch.Tensor:
        transposed = values.dim() == 3  # gpt-oss has [experts, in, out]
        rows = values.transpose(1, 2) if transposed else values
        flat = np.ascontiguousarray(rows.float().numpy())
        if (kind := _type_of(recipe, name, flat)) is None:
            return values
        found = torch.from_numpy(quants.dequantize(blocks_of(flat, kind), kind)).view(rows.shape)
        return found.transpose(1, 2) if transposed else found

    weights = load_file(original / "model.safetensors")
    return Pair(file, _reference(original, directory, {name: rounded(name, each) for name, each in weights.items()}))


def _type_of(recipe: Recipe, name: str, values: Array) -> Type | None:
    if values.ndim < 2 or re.search(r"gate_inp|bias|\.gate\.|router|shared_expert_gate", name):
        return None
    return next(kind for pattern, kind in recipe.items() if re.search(pattern, name))


def blocks_of(values: Array, kind: Type) -> Array:
    """Return the blocks of ``values`` [..., in], uint8 [..., bytes]."""
    if kind not in (Type.Q4_K, Type.Q6_K):
        return quants.quantize(values, kind)
    flat = values.reshape(-1, 256).astype(np.float32)
    blocks = _q4_k(flat) if kind is Type.Q4_K else _q6_k(flat)
    return blocks.reshape(*values.shape[:-1], -1)


def _q4_k(values: Array) -> Array:
    """Blocks of 8 groups of 32: codes of 4 bits, scales and minima of 6 bits in units of two float16."""
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0)
    scale = (groups.max(2) - low) / 15
    d = (scale.max(1, keepdims=True) / 63).astype(np.float16)
    d_min = (-low.min(1, keepdims=True) / 63).astype(np.float16)
    sc = np.rint(scale / np.maximum(d.astype(np.float32), 1e-9)).clip(1, 63).astype(np.uint8)
    mn = np.rint(-low / np.maximum(d_min.astype(np.float32), 1e-9)).clip(0, 63).astype(np.uint8)
    unit, floor = (d.astype(np.float32) * sc)[:, :, None], (d_min.astype(np.float32) * mn)[:, :, None]
    codes = np.rint((groups + floor) / unit).clip(0, 15).astype(np.uint8)
    packed = np.concatenate([
        sc[:, :4] | sc[:, 4:] >> 4 << 6,
        mn[:, :4] | mn[:, 4:] >> 4 << 6,
        sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4,
    ], 1)  # fmt: skip
    nibbles = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([d.view(np.uint8), d_min.view(np.uint8), packed, nibbles], 1)


def _q6_k(values: Array) -> Array:
    """Blocks of 16 groups of 16: codes of 6 bits less 32, scales of 8 bits in units of a float16."""
    groups = values.reshape(-1, 16, 16)
    scale = np.abs(groups).max(2) / 31
    d = (scale.max(1, keepdims=True) / 127).astype(np.float16)
    sc = np.rint(scale / np.maximum(d.astype(np.float32), 1e-9)).clip(1, 127).astype(np.int8)
    codes = np.rint(groups / (d.astype(np.float32) * sc)[:, :, None]).clip(-32, 31).astype(np.int16) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    ql = np.concatenate([low[:, :, :2] | low[:, :, 2:] << 4], 2).reshape(-1, 128)
    qh = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64)
    return np.concatenate([ql, qh, sc.view(np.uint8), d.view(np.uint8)], 1)


# -- formats of the hub -----------------------------------------------------------------------------------------------


def quantized_hub(
    original: Path, directory: Path, settings: dict[str, Any], encode: Callable[[Array], Rounded]
) -> Pair:
    """Write the checkpoint ``original`` with the linear layers of its layers quantized by ``encode``. ``settings``:
    ``quantization_config``."""
    weights, quantized = load_file(original / "model.safetensors"), dict[str, torch.Tensor]()
    dense = dict(weights)
    for name, values in weights.items():
        if not LINEAR.fullmatch(name):
            quantized[name] = values
            continue
        tensors, rounded = encode(values.float().numpy())
        module = name.removesuffix(".weight")
        quantized |= {f"{module}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
        dense[name] = torch.from_numpy(rounded)
    return Pair(_write(original, directory / "model", quantized, settings), _reference(original, directory, dense))


def packed(codes: Array, bits: int, axis: int) -> torch.Tensor:
    """Pack codes along ``axis`` to int32 words, the first into the lowest bits."""
    rows = np.ascontiguousarray(codes if axis == 1 else codes.T).astype(np.uint32)
    each = 32 // bits
    words = (rows.reshape(len(rows), -1, each) << (bits * np.arange(each, dtype=np.uint32))).sum(2).astype(np.uint32)
    return torch.from_numpy(np.ascontiguousarray(words if axis == 1 else words.T).view(np.int32))


def rounded(weight: Array, bits: int, size: int, group_of: Array | None = None) -> tuple[Array, Array, Array, Array]:
    """Round to codes: return them [out, in], the scales in float16 and the zeros [out, groups], and the values."""
    out, columns = weight.shape
    group_of = np.arange(columns) // size if group_of is None else group_of
    groups, most = int(group_of.max()) + 1, 2**bits - 1
    scales, zeros = np.zeros((out, groups), np.float16), np.zeros((out, groups), np.int64)
    codes, values = np.zeros((out, columns), np.int64), np.zeros((out, columns), np.float32)
    for group in range(groups):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale = ((high - low) / most).astype(np.float16)
        whole = np.maximum(scale.astype(np.float32), 1e-7)
        zero = np.rint(-low / whole).clip(1, most)
        found = np.rint(part / whole[:, None] + zero[:, None]).clip(0, most)
        scales[:, group], zeros[:, group], codes[:, group_of == group] = scale, zero, found
        values[:, group_of == group] = (found - zero[:, None]).astype(np.float32) * scale.astype(np.float32)[:, None]
    return codes, scales, zeros, values


def gptq(weight: Array, bits: int = 4, size: int = 32, *, order: bool = False) -> Rounded:
    """Codes along the rows of the transposed weight; zeros less 1. With ``order`` groups are scattered."""
    group_of = np.arange(weight.shape[1]) // size
    if order:
        group_of = np.random.default_rng(0).permutation(group_of)
    codes, scales, zeros, values = rounded(weight, bits, size, group_of)
    return {
        "qweight": packed(codes.T, bits, 0),
        "qzeros": packed(zeros.T - 1, bits, 1),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }, values


def awq(weight: Array, size: int = 32) -> Rounded:
    """Words of 8 columns in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, scales, zeros, values = rounded(weight, 4, size)
    order = [8 * word + at for word in range(len(weight) // 8) for at in (0, 2, 4, 6, 1, 3, 5, 7)]
    return {
        "qweight": packed(codes.T[:, order], 4, 1),
        "qzeros": packed(zeros.T[:, order], 4, 1),
        "scales": torch.from_numpy(scales.T.copy()),
    }, values


def pack_quantized(weight: Array, size: int = 32) -> Rounded:
    """compressed-tensors, symmetric: values of 4 bits plus 8."""
    out, columns = weight.shape
    groups = weight.reshape(out, -1, size)
    scales = torch.from_numpy(np.abs(groups).max(2) / 7).bfloat16()
    unit = scales.float().numpy()[:, :, None]
    values = np.rint(groups / unit).clip(-8, 7)
    codes = (values + 8).astype(np.int64).reshape(out, columns)
    return {
        "weight_packed": packed(codes, 4, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, columns]),
    }, (values * unit).astype(np.float32).reshape(out, columns)


def int_quantized(weight: Array) -> Rounded:
    """compressed-tensors: int8 with a scale per row."""
    scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    values = np.rint(weight / scales).clip(-127, 127)
    tensors = {"weight": torch.from_numpy(values.astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
    return tensors, values.astype(np.float32) * scales


def fp8_blocks(weight: Array, block: int = 32) -> Rounded:
    """float8 e4m3 with a scale per ``block`` rows and columns, as DeepSeek and Qwen write it."""
    out, columns = weight.shape
    scales = np.zeros((-(-out // block), -(-columns // block)), np.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = weight[row * block : (row + 1) * block, column * block : (column + 1) * block]
            scales[row, column] = np.abs(part).max() / E4M3_LARGEST
    whole = scales.repeat(block, 0)[:out].repeat(block, 1)[:, :columns]
    codes = torch.from_numpy(weight / whole).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.from_numpy(scales)}, codes.float().numpy() * whole


def fp8_tensor(weight: Array) -> Rounded:
    """float8 e4m3 with one scale, as compressed-tensors and vLLM write it, and a static scale of activations."""
    scale = np.float32(np.abs(weight).max() / E4M3_LARGEST)
    codes = torch.from_numpy(weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": torch.tensor([scale]), "input_scale": torch.tensor([1.0])}
    return tensors, codes.float().numpy() * scale


def quantized_mxfp4(original: Path, directory: Path) -> Pair:
    """Write a gpt-oss checkpoint with the experts as OpenAI publishes them: MXFP4, in blocks of 32 inputs."""
    weights, quantized = load_file(original / "model.safetensors"), dict[str, torch.Tensor]()
    dense = dict(weights)
    for name, values in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            quantized[name] = values
            continue
        matrices = np.ascontiguousarray(values.float().transpose(1, 2).numpy())  # [experts, out, in]
        groups = matrices.reshape(*matrices.shape[:2], -1, 32)
        exponents = np.ceil(np.log2(np.abs(groups).max(3) / 6)).astype(np.int64)
        unit = (2.0**exponents)[..., None]
        codes = np.abs((groups / unit)[..., None] - FP4).argmin(-1).astype(np.uint8)
        quantized[f"{name}_blocks"] = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
        quantized[f"{name}_scales"] = torch.from_numpy((exponents + 127).astype(np.uint8))
        back = torch.from_numpy((FP4[codes] * unit).astype(np.float32).reshape(matrices.shape))
        dense[name] = back.transpose(1, 2).contiguous()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return Pair(_write(original, directory / "model", quantized, settings), _reference(original, directory, dense))


# -- files ------------------------------------------------------------------------------------------------------------


def _write(
    original: Path, directory: Path, weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any] | None = None
) -> Path:
    shutil.copytree(original, directory)
    if settings is not None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file({name: each.contiguous() for name, each in weights.items()}, directory / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    return directory


def _reference(original: Path, directory: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    return _write(original, directory / "reference", weights)
