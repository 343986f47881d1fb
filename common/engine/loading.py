"""Loads a checkpoint as an engine: weights, kernels, the KV pool, and the checks before it serves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

from torch import nn

from common.attention.interface import AttentionBackend
from common.attention.registry import select_backend
from common.checkpoint.files import Checkpoint
from common.engine.runner import WARM_UP_ROWS, ModelEngine
from common.kernels import cpu
from common.kv.budget import Budget, fit
from common.kv.layout import KvDtype, KvLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.tensors import KvStore
from common.model.layers import fuse_layers
from common.model.linears import PackedLinear, pack_linears
from common.model.load import Progress, detach_from_files, dtype_of, load_model, read_weights
from common.model.probe import QUANTISED_TOLERANCE, probe
from common.model.rotary import freeze_rotary
from common.platform import device, memory


def load_engine(
    checkpoint: Checkpoint,
    *,
    dtype: KvDtype | Literal["auto"] = "auto",
    max_model_len: int | None = None,
    kv_bytes: int | None = None,
    num_kv_blocks: int | None = None,
    block_size: int = 16,
    max_batched_tokens: int,
    max_num_seqs: int,
    batch_hint: int,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    attention: str | None = None,
    quantization: Literal["none", "int8"] = "none",
) -> ModelEngine:
    """Load, check and prepare a model; StartError, in words, if it cannot be served here.

    ``batch_hint`` is the typical number of rows per step (large for prefill, small for decode), for which oneDNN packs
    weights where it is used. The pool has ``num_kv_blocks`` blocks if given, else as many as fit into ``kv_bytes``
    (default: :func:`common.platform.memory.kv_budget`). Rotary variants that look at the whole batch are frozen for
    ``max_model_len`` if given, else for the model's own length (never for what the pool holds), so that workers with
    pools of different sizes agree.
    """
    machine = device.probe_cpu()
    chosen, reason = device.choose_dtype(dtype, checkpoint.dtype, machine)
    dtype_of(chosen)
    budget_bytes = kv_bytes if kv_bytes is not None else memory.kv_budget()

    def budget(layers: tuple[object, ...] | None) -> Budget | None:
        if layers is None:
            return None
        return fit(
            KvLayout(layers, chosen, block_size),  # type: ignore[arg-type]
            checkpoint.max_position,
            max_model_len,
            kv_bytes=budget_bytes,
            num_kv_blocks=num_kv_blocks,
            limit=checkpoint.position_limit,
        )

    budget(checkpoint.kv_layers())  # raises StartError before the weights are read, which takes long
    weights = read_weights(checkpoint, chosen, progress)
    model = load_model(checkpoint, chosen, trust_remote_code)
    notes, rotary = freeze_rotary(model, max_model_len or checkpoint.max_position)
    seen = probe(model, checkpoint)
    int8 = quantization == "int8"
    fused = fuse_layers(model, int8)
    packed = pack_linears(model, batch_hint, int8)
    detach_from_files(model)
    plan = budget(seen.layers)
    assert plan is not None
    store = KvStore(KvMemory(KvLayout(seen.layers, chosen, block_size), plan.blocks))
    backend = select_backend("cpu", store, attention)
    fingerprint = _fingerprint(checkpoint, weights, rotary, quantization)
    engine = ModelEngine(model, store, backend, fingerprint, checkpoint.vocab_size, plan.max_model_len)
    engine.warm_up_rows, engine.max_num_seqs = min(max_batched_tokens, WARM_UP_ROWS), max_num_seqs
    engine.notes = [f"dtype {chosen}: {reason}", *plan.notes, _kernels_note(backend), *notes]
    engine.notes += _layer_notes(model, fused, bool(fused) and engine.shorten(seen.tokens), packed, batch_hint, int8)
    memory.keep_freed_memory()
    engine.verify(checkpoint, seen, QUANTISED_TOLERANCE if int8 else None)
    return engine


def _layer_notes(
    model: nn.Module, fused: int, at_once: bool, packed: int, batch_hint: int, int8: bool
) -> Iterator[str]:
    """Yield notes on how layers are computed: ``fused`` of them (``at_once``: in a single call), ``packed`` linears."""
    if fused:
        yield f"{fused} layers run as fused kernels in C{', all in one call' if at_once else ''}"
    if packed:
        by_onednn = any(isinstance(each, PackedLinear) for each in model.modules())
        how = f"for about {batch_hint} rows per step" if by_onednn else "for any number of rows"
        yield f"{packed} linear layers packed {how}"
    if int8:
        yield "linear layers quantized to int8: half the memory of bfloat16, slightly different results"


def _kernels_note(backend: AttentionBackend) -> str:
    """Return a note on which attention backend runs, and for which instruction set."""
    if (library := cpu.library()) is None:
        return f"attention {backend.name}: {cpu.MISSING}, which makes decoding slower"
    return f"attention {backend.name}" + (f" for {library.variant}" if backend.name == "native" else "")


def _fingerprint(checkpoint: Checkpoint, weights: str, rotary: str, quantization: str) -> str:
    """Return the fingerprint of the loaded model: the checkpoint's, a dot, and the hash of all ``weights`` in its
    files. If loading has changed what keys mean (frozen rotary frequencies, quantized weights), another dot and a hash
    of these changes follow."""
    made = [part for part in (rotary, "" if quantization == "none" else quantization) if part]
    loaded = f"{checkpoint.fingerprint}.{weights}"
    return f"{loaded}.{hashlib.blake2b('/'.join(made).encode(), digest_size=8).hexdigest()}" if made else loaded
