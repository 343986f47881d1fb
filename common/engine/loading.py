"""Loads a checkpoint as an engine: the prepared model, the KV pool, and the checks before it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from common.attention.registry import AUTO, Wanted, select_backend
from common.checkpoint.files import ROUNDED, Checkpoint
from common.core.errors import StartError
from common.engine.device_steps import DeviceSteps
from common.engine.faults import SMALLER_POOL, shortage_in_words
from common.engine.gpu_memory import measure_use
from common.engine.graph_calls import CudaCalls, GraphCalls
from common.engine.parallel import Leader
from common.engine.pool import make_store
from common.engine.prepared import PreparedModel, Products, Quantization, WeightCache, prepare
from common.engine.progress import StepProgress, not_reported
from common.engine.runner import WARM_UP_ROWS, ModelEngine
from common.grammar.masks import Grammars
from common.kv.budget import Budget, fit
from common.kv.gpu_budget import GpuShare, most_for_kv, plan_pools
from common.kv.layout import KvDtype, KvLayout, LayerLayout
from common.kv.scales import KvScales
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.tensors import DTYPES
from common.model.gpu_layers import PARTS
from common.model.load import Progress, dtype_of
from common.model.parallel import whole_peaks
from common.model.probe import QUANTISED_TOLERANCE
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
    gpu_share: GpuShare | None = None,
    block_size: int = 16,
    max_batched_tokens: int,
    max_num_seqs: int,
    batch_hint: int,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    attention: Wanted = AUTO,
    quantization: Quantization = "none",
    products: Products = "auto",
    weight_cache: WeightCache = "auto",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    enforce_eager: bool = False,
    decodes: bool = True,
    gpu_fusion: Sequence[str] = PARTS,
    leader: Leader | None = None,
    captured: StepProgress = not_reported,
) -> ModelEngine:
    """Load, check and prepare a model on ``machine`` (default: the CPU); StartError, in words, if it cannot be served
    here. With ``leader`` this process is rank 0 of a tensor-parallel worker.

    ``batch_hint`` is the typical number of rows per step (large for prefill, small for decode), for which oneDNN packs
    weights where it is used. Only an engine that ``decodes`` has CUDA graphs. The pool has ``num_kv_blocks`` blocks if
    given, else as many as fit into ``kv_bytes`` (default: :func:`common.platform.memory.kv_budget`, on a GPU what
    weights and activations leave of ``gpu_share``).
    Rotary variants that look at the whole batch are frozen for ``max_model_len`` if given, else for the model's own
    length (never for what the pool holds), so that workers with pools of different sizes agree. ``progress`` follows
    the reading of weights, ``captured`` the capture of CUDA graphs.
    """
    machine, share = machine or probe_cpu(), gpu_share or GpuShare()
    chosen, reason = choose_dtype(dtype, checkpoint.dtype, machine)
    dtype_of(chosen)
    stored: KvDtype = chosen if kv_cache_dtype == "auto" else "fp8"
    _check_quantization(quantization, machine)
    room = kv_bytes if kv_bytes is not None else _most_for_kv(checkpoint, chosen, machine, share, leader)
    budget = partial(_budget, checkpoint, stored, block_size, max_model_len, num_kv_blocks)
    if (expected := checkpoint.kv_layers()) is not None:
        budget(expected, room)  # raises StartError before the weights are read, which takes long
    ready = prepare(
        checkpoint, machine, chosen, max_model_len=max_model_len, batch_hint=batch_hint, quantization=quantization,
        products=products, weight_cache=weight_cache, gpu_fusion=gpu_fusion, progress=progress,
        trust_remote_code=trust_remote_code, leader=leader,
    )  # fmt: skip
    layout = _layout(checkpoint, ready, stored, block_size, leader)
    scales = _scales(ready, layout, leader)
    make = partial(_make_engine, checkpoint, ready, layout, scales, chosen, machine, attention, leader)
    graph_calls = _graph_calls(ready.where) if decodes else None
    if machine.gpu is not None and kv_bytes is None and num_kv_blocks is None:
        largest, calls = (max_batched_tokens, max_num_seqs), None if enforce_eager else graph_calls
        room = _measured_room(make, largest, checkpoint, ready, layout, share, max_model_len, calls, leader)
    plan = budget(layout.layers, room)
    engine = make(plan.blocks, plan.max_model_len)
    engine.warm_up_rows, engine.max_num_seqs = min(max_batched_tokens, WARM_UP_ROWS), max_num_seqs
    engine.grammars = Grammars(checkpoint.path / "tokenizer.json", engine.vocab_size, checkpoint.eos_token_ids)
    engine.notes = [f"dtype {chosen}: {reason}", *plan.notes, *engine.notes, *ready.notes]
    _check(engine, checkpoint, ready, scales, batch_hint)
    if graph_calls is not None and enforce_eager:
        engine.notes.append("decode steps run without CUDA graphs, as requested")
    elif graph_calls is not None:
        engine.capture_graphs(graph_calls(), captured)
    return engine


def _graph_calls(where: torch.device) -> Callable[[], GraphCalls] | None:
    """Return what makes the calls with which graphs are captured on ``where``; None on a device without graphs."""
    return partial(CudaCalls, where) if where.type == "cuda" else None


def _measured_room(
    make: Callable[[int, int], ModelEngine],
    largest: tuple[int, int],
    checkpoint: Checkpoint,
    ready: PreparedModel,
    layout: KvLayout,
    share: GpuShare,
    max_model_len: int | None,
    graph_calls: Callable[[], GraphCalls] | None,
    leader: Leader | None,
) -> int:
    """Return the bytes of KV that steps of the ``largest`` number of tokens and of sequences leave of the GPUs' memory,
    and add a note on how it is divided. ``make``: returns an engine with so many blocks, for so long a context. Raises
    StartError if that is too little."""
    alone, ranks = share.workers == 1, None if leader is None else leader.channel
    blocks = layout.blocks_for(min(largest[0], checkpoint.max_position))
    trial = partial(make, blocks, max_model_len or checkpoint.max_position)
    uses = measure_use(trial, ready.where, *largest, graph_calls, alone, ranks)
    tokens = max_model_len or layout.block_size
    room, note = plan_pools(uses, share, layout.token_bytes, tokens, layout.head_shards)
    ready.notes.append(note)
    return room


def _layout(
    checkpoint: Checkpoint, ready: PreparedModel, dtype: KvDtype, block_size: int, leader: Leader | None
) -> KvLayout:
    """Return the layout of the pool, which the ranks of a tensor-parallel worker have in common."""
    layers, shards = (ready.seen.layers, 1) if leader is None else leader.whole_layers(checkpoint, ready.seen.layers)
    return KvLayout(layers, dtype, block_size, shards)


def _scales(ready: PreparedModel, layout: KvLayout, leader: Leader | None) -> KvScales | None:
    """Return the scales of a pool in fp8, which tensor-parallel ranks find together; None for other pools."""
    if layout.dtype != "fp8":
        return None
    if leader is None:
        return KvScales.for_peaks(ready.seen.peaks)
    return KvScales.for_peaks(whole_peaks(leader.collective, ready.seen.peaks, layout.head_shards, ready.where))


def _check(
    engine: ModelEngine, checkpoint: Checkpoint, ready: PreparedModel, scales: KvScales | None, batch_hint: int
) -> None:
    """Choose how the engine's layers run, note it, and compare what it computes with the probe. Raises StartError if
    that differs, or if a GPU's memory is too small for it beside the pool."""
    with shortage_in_words("to check the model with its KV pool", ready.where, SMALLER_POOL):
        shortened = bool(ready.fused) and engine.shorten(ready.seen.tokens)
        engine.notes += [*ready.layer_notes(batch_hint, shortened), *_scale_notes(scales)]
        memory.keep_freed_memory()
        engine.verify(checkpoint, ready.seen, QUANTISED_TOLERANCE if ready.is_rounded or scales else None)


def _budget(
    checkpoint: Checkpoint,
    dtype: KvDtype,
    block_size: int,
    max_model_len: int | None,
    num_kv_blocks: int | None,
    layers: tuple[LayerLayout, ...],
    room: int,
) -> Budget:
    """Return how many blocks and how long requests ``room`` bytes allow. Raises StartError if these are too few."""
    layout = KvLayout(layers, dtype, block_size)
    return fit(
        layout, checkpoint.max_position, max_model_len, kv_bytes=room, num_kv_blocks=num_kv_blocks,
        limit=checkpoint.position_limit, scaling=checkpoint.scaling,
    )  # fmt: skip


def _check_quantization(quantization: str, machine: Device) -> None:
    """Raise StartError if this worker cannot compute with such weights."""
    if quantization in ROUNDED and machine.gpu is not None:
        raise StartError(
            f"--quantization {quantization} runs on CPUs only", f"this worker computes on {machine.name}", "omit it"
        )


def _most_for_kv(
    checkpoint: Checkpoint, dtype: KvDtype, machine: Device, share: GpuShare, leader: Leader | None
) -> int:
    """Return the most bytes that the KV pool can have, as far as it is known before the model is loaded; of a worker on
    several GPUs, as if all were as free as this one. Raises StartError if the weights do not fit into a GPU."""
    if machine.gpu is None:
        return memory.kv_budget()
    ranks = 1 if leader is None else leader.size
    weights = checkpoint.bytes_in(dtype) // ranks
    return ranks * most_for_kv(machine.gpu.total_bytes, machine.gpu.free_bytes, weights, share)


def _make_engine(
    checkpoint: Checkpoint,
    ready: PreparedModel,
    layout: KvLayout,
    scales: KvScales | None,
    dtype: KvDtype,
    machine: Device,
    attention: Wanted,
    leader: Leader | None,
    blocks: int,
    max_model_len: int,
) -> ModelEngine:
    """Return an engine with a pool of ``blocks`` blocks, whose notes say how it attends. The model attends through the
    engine that was made last."""
    model, where = ready.model, ready.where
    codec = None if scales is None else Fp8Codec(scales.shard(0, layout.head_shards), DTYPES[dtype], where)
    if leader is None:
        store = make_store(layout, blocks, machine, where, codec)
    else:
        store = leader.make_store(layout, blocks, machine, where, codec)
    with shortage_in_words("for the trial of attention kernels", where, SMALLER_POOL):
        chosen = select_backend(store, attention, ready.seen.calls)
    steps = None
    if machine.gpu is not None:
        embedding: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
        steps = DeviceSteps(where, embedding.weight.shape[0], ready.seen.logits.shape[1])
    make = ModelEngine if leader is None else leader.make_engine
    kv = "" if scales is None else f"kv fp8 of {dtype} by {scales.fingerprint}"
    fingerprint = ready.fingerprint(checkpoint, kv)
    engine = make(model, store, chosen.backend, fingerprint, checkpoint.vocab_size, max_model_len, steps)
    engine.notes += chosen.notes
    return engine


def _scale_notes(scales: KvScales | None) -> Iterator[str]:
    if scales is not None:
        count = sum(len(layer.k) + len(layer.v) for layer in scales.layers)
        yield f"KV in fp8: half the memory of bfloat16; {scales.scaled_heads} of {count} scales differ from 1"
