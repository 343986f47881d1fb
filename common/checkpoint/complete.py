"""Compares the tensors of a checkpoint with its configuration, from their names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from common.checkpoint.formats import check_codes
from common.checkpoint.preview import Preview
from common.core.errors import StartError

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.(.+)")
_OTHER_TOWERS = re.compile(r"(?:^|[._])(vision|visual|audio|image|mtp)")
_DENSE = frozenset("llama mistral qwen2 qwen3 gemma gemma2 gemma3 gemma3_text granite smollm3 arcee".split())
"""Model types whose layers have exactly the matrices of :func:`_matrices`."""


def check_whole(found: Preview) -> None:
    """Raise StartError if tensors that the configuration asks for are absent or of another shape: whole layers of any
    model, matrices of those whose names are known. GGUF files are compared when they are opened."""
    if found.checkpoint.format.container == "gguf":
        return
    kinds = ((name, tensor.kind) for name, tensor in found.tensors.items())
    check_codes(found.checkpoint.name, found.checkpoint.format, kinds)
    if why := next(_faults(found, found.checkpoint.text_config), ""):
        raise StartError(
            f"cannot serve {found.checkpoint.name}", why, "download the model again, or correct config.json"
        )


def _faults(found: Preview, config: Mapping[str, Any]) -> Iterator[str]:
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, tensor in found.tensors.items():
        if not _OTHER_TOWERS.search(name) and (layer := _LAYER.search(name)):
            layers.setdefault(int(layer[1]), {})[layer[2]] = tensor.shape
    count = config.get("num_hidden_layers", config.get("n_layer"))
    if type(count) is not int:
        return
    absent = next((at for at in range(count) if at not in layers), None)
    if absent is not None:
        yield f"its configuration names {count:,} layers, but its weights have no tensor of layer {absent}"
        return
    if config.get("model_type") not in _DENSE:
        return
    plain, rest = not found.checkpoint.format.method, (_OTHER_TOWERS, _LAYER)
    outside = {
        name: tensor.shape
        for name, tensor in found.tensors.items()
        if not any(pattern.search(name) for pattern in rest)
    }
    for module, shape in _ends(config).items():
        own = re.compile(rf"(?:^|\.)(?:{module})\.\w+")
        of_module = {name: each for name, each in outside.items() if own.search(name)}
        if not of_module:
            yield f"its weights have no {module.partition('|')[0]}"
        for name, stored in of_module.items():
            if plain and name.endswith(".weight") and None not in shape and stored != shape:
                yield f"{name} is {_shown(stored)}, but its configuration asks for {_shown(shape)}"
    wanted = _matrices(config)
    for at in range(count):
        for matrix, shape in wanted.items():
            if not any(name.startswith(f"{matrix}.") for name in layers[at]):
                yield f"its weights have no {matrix} in layer {at}"
            got = layers[at].get(f"{matrix}.weight")
            if plain and None not in shape and got is not None and got != shape:
                yield f"{matrix} of layer {at} is {_shown(got)}, but its configuration asks for {_shown(shape)}"


def _ends(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of what a model has before and after its layers, by the names that it can have, with None where
    the configuration does not say. A tied pair may be stored under either name."""
    vocabulary, hidden = (config.get("vocab_size"), config.get("hidden_size")), (config.get("hidden_size"),)
    if config.get("tie_word_embeddings") is False:
        return {"embed_tokens": vocabulary, "norm": hidden, "lm_head": vocabulary}
    return {"embed_tokens|lm_head": vocabulary, "norm": hidden}


def _matrices(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of a layer's matrices by name, with None where the configuration does not say."""
    hidden, heads, width = (config.get(key) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    dim = config.get("head_dim") or (hidden // heads if hidden and heads else None)
    keys = config.get("num_key_value_heads") or heads
    queries, keys = (each * dim if dim and each else None for each in (heads, keys))
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }


def _shown(shape: tuple[Any, ...]) -> str:
    return "×".join(map(str, shape))
