"""Writes the tests' checkpoints in the quantized formats of the hub, and the numbers that these formats stand for.

Both come from the formats' public definitions, in numpy, independently of the readers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.unit.common.quantization.hub_formats import E2M1, Array, e4m3, packed

Tensors = dict[str, torch.Tensor]
Encoded = tuple[Tensors, Array]
"""The tensors of a module by their suffixes, and the weight [out, in] that they stand for."""
_E4M3 = np.array([e4m3(bits) for bits in range(256)], np.float32)
_SIZE = 32


@dataclass(frozen=True)
class Method:
    """A way to quantize: ``settings`` are the ``quantization_config``, ``encode`` rounds a matrix [out, in]."""

    settings: Mapping[str, Any]
    encode: Callable[[Array], Encoded]


def quantized_of(original: Path, out: Path, method: Method) -> Path:
    """Write the checkpoint ``original`` with its linear layers rounded by ``method``, and the same numbers in float32
    to ``out / "dense"``. Returns ``out``."""
    weights = load_file(original / "model.safetensors")
    written, dense = Tensors(), Tensors()
    for name, values in weights.items():
        if not is_linear(name, values):
            written[name], dense[name] = values, values
            continue
        tensors, rounded = method.encode(values.float().numpy())
        module = name.removesuffix(".weight")
        written |= {f"{module}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
        dense[name] = torch.from_numpy(rounded)
    return _write(original, out, written, dense, method.settings)


def mxfp4_of(original: Path, out: Path) -> Path:
    """Write a gpt-oss checkpoint with its experts in MXFP4, and the same numbers in float32 to ``out / "dense"``."""
    written, dense = Tensors(), Tensors()
    for name, values in load_file(original / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            written[name], dense[name] = values, values
            continue
        parts = [_mxfp4(expert.T.float().numpy()) for expert in values]
        written[f"{name}_blocks"] = torch.stack([blocks for blocks, _, _ in parts])
        written[f"{name}_scales"] = torch.stack([scales for _, scales, _ in parts])
        dense[name] = torch.stack([torch.from_numpy(rounded).T for _, _, rounded in parts]).contiguous()
    return _write(original, out, written, dense, {"quant_method": "mxfp4"})


def is_linear(name: str, values: torch.Tensor) -> bool:
    """Return whether quantizers round this weight: not embeddings, output layers, and routers of experts."""
    kept = ("embed_tokens.weight", "lm_head.weight", ".gate.weight", ".router.weight")
    return values.dim() == 2 and name.endswith(".weight") and not name.endswith(kept)


def _write(original: Path, out: Path, written: Tensors, dense: Tensors, settings: Mapping[str, Any]) -> Path:
    for directory, tensors, more in ((out, written, {"quantization_config": settings}), (out / "dense", dense, {})):
        shutil.copytree(original, directory, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((directory / "config.json").read_text()) | more
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return out


# -- methods ----------------------------------------------------------------------------------------------------------


def _groups(values: Array, size: int) -> Array:
    return values.reshape(len(values), -1, size)


def _affine(groups: Array, bits: int, low: int, high: int) -> tuple[Array, Array, Array]:
    """Round to integers: return codes [out, groups, size] with scales and zeros [out, groups], these from ``low`` to
    ``high``."""
    least, most = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scales = ((most - least) / ((1 << bits) - 1)).astype(np.float16)
    zeros = np.clip(np.rint(-least / scales), low, high).astype(np.int64)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, (1 << bits) - 1).astype(np.int64)
    return codes, scales, zeros


def _symmetric(groups: Array, bits: int, dtype: Any = np.float16) -> tuple[Array, Array]:
    """Round to signed integers: return values and scales."""
    half = 1 << bits - 1
    scales = (np.abs(groups).max(2) / (half - 1)).astype(dtype)
    return np.clip(np.rint(groups / scales[..., None]), -half, half - 1).astype(np.int64), scales


def gptq(values: Array, bits: int = 4, *, order: bool = False, v2: bool = False) -> Encoded:
    """``order``: columns are in groups by a permutation, as GPTQ has them with ``desc_act``."""
    columns = values.shape[1]
    place = np.random.default_rng(columns).permutation(columns) if order else np.arange(columns)
    codes, scales, zeros = _affine(_groups(values[:, place], _SIZE), bits, 1, 1 << bits)
    rounded, unordered = np.zeros_like(values), np.zeros(values.shape, np.int64)
    rounded[:, place] = _flat(scales.astype(np.float32)[..., None] * (codes - zeros[..., None]))
    unordered[:, place] = _flat(codes)
    group_of = np.zeros(columns, np.int32)
    group_of[place] = np.arange(columns) // _SIZE
    return {
        "qweight": packed(unordered.T, bits, 0), "qzeros": packed((zeros if v2 else zeros - 1).T, bits, 1),
        "scales": torch.from_numpy(scales.T.copy()), "g_idx": torch.from_numpy(group_of),
    }, rounded  # fmt: skip


def awq(values: Array) -> Encoded:
    codes, scales, zeros = _affine(_groups(values, _SIZE), 4, 0, 15)
    order = [8 * word + at for word in range(len(values) // 8) for at in (0, 2, 4, 6, 1, 3, 5, 7)]
    return {
        "qweight": packed(_flat(codes).T[:, order], 4, 1), "qzeros": packed(zeros.T[:, order], 4, 1),
        "scales": torch.from_numpy(scales.T.copy()),
    }, _flat(scales.astype(np.float32)[..., None] * (codes - zeros[..., None]))  # fmt: skip


def packed_groups(values: Array, bits: int = 4) -> Encoded:
    """Compressed-tensors' pack-quantized, symmetric."""
    codes, scales = _symmetric(_groups(values, _SIZE), bits)
    return {
        "weight_packed": packed(_flat(codes) + (1 << bits - 1), bits, 1),
        "weight_scale": torch.from_numpy(scales), "weight_shape": torch.tensor(values.shape),
    }, _flat(scales.astype(np.float32)[..., None] * codes)  # fmt: skip


def int8_rows(values: Array) -> Encoded:
    """Compressed-tensors' int-quantized with one scale per row."""
    codes, scales = _symmetric(values[:, None], 8, np.float32)
    tensors = {"weight": torch.from_numpy(codes[:, 0].astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
    return tensors, (scales[..., None] * codes.astype(np.float32))[:, 0]


def float8(values: Array, block: tuple[int, int] | None, suffix: str = "weight_scale") -> Encoded:
    """float8 e4m3 with one scale per block, or per tensor without ``block``."""
    rows, columns = block or values.shape
    scales = np.zeros((-(-len(values) // rows), -(-values.shape[1] // columns)), np.float32)
    for i, j in np.ndindex(scales.shape):
        scales[i, j] = np.abs(values[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]).max() / 448
    whole = scales.repeat(rows, 0)[: len(values)].repeat(columns, 1)[:, : values.shape[1]]
    codes = torch.from_numpy(values / whole).to(torch.float8_e4m3fn)
    given = torch.from_numpy(scales) if block else torch.tensor(float(scales[0, 0]))
    return {"weight": codes, suffix: given}, _E4M3[codes.view(torch.uint8).numpy()] * whole


def _mxfp4(values: Array) -> tuple[torch.Tensor, torch.Tensor, Array]:
    """Return blocks [out, in / 32, 16], exponents [out, in / 32], and the values."""
    groups = _groups(values, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(2))) - 2
    codes = np.abs(groups[..., None] / np.exp2(exponents)[..., None, None] - np.array(E2M1)).argmin(3).astype(np.uint8)
    rounded = np.array(E2M1)[codes] * np.exp2(exponents)[..., None]
    blocks = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
    return blocks, torch.from_numpy((exponents + 127).astype(np.uint8)), _flat(rounded).astype(np.float32)


def _flat(groups: Array) -> Array:
    return groups.reshape(len(groups), -1)


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "quantization_status": "compressed"}  # fmt: skip


def _gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": _SIZE, "desc_act": False, "sym": False, **more}


METHODS = {
    "gptq": Method(_gptq(), gptq),
    "gptq 8 bits": Method(_gptq(8), lambda values: gptq(values, 8)),
    "gptq in order": Method(_gptq(desc_act=True), lambda values: gptq(values, order=True)),
    "gptq v2": Method(_gptq(checkpoint_format="gptq_v2"), lambda values: gptq(values, v2=True)),
    "awq": Method({"quant_method": "awq", "bits": 4, "group_size": _SIZE, "version": "gemm"}, awq),
    "w4a16": Method(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=_SIZE, symmetric=True),
        packed_groups,
    ),
    "w8a16": Method(
        _compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=_SIZE, symmetric=True),
        lambda values: packed_groups(values, 8),
    ),
    "w8a8": Method(_compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True), int8_rows),
    "fp8 per row": Method(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        lambda values: float8(values, (1, values.shape[1])),
    ),
    "fp8 in blocks": Method(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        lambda values: float8(values, (32, 32), "weight_scale_inv"),
    ),
    "fp8 per tensor": Method(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda values: float8(values, None)
    ),
}
"""By name. All take matrices with a multiple of 32 columns and of 8 rows."""
