"""What a model is, what it needs and what of it is fast, from its small files and the headers of its weights.

Nothing is loaded and torch is not imported: the answer comes before a download or a start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.checkpoint.complete import check_whole
from common.checkpoint.end_tokens import EndToken
from common.checkpoint.formats import has_codes
from common.checkpoint.parameters import PLAIN_KINDS, count_parameters, weight_bytes
from common.checkpoint.preview import Preview
from common.checkpoint.sizes import GGUF_BITS
from common.kv.budget import check_length
from common.kv.layout import ELEMENT_BYTES, KvDtype, KvLayout
from common.platform import memory
from common.platform.device import Device, choose, choose_dtype
from deploy.launcher.preflight import PROCESS_BYTES

BLOCK_SIZE = 16
CONTEXTS = (2_048, 8_192, 32_768, 131_072)
"""Lengths of requests, in tokens, for which memory is stated, beside the model's own."""
BATCHES = (1, 8, 32)
"""Numbers of requests for which memory is stated."""
FUSED_TYPES = frozenset(
    ("cwm granite granite_swa internlm3 iquestcoder llama ministral ministral3 mistral qwen2 qwen3 seed_oss").split()
)
"""Model types whose decoder layers are of the shape of :mod:`common.model.layers`."""


EXACT_KINDS = frozenset(("F8_E4M3", "U8", "MXFP4", "IQ4_NL", "IQ4_XS"))
"""Types of tensors whose codes are no integers, so that products with them are always exact; U8 has MXFP4."""


@dataclass(frozen=True)
class Memory:
    """The bytes of a worker with ``requests`` requests of ``tokens`` tokens (prompt plus output)."""

    tokens: int
    requests: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """The answer of ``tandem inspect``. Sizes are in bytes, contexts in tokens. ``tensors`` counts the tensors of each
    stored type. ``kv_bytes_per_token`` is None and ``memory`` empty if the configuration does not give the shape of
    keys and values. ``tool_calls`` and ``reasoning`` name the formats that are read, None if none is."""

    model: str
    architecture: str
    model_type: str
    parameters: int
    active_parameters: int
    format: str
    tensors: dict[str, int]
    file_bytes: int
    downloaded: bool
    device: str
    dtype: str
    dtype_reason: str
    weight_bytes: int
    kv_bytes_per_token: int | None
    memory: tuple[Memory, ...]
    free_bytes: int
    context: int
    longest_context: int
    scaling: str
    end_tokens: tuple[EndToken, ...]
    vocabulary: int
    chat_templates: tuple[str, ...]
    tool_calls: str | None
    reasoning: str | None
    fast: tuple[str, ...]
    slow: tuple[str, ...]
    notes: tuple[str, ...]


def inspect(found: Preview, max_model_len: int | None = None) -> Inspection:
    """Describe a checkpoint, as one worker on this machine would serve it with requests of up to ``max_model_len``
    tokens (default: the model's own context). Raises StartError if its weights are not whole, if its tokenizer or its
    chat template cannot be used, if its context is too short or ``max_model_len`` out of range, or if this machine
    cannot compute with it."""
    from coordinator.text.templates import template_sources
    from coordinator.text.tokenizer import TextModel  # imports the tokenizers library

    checkpoint, config = found.checkpoint, found.checkpoint.text_config
    check_whole(found)
    check_length(checkpoint.max_position, max_model_len, checkpoint.position_limit, checkpoint.scaling)
    length = max_model_len or checkpoint.max_position
    machine, _ = choose("auto")
    dtype, reason = choose_dtype("auto", found.dtype, machine)
    text = TextModel(checkpoint.path, vocab_size=checkpoint.vocab_size)
    total, active = count_parameters(found.tensors, checkpoint.format, config)
    weights = weight_bytes(found, dtype)
    layers = checkpoint.kv_layers()
    layout = None if layers is None else KvLayout(layers, dtype, BLOCK_SIZE)
    output = text.output
    return Inspection(
        model=checkpoint.name,
        architecture=checkpoint.architecture,
        model_type=str(checkpoint.config.get("model_type", "")),
        parameters=total,
        active_parameters=active,
        format=checkpoint.format.shown,
        tensors=dict(Counter(tensor.kind for tensor in found.tensors.values()).most_common()),
        file_bytes=found.weight_bytes,
        downloaded=found.local,
        device=machine.shown,
        dtype=dtype,
        dtype_reason=reason,
        weight_bytes=weights,
        kv_bytes_per_token=None if layout is None else layout.token_bytes,
        memory=() if layout is None else tuple(_memory(length, layout, weights)),
        free_bytes=memory.free_memory() if machine.gpu is None else machine.gpu.free_bytes,
        context=length,
        longest_context=checkpoint.position_limit,
        scaling=checkpoint.scaling,
        end_tokens=checkpoint.end_tokens,
        vocabulary=checkpoint.vocab_size,
        chat_templates=tuple(template_sources(checkpoint.path, None)),
        tool_calls=_named(output.tools, output.reads_calls),
        reasoning=_named(output.reasoning, output.reads_reasoning),
        fast=tuple(_fast(found, machine)),
        slow=tuple(_slow(found, machine, dtype, active < total)),
        notes=checkpoint.notes,
    )


def _memory(longest: int, layout: KvLayout, weights: int) -> Iterator[Memory]:
    """Yield the memory of a worker at each context up to the ``longest``, and each batch."""
    for tokens in (*(each for each in CONTEXTS if each < longest), longest):
        blocks = layout.blocks_for(tokens)
        for requests in BATCHES:
            yield Memory(tokens, requests, weights + blocks * layout.block_bytes * requests + PROCESS_BYTES)


def _named(notation: Any, is_read: bool) -> str | None:
    """Return the name of a format; the tokenizer may describe one that has none."""
    if not is_read:
        return None
    return getattr(notation, "name", None) or "described by the tokenizer"


def _fast(found: Preview, machine: Device) -> Iterator[str]:
    checkpoint = found.checkpoint
    quantized = bool(checkpoint.format.method) and any(
        tensor.kind not in PLAIN_KINDS for tensor in found.tensors.values()
    )
    if machine.gpu is not None:
        yield "attention in Triton over KV blocks; decode steps as CUDA graphs"
        if quantized:
            yield "weights stay quantized in memory, and are multiplied in Triton"
        return
    yield "attention in C over KV blocks"
    if checkpoint.config.get("model_type") in FUSED_TYPES:
        yield "decoder layers in C, all in one call per step"
    if quantized:
        yield f"weights stay quantized in memory, and are multiplied in C{_roundings(found)}"


def _roundings(found: Preview) -> str:
    """Return for which weights products on a CPU round activations, unless they are asked to be exact."""
    kinds = dict.fromkeys(each.kind for name, each in found.tensors.items() if has_codes(name, each.kind))
    exact = [kind for kind in kinds if kind in EXACT_KINDS]
    if len(exact) == len(kinds):
        return ", exactly"
    return "; activations are rounded to 8 or 16 bits" + (f", but not for {', '.join(exact)}" if exact else "")


def _slow(found: Preview, machine: Device, dtype: KvDtype, has_experts: bool) -> Iterator[str]:
    checkpoint = found.checkpoint
    on_cpu = machine.gpu is None
    if on_cpu and checkpoint.config.get("model_type") not in FUSED_TYPES:
        yield "decoder layers run as modules of transformers, dozens of small operators each"
    if on_cpu and has_experts:
        yield "experts are multiplied one by one, in torch"
    if checkpoint.format.container == "gguf":
        kinds = {tensor.kind for tensor in found.tensors.values()} - GGUF_BITS.keys() - PLAIN_KINDS
        yield from (f"weights of {kind} are expanded to 8 bits" for kind in sorted(kinds))
    if not checkpoint.format.method and ELEMENT_BYTES[dtype] > ELEMENT_BYTES[found.dtype]:
        yield f"weights of {found.dtype} become {dtype}, twice the memory and the time per token"
