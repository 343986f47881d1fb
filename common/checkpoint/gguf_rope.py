"""Rotary parameters of a GGUF model, as transformers' configuration has them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from common.checkpoint.gguf import GgufModel, GgufTensor
from common.core.errors import StartError

LLAMA3 = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3_BANDS = ((1.0, 4.0),)
_LLAMA3_LENGTHS = (8192, 4096, 2048, 16_384, 32_768)
_TOLERANCE = 1e-3


def rope_parameters(model: GgufModel, head_dim: int) -> dict[str, Any]:
    """Return ``rope_parameters``. Raises StartError if the file scales in a way that transformers does not have."""
    base = model.number("rope.freq_base", 10_000.0)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    rotated = model.count("rope.dimension_count", 0, least=0) or head_dim
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    original = model.count("rope.scaling.original_context_length", 0, least=0)
    kind, factor = model.get("rope.scaling.type", "none"), model.number("rope.scaling.factor", 1.0) or 1.0
    if tensor := _first(model, LLAMA3):
        return found | _llama3(model, _floats(tensor), base, rotated)
    if long := _first(model, LONG):
        short = _first(model, SHORT) or long
        return found | {
            "rope_type": "longrope",
            "long_factor": _floats(long).tolist(),
            "short_factor": _floats(short).tolist(),
            "original_max_position_embeddings": original or model.count("context_length"),
        }
    match kind:
        case "none":
            return found
        case "linear":
            return found | ({"rope_type": "linear", "factor": factor} if factor != 1.0 else {})
        case "yarn":
            return found | _yarn(model, factor, original)
    raise StartError(f"cannot serve {model.files[0]}", f"its rope scaling {kind} is not known", "use another file")


def _yarn(model: GgufModel, factor: float, original: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    found["original_max_position_embeddings"] = original or model.count("context_length")
    names = {
        "yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
    }  # fmt: skip
    for key, name in names.items():
        if model.get(f"rope.scaling.{key}") is not None:
            found[name] = model.number(f"rope.scaling.{key}", 0.0)
    multiplier = model.number("rope.scaling.attn_factor", 1.0)
    if multiplier != 1.0 and factor > 1.0:  # of YaRN's own factor, where transformers' one replaces that
        found.setdefault("attention_factor", multiplier * (1.0 + 0.1 * math.log(factor)))
    return found


def _llama3(model: GgufModel, factors: np.ndarray[Any, Any], base: float, rotated: int) -> dict[str, Any]:
    """Return the parameters of which ``factors``, by which the frequencies are divided, are the result. Raises
    StartError if there are none."""
    frequencies = base ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    factor = float(factors.max())
    if len(factors) == len(frequencies) and math.isclose(factor, 1.0, abs_tol=_TOLERANCE):
        return {}
    given = model.count("rope.scaling.original_context_length", 0, least=0)
    for length in (*([given] if given else []), *_LLAMA3_LENGTHS):
        for low, high in _LLAMA3_BANDS:
            smooth = np.clip((length * frequencies / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
            expected = 1 / ((1 - smooth) / factor + smooth)
            if len(factors) == len(expected) and np.allclose(factors, expected, rtol=_TOLERANCE):
                return {
                    "rope_type": "llama3", "factor": round(factor, 3), "low_freq_factor": low, "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }  # fmt: skip
    raise StartError(
        f"cannot serve {model.files[0]}",
        f"its {LLAMA3} are no factors of Llama 3's scaling",
        "use the model's checkpoint in safetensors format",
    )


def _first(model: GgufModel, name: str) -> GgufTensor | None:
    """Return the tensor ``name``, which some files have once and others in each layer."""
    return model.tensors.get(name) or model.tensors.get(f"blk.0.{name}")


def _floats(tensor: GgufTensor) -> np.ndarray[Any, Any]:
    """Return the values of a small tensor in float32, as all of these are."""
    if tensor.type != 0:
        raise StartError(f"cannot read {tensor.file}", f"{tensor.name} is not in float32", "use another file")
    return np.array(tensor.data).view(np.float32)
