"""Loads a checkpoint as an engine: weights, kernels, the KV pool, and the checks before it serves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from common.attention.registry import AUTO, Wanted, select_backend
from common.checkpoint.files import Checkpoint
from common.core.errors import StartError
from common.engine.device_steps import DeviceSteps
from common.engine.gpu_memory import measure_use
from common.engine.graph_calls import CudaCalls
from common.engine.parallel import Leader
from common.engine.pool import make_store
from common.engine.runner import WARM_UP_ROWS, ModelEngine
from common.kernels import triton
from common.kv.budget import Budget, fit
from common.kv.gpu_budget import Share, most_for_kv, plan_pool
from common.kv.layout import KvDtype, KvLayout
from common.kv.scales import KvScales
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.tensors import DTYPES
from common.model.fp8 import Fp8Linear, round_linears
from common.model.gpu_layers import PARTS, fuse_gpu_layers
from common.model.layers import fuse_layers
from common.model.linears import PackedLinear, pack_linears
from common.model.load import Progress, detach_from_files, dtype_of, load_model, read_weights, weight_bytes
from common.model.probe import QUANTISED_TOLERANCE, Probe, probe
from common.model.rotary import freeze_rotary
from common.platform import memory
from common.platform.device import Device, choose_dtype, probe_cpu


def load_engine(
    checkpoint: Checkpoint,
    *,
    machine: Device | None = None,
    dtype: KvDtype | Literal["auto"] = "auto",
    max_model_len: int | None = None,
    kv_bytes: int | None = None,
    num_kv_blocks: int | None = None,
    gpu_share: Share | None = None,
    block_size: int = 16,
    max_batched_tokens: int,
    max_num_seqs: int,
    batch_hint: int,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    attention: Wanted = AUTO,
    quantization: Literal["none", "int8", "fp8"] = "none",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    enforce_eager: bool = False,
    gpu_fusion: Sequence[str] = PARTS,
    leader: Leader | None = None,
) -> ModelEngine:
    """Load, check and prepare a model on ``machine`` (default: the CPU); StartError, in words, if it cannot be served
    here. With ``leader`` this process is rank 0 of a tensor-parallel worker.

    ``batch_hint`` is the typical number of rows per step (large for prefill, small for decode), for which oneDNN packs
    weights where it is used. The pool has ``num_kv_blocks`` blocks if given, else as many as fit into ``kv_bytes``
    (default: :func:`common.platform.memory.kv_budget`, on a GPU what weights and activations leave of ``gpu_share``).
    Rotary variants that look at the whole batch are frozen for ``max_model_len`` if given, else for the model's own
    length (never for what the pool holds), so that workers with pools of different sizes agree.
    """
    machine, share = machine or probe_cpu(), gpu_share or Share()
    chosen, reason = choose_dtype(dtype, checkpoint.dtype, machine)
    dtype_of(chosen)
    stored: KvDtype = chosen if kv_cache_dtype == "auto" else "fp8"
    _check_quantization(quantization, machine)
    if leader is not None:
        leader.check(machine)
        _check_one_rank(quantization, kv_cache_dtype)
    room = kv_bytes if kv_bytes is not None else _most_for_kv(checkpoint, chosen, machine, share)

    def budget(layers: tuple[object, ...] | None, room: int) -> Budget | None:
        if layers is None:
            return None
        return fit(
            KvLayout(layers, stored, block_size),  # type: ignore[arg-type]
            checkpoint.max_position,
            max_model_len,
            kv_bytes=room,
            num_kv_blocks=num_kv_blocks,
            limit=checkpoint.position_limit,
        )

    budget(checkpoint.kv_layers(), room)  # raises StartError before the weights are read, which takes long
    weights = read_weights(checkpoint, chosen, progress, for_gpu=machine.gpu is not None)
    model = (load_model if leader is None else leader.load)(checkpoint, chosen, trust_remote_code)
    notes, rotary = freeze_rotary(model, max_model_len or checkpoint.max_position)
    where, int8 = _move(model, machine), quantization == "int8"
    seen = probe(model, checkpoint)
    rounded = round_linears(model) if quantization == "fp8" else []
    fused = fuse_layers(model, int8) if machine.gpu is None and leader is None and not rounded else 0
    if where.type == "cuda" and leader is None and not rounded:
        notes += _fuse_for_gpu(model, gpu_fusion)
    packed = pack_linears(model, batch_hint, int8) if machine.gpu is None else 0
    detach_from_files(model)
    layers, shards = (seen.layers, 1) if leader is None else leader.whole_layers(checkpoint, seen.layers)
    layout = KvLayout(layers, stored, block_size, shards)
    scales = KvScales.for_peaks(seen.peaks) if stored == "fp8" else None
    codec = None if scales is None else Fp8Codec(scales, DTYPES[chosen], where)
    kv = "" if scales is None else f"kv fp8 of {chosen} by {scales.fingerprint}"
    fingerprint = _fingerprint(checkpoint, weights, rotary, quantization, kv)
    make = partial(_make_engine, checkpoint, model, seen, layout, codec, machine, where, attention, fingerprint, leader)
    if machine.gpu is not None and kv_bytes is None and num_kv_blocks is None:
        rows = min(max_batched_tokens, checkpoint.max_position)
        use = measure_use(lambda: make(layout.blocks_for(rows), rows), max_batched_tokens, max_num_seqs)
        room, note = plan_pool(use, share, layout.token_bytes, max_model_len or block_size)
        notes.append(note)
    plan = budget(layers, room)
    assert plan is not None
    engine = make(plan.blocks, plan.max_model_len)
    engine.warm_up_rows, engine.max_num_seqs = min(max_batched_tokens, WARM_UP_ROWS), max_num_seqs
    engine.notes = [f"dtype {chosen}: {reason}", *plan.notes, *engine.notes, *notes]
    engine.notes += _layer_notes(model, fused, bool(fused) and engine.shorten(seen.tokens), packed, batch_hint, int8)
    engine.notes += _fp8_notes(rounded, scales)
    memory.keep_freed_memory()
    engine.verify(checkpoint, seen, QUANTISED_TOLERANCE if int8 or rounded or scales else None)
    if where.type == "cuda" and leader is None:
        _capture(engine, where, enforce_eager)
    return engine


def _fuse_for_gpu(model: nn.Module, parts: Sequence[str]) -> Iterator[str]:
    """Fuse ``parts`` of the decoder layers and yield a note on it. Without Triton only the linears can be."""
    usable = parts if triton.unusable("cuda") is None else [part for part in parts if part == "linears"]
    if usable and (count := fuse_gpu_layers(model, usable)):
        yield f"{count} layers with fused {', '.join(usable)}"


def _capture(engine: ModelEngine, where: torch.device, enforce_eager: bool) -> None:
    if enforce_eager:
        engine.notes.append("decode steps run without CUDA graphs, as requested")
    else:
        engine.capture_graphs(CudaCalls(where))


def _check_quantization(quantization: str, machine: Device) -> None:
    if quantization == "int8" and machine.gpu is not None:
        raise StartError("--quantization int8 runs on CPUs only", f"this worker computes on {machine.name}", "omit it")


def _check_one_rank(quantization: str, kv_cache_dtype: str) -> None:
    if "fp8" in (quantization, kv_cache_dtype):
        why = "each rank would choose scales of its own"
        raise StartError("fp8 does not work with tensor parallelism yet", why, "omit one of the two")


def _most_for_kv(checkpoint: Checkpoint, dtype: KvDtype, machine: Device, share: Share) -> int:
    """Return the most bytes that the KV pool can have, as far as it is known before the model is loaded. Raises
    StartError if the weights do not fit into a GPU."""
    if machine.gpu is None:
        return memory.kv_budget()
    return most_for_kv(machine.gpu.total_bytes, machine.gpu.free_bytes, weight_bytes(checkpoint, dtype), share)


def _move(model: nn.Module, machine: Device) -> torch.device:
    """Move ``model`` to the memory of ``machine`` and return its device. Raises StartError if that is too small, for
    example because another process has taken it since it was looked at."""
    where = torch.device(machine.address)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    try:
        model.to(where)
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"too little GPU memory for the weights on {machine.address}",
            str(error).partition("\n")[0],
            "choose a smaller model, free the GPU, or run fewer workers on it",
        ) from None
    return where


def _make_engine(
    checkpoint: Checkpoint,
    model: nn.Module,
    seen: Probe,
    layout: KvLayout,
    codec: Fp8Codec | None,
    machine: Device,
    where: torch.device,
    attention: Wanted,
    fingerprint: str,
    leader: Leader | None,
    blocks: int,
    max_model_len: int,
) -> ModelEngine:
    """Return an engine with a pool of ``blocks`` blocks, whose notes say how it attends. The model attends through the
    engine that was made last."""
    if leader is None:
        store = make_store(layout, blocks, machine, where, codec)
    else:
        store = leader.make_store(layout, blocks)
    chosen = select_backend(store, attention, seen.calls)
    steps = None
    if machine.gpu is not None:
        embedding: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
        steps = DeviceSteps(where, embedding.weight.shape[0], seen.logits.shape[1])
    make = ModelEngine if leader is None else leader.make_engine
    engine = make(model, store, chosen.backend, fingerprint, checkpoint.vocab_size, max_model_len, steps)
    engine.notes += chosen.notes
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


def _fp8_notes(rounded: Sequence[Fp8Linear], scales: KvScales | None) -> Iterator[str]:
    """Yield notes on what is in float8: the linear layers ``rounded``, and KV with ``scales``."""
    if rounded:
        slow = sum(not each.in_hardware for each in rounded)
        how = f", {slow} of them emulated in float32, which is for tests and slow" if slow else ""
        yield f"{len(rounded)} linear layers in fp8 with a scale per row and per token{how}"
    if scales is not None:
        count = sum(len(layer.k) + len(layer.v) for layer in scales.layers)
        yield f"KV in fp8: half the memory of bfloat16; {scales.scaled_heads} of {count} scales differ from 1"


def _fingerprint(checkpoint: Checkpoint, weights: str, rotary: str, quantization: str, kv: str) -> str:
    """Return the fingerprint of the loaded model: the checkpoint's, a dot, and the hash of all ``weights`` in its
    files. If loading has changed what keys mean (frozen rotary frequencies, quantized weights, ``kv`` with scales),
    another dot and a hash of these changes follow."""
    made = [part for part in (rotary, "" if quantization == "none" else quantization, kv) if part]
    loaded = f"{checkpoint.fingerprint}.{weights}"
    return f"{loaded}.{hashlib.blake2b('/'.join(made).encode(), digest_size=8).hexdigest()}" if made else loaded
