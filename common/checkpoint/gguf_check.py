"""Compares the tensors of a GGUF file with its metadata, before a model that is not whole is loaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from common.checkpoint.gguf import GgufModel
from common.checkpoint.gguf_config import EMBEDDING, OUTPUT
from common.checkpoint.sizes import GGUF_BITS
from common.core.errors import StartError

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_NOT_WEIGHTS = ("I8", "I16", "I32", "I64")
_NEEDED = (("attn_q.weight", "attn_qkv.weight"), ("attn_output.weight",))
_SHARED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that some files have in one layer only."""


def check_tensors(model: GgufModel, config: Mapping[str, Any]) -> None:
    """Raise StartError unless the file has all layers that its metadata names and no other one, each with the same
    tensors, in shapes and types of weights. ``config``: what its metadata describe."""
    if why := next(_faults(model, config), ""):
        raise StartError(f"cannot serve {model.files[0]}", why, "download the file again, or use one of a whole model")


def _faults(model: GgufModel, config: Mapping[str, Any]) -> Iterator[str]:
    layers: dict[int, set[str]] = {}
    for name in model.tensors:
        if found := _LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), set()).add(found[2])
    count = config["num_hidden_layers"]
    if (extra := max(layers, default=-1)) >= count:
        yield f"its metadata name {count:,} layers, but it has tensors of layer {extra}"
    if absent := [at for at in range(min(count, len(layers) + 1)) if at not in layers]:
        yield f"its metadata name {count:,} layers, but it has no tensor of layer {absent[0]}"
    every = set.union(*layers.values()).difference(_SHARED)
    for names in _NEEDED:
        if not every.intersection(names):
            yield f"it has no {names[0]} in any layer"
    for at, parts in sorted(layers.items()):
        if missing := sorted(every - parts):
            yield f"it has no blk.{at}.{missing[0]}, which other layers have"
    if "output_norm.weight" not in model.tensors:
        yield "it has no output_norm.weight"
    for name, tensor in model.tensors.items():
        if (kind := GGMLQuantizationType(tensor.type).name) in _NOT_WEIGHTS:
            yield f"its tensor {name} is of type {kind}, which no weight has"
        elif not _is_read(GGMLQuantizationType(tensor.type)):
            yield f"its tensor {name} is of type {kind}, which is not read"
    yield from _wrong_shapes(model, config)
    if not model.metadata.get("tokenizer.ggml.tokens"):
        yield "its vocabulary is empty"


@functools.cache
def _is_read(kind: GGMLQuantizationType) -> bool:
    """Return whether there is a reader for a type."""
    if kind.name == "F64" or kind.name in GGUF_BITS:
        return True
    _, size = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _wrong_shapes(model: GgufModel, config: Mapping[str, Any]) -> Iterator[str]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    expected = {
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, queries),
        EMBEDDING: (config["vocab_size"], hidden),
        OUTPUT: (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
    }
    if width := config.get("intermediate_size"):
        expected |= {"ffn_down.weight": (hidden, width), "ffn_gate.weight": (width, hidden)}
    for name, tensor in model.tensors.items():
        layer = _LAYER.fullmatch(name)
        wanted = expected.get(layer[2] if layer else name)
        if wanted is not None and tensor.shape != wanted:
            yield f"its tensor {name} is {_shown(tensor.shape)}, but its metadata ask for {_shown(wanted)}"


def _shown(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
