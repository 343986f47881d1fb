"""In which format a checkpoint stores its weights, as far as its configuration says, and which formats are read.

``quantization_config`` of config.json names the method. Methods that are not read are refused with what they are and
what to use in their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.checkpoint.compressed_groups import arguments_of, groups_of, weights_of
from common.checkpoint.json_files import read_json
from common.checkpoint.values import shown
from common.core.errors import StartError


@dataclass(frozen=True)
class WeightFormat:
    """The file format (``container``), the method of quantization ("" for none), its settings as in the checkpoint, and
    a description in words (``shown``), such as "GPTQ 4-bit, groups of 128"."""

    container: Literal["safetensors", "gguf"]
    method: str
    shown: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


SAFETENSORS = WeightFormat("safetensors", "", "safetensors")
GGUF = WeightFormat("gguf", "gguf", "GGUF")
KNOWN_METHODS = frozenset({"gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "gguf"})
"""Methods that :func:`read_format` describes; every other one is refused."""
INSTEAD = "use a GGUF, GPTQ or AWQ checkpoint of the model, or an unquantized one with --quantization int8"

OTHER_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json in which ModelOpt, AutoGPTQ and AutoAWQ describe the quantization, and its method."""
_OTHER_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_REFUSED = {
    "bitsandbytes": ("bitsandbytes", "only its own CUDA kernels read them"),
    "aqlm": ("AQLM", "their codebooks need kernels of their own"),
    "quip": ("QuIP#", "their codebooks need kernels of their own"),
    "vptq": ("VPTQ", "their codebooks need kernels of their own"),
    "spqr": ("SpQR", "their sparse outliers need kernels of their own"),
    "higgs": ("HIGGS", "their codebooks need kernels of their own"),
    "hqq": ("HQQ", "they are pickled objects of its library"),
    "quanto": ("Quanto", "they are objects of its library"),
    "torchao": ("torchao", "they are pickled objects of its library"),
    "eetq": ("EETQ", "only its own CUDA kernels read them"),
    "exl2": ("EXL2", "only ExLlamaV2 reads them"),
    "exl3": ("EXL3", "only ExLlamaV3 reads them"),
    "bitnet": ("BitNet", "ternary weights need layers of their own"),
    "fp_quant": ("FP-Quant", "only its own CUDA kernels read them"),
    "modelopt": ("ModelOpt", "its formats of scales are not read"),
    "modelopt_fp4": ("NVFP4", "blocks with two levels of 8-bit float scales are not read"),
    "auto-round": ("AutoRound", "its format of mixed packings is not read"),
    "intel/auto-round": ("AutoRound", "its format of mixed packings is not read"),
}
_COMPRESSED_REFUSED = {
    "nvfp4-pack-quantized": "NVFP4",
    "marlin-24": "2:4 sparse Marlin",
    "sparse-bitmask": "sparse",
    "sparse-24-bitmask": "2:4 sparse",
}
"""Formats inside compressed-tensors that are not read."""


def read_format(config: Mapping[str, Any], model: str = "this checkpoint") -> WeightFormat:
    """Return the format of the weights of a transformers checkpoint. Raises StartError if it is one that is not
    read."""
    settings = _settings(config)
    if settings is None:
        return SAFETENSORS
    method = str(settings.get("quant_method") or ("compressed-tensors" if "config_groups" in settings else ""))
    if "nvfp4" in str(settings.get("quant_algo", "")).lower():
        method = "modelopt_fp4"
    if method not in KNOWN_METHODS - {"gguf"}:
        name, why = _REFUSED.get(method, (method or "an unnamed method", "this method is not read"))
        raise _refused(model, f"its weights are quantized with {name}: {why}")
    if why := _unreadable(method, settings):
        raise _refused(model, f"its weights are quantized with {why}, a packing that is not read")
    return WeightFormat("safetensors", method, " ".join(_described(method, settings)), settings)


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether ``config`` says that the weights are quantized."""
    return _settings(config) is not None


def settings_beside(directory: Path) -> dict[str, Any] | None:
    """Return what a file of :data:`OTHER_FILES` says in the terms of ``quantization_config``, None if there is none.
    Raises StartError if it cannot be read."""
    for name, method in OTHER_FILES.items():
        if found := read_json(directory / name):
            nested = found.get("quantization")
            renamed = {_OTHER_NAMES.get(key, key): value for key, value in found.items()}
            return renamed | (nested if isinstance(nested, dict) else {}) | {"quant_method": method}
    return None


def refuse_use(model: str, kind: WeightFormat, quantization: str, ranks: int) -> None:
    """Raise StartError if a worker of so many ``ranks`` cannot serve weights of this ``kind`` with ``--quantization``
    as given."""
    if not kind.method:
        return
    why = f"its weights are quantized, in {kind.shown}"
    if quantization == "fp8":
        raise StartError(f"cannot serve {model} in fp8", why, "omit it")
    if ranks > 1:
        raise StartError(f"cannot split {model} among {ranks} ranks", why, "serve it with --tensor-parallel-size 1")


def has_codes(name: str, kind: str) -> bool:
    """Return whether a tensor of this name and type is a weight of something else than floats."""
    return kind not in _FLOATS and name.endswith(("weight", "qweight", "weight_packed", "_blocks"))


def check_codes(model: str, weights: WeightFormat, tensors: Iterable[tuple[str, str]]) -> None:
    """Raise StartError if the ``tensors`` (name and type) of a checkpoint are not of the format that its configuration
    names: codes without a quantization, whose scales would be ignored, or only whole weights with one. vLLM does not
    load the latter either."""
    coded, whole = "", ""
    for name, kind in tensors:
        if has_codes(name, kind):
            coded = f"{name} is {kind}"
            break
        whole = whole or (f"{name} is {kind}" if name.endswith(".weight") else "")
    if coded and not weights.method:
        raise _refused(model, f"its weights are quantized ({coded}), but no file says how")
    # the groups of compressed-tensors can be of the KV cache or of activations alone
    named = weights_of(weights.settings) if weights.method == "compressed-tensors" else weights.method
    if named and whole and not coded:
        raise StartError(
            f"cannot serve {model}",
            f"its configuration says that its weights are quantized, in {weights.shown}, but all are whole ({whole})",
            "remove quantization_config from config.json, and files such as quantize_config.json, to serve them as "
            "they are, or download the quantized weights",
        )


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config") or config.get("compression_config") or nested
    if not found:
        return None
    return found if isinstance(found, dict) else {}


def _unreadable(method: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a packing inside ``method`` that is not read, "" if it is read."""
    packing = str(settings.get("checkpoint_format") or settings.get("format") or "").lower()
    match method:
        case "gptq" | "awq" if strange := _strange_number(settings):
            return f"{method.upper()} with {strange}"
        case "gptq" if "marlin" in packing or settings.get("is_marlin_format"):
            return "GPTQ, repacked for Marlin kernels"
        case "awq" if (version := str(settings.get("version") or "gemm").lower()) != "gemm":
            return f"AWQ {version}"
        case "compressed-tensors" if why := _strange_group(settings):
            return f"compressed-tensors with {why}"
        case "compressed-tensors" if settings.get("transform_config"):
            return "compressed-tensors with transforms (rotations of the activations)"
        case "compressed-tensors" if named := next(filter(None, map(_COMPRESSED_REFUSED.get, _formats(settings))), ""):
            return f"compressed-tensors, {named}"
        case "fp8" if settings.get("fmt", "e4m3") != "e4m3":
            return f"fp8 {settings['fmt']}"
        case "fp8" if (block := settings.get("weight_block_size")) is not None and not _are_sizes(block):
            return f"fp8 in blocks of {block}"
    return ""


def _are_sizes(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def _strange_group(settings: Mapping[str, Any]) -> str:
    """Return what cannot be read of the groups of compressed-tensors, "" if all can."""
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict):
        return f"the groups {shown(groups)}"
    for name, group in groups.items():
        if not isinstance(group, dict):
            return f"the preset scheme {name}"
        weights, targets = group.get("weights") or {}, group.get("targets") or []
        if not isinstance(weights, dict) or not isinstance(targets, list):
            return f"the group {name}: {shown(group)}"
        for key in ("num_bits", "group_size"):
            if not isinstance(weights.get(key), int | None):
                return f"{key} {shown(weights[key])}"
        for target in targets:
            try:
                re.compile(target.removeprefix("re:") if str(target).startswith("re:") else "")
            except (re.error, AttributeError):
                return f"the target {target}"
    return ""


def _strange_number(settings: Mapping[str, Any]) -> str:
    """Return a setting of GPTQ or AWQ that is to be a whole number, if it is none, else ""."""
    for key in ("bits", "w_bit", "group_size", "q_group_size"):
        if (value := settings.get(key)) is not None and not re.fullmatch(r"-?\d{1,9}", str(value)):
            return f"{key} {shown(value)}"
    return ""


def _formats(settings: Mapping[str, Any]) -> Iterator[str]:
    sparsity = settings.get("sparsity_config")
    yield str((sparsity.get("format") if isinstance(sparsity, dict) else None) or "")
    yield str(settings.get("format") or "")
    for group in groups_of(settings):
        yield str(group.get("format") or "")


def _described(method: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words that describe a format."""
    match method:
        case "gptq" | "awq":
            bits, group = settings.get("bits") or settings.get("w_bit") or 4, settings.get("group_size", 128)
            yield f"{method.upper()} {bits}-bit,"
            yield "one group per row" if group in (-1, None) else f"groups of {group}"
            if settings.get("desc_act"):
                yield "in order of activation"
        case "compressed-tensors":
            groups = dict.fromkeys(map(_described_group, weights_of(settings)))
            yield (
                f"compressed-tensors {'; '.join(groups)}" if groups else "compressed-tensors without quantized weights"
            )
        case "fp8" | "fbgemm_fp8":
            block = settings.get("weight_block_size")
            per_rest = "row" if method == "fbgemm_fp8" else "tensor"
            yield "fp8," + (f" blocks of {'×'.join(map(str, block))}" if block else f" scales per {per_rest}")
        case _:
            yield "MXFP4, groups of 32"


def _described_group(weights: Mapping[str, Any]) -> str:
    """Return the words that describe how a group of compressed-tensors quantizes its weights."""
    kind, group = "float" if weights.get("type") == "float" else "integer", weights.get("group_size")
    scales = f"groups of {group}" if group and group > 0 else f"scales per {weights.get('strategy', 'channel')}"
    return f"{weights.get('num_bits', '?')}-bit {kind}, {scales}"


def bits_of(settings: Mapping[str, Any], name: str) -> int:
    """Return the bits of a code in the packed tensor ``name`` of a checkpoint with these settings."""
    if settings.get("config_groups"):
        return int(arguments_of(settings, name.rpartition(".")[0]).get("num_bits") or 4)
    return int(settings.get("bits") or settings.get("w_bit") or 4)


def _refused(model: str, why: str) -> StartError:
    return StartError(f"cannot serve {model}", why, INSTEAD)
