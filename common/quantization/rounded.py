"""The weights of an unquantized checkpoint, rounded to 4 or 8 bits when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from common.checkpoint.files import Checkpoint
from common.quantization.source import TensorFiles, WeightSource
from common.quantization.weight import QuantizedWeight, quantize

GROUP = 64
"""Columns per group, unless another number is asked for."""
EMBEDDINGS = frozenset(("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings"))
OUTPUTS = frozenset(("lm_head", "embed_out", "output"))
ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))
"""Last parts of the names of modules; routers choose experts, and are small."""
_FLOATS = frozenset(("F16", "BF16", "F32"))


def open_rounded(checkpoint: Checkpoint, bits: Literal[4, 8], group: int = GROUP) -> WeightSource:
    """Return the weights of an unquantized ``checkpoint``: matrices of linear layers are rounded to ``bits`` in groups
    of ``group`` columns, the output layer to 8 bits, and so is an embedding that is the output layer, too. Other
    embeddings, routers and stacked experts stay as they are. ``unrounded`` has all matrices for layers that do not take
    quantized ones.

    Raises StartError if a file cannot be read; reading raises it if a weight is not finite.
    """
    files = TensorFiles(checkpoint.weight_files)
    chosen = choose(files, checkpoint.text_config, bits)
    source = WeightSource(
        {name: partial(_round, files, name, each, group) for name, each in chosen.items()},
        files.rest(chosen)[0],
    )
    source.unrounded = {name: files.lazy(name) for name in chosen}
    return source


def choose(files: TensorFiles, config: Mapping[str, Any], bits: Literal[4, 8]) -> dict[str, Literal[4, 8]]:
    """Return how many bits the codes of a matrix get, by the name of the tensor. ``config``: the language model's."""
    matrices = [
        name for name in files.names
        if name.endswith(".weight") and len(files.shape(name)) == 2 and files.dtype(name) in _FLOATS
    ]  # fmt: skip
    parts = {name: name.split(".")[-2] for name in matrices}
    tied = bool(config.get("tie_word_embeddings")) or not OUTPUTS & set(parts.values())
    found = dict[str, Literal[4, 8]]()
    for name, part in parts.items():
        if part in ROUTERS or (part in EMBEDDINGS and not tied):
            continue
        found[name] = 8 if part in EMBEDDINGS | OUTPUTS else bits
    return found


def _round(files: TensorFiles, name: str, bits: Literal[4, 8], group: int) -> QuantizedWeight:
    return replace(quantize(files.lazy(name)[...], bits, group), source=name_of(bits, group))


def name_of(bits: int, group: int = GROUP) -> str:
    """Return what a weight is called that was rounded to ``bits`` in groups of ``group`` columns."""
    return f"int{bits} in groups of {group}"
