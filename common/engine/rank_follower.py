"""A rank other than 0 of a tensor-parallel worker: it loads its share and does what rank 0 asks for.

It plans nothing and samples nothing. Must not know how it is started or watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Literal, assert_never

import torch

from common.attention.interface import AttentionBackend, bind
from common.attention.registry import AUTO, Wanted, select_backend
from common.checkpoint.files import ROUNDED, Checkpoint
from common.core.ids import BlockId
from common.engine.batch import FlatStep
from common.engine.cuda_graphs import DecodeGraphs
from common.engine.device_steps import uploaded
from common.engine.faults import SMALLER_POOL, sentinel, shortage_in_words, wait_for
from common.engine.gpu_memory import UseMeter, no_room_for_graphs, taken
from common.engine.graph_calls import CudaCalls
from common.engine.graph_capture import Capture, GraphUse
from common.engine.packed_step import unpack, unpack_replay
from common.engine.prepared import FEWER_WEIGHTS, Products, Quantization, fuse_for_gpu, move
from common.engine.prompt_scores import forward_in_slices
from common.engine.rank_graphs import GraphRanks
from common.engine.rank_messages import (
    BeginMeasuring,
    CaptureGraphs,
    ClearBlocks,
    CopyBlocks,
    EndMeasuring,
    Followed,
    MeasureGraphs,
    NewPool,
    Replay,
    Step,
)
from common.engine.rank_pools import rank_store
from common.engine.runner import PagedAttention
from common.engine.staging import UploadStaging
from common.kv.cache import BlockCopy
from common.kv.layout import KvDtype, KvLayout
from common.kv.scales import KvScales
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage
from common.kv.storage.tensors import DTYPES, KvStore
from common.model.collective import Collective
from common.model.fp8 import round_linears
from common.model.gpu_layers import PARTS
from common.model.linears import pack_linears
from common.model.load import detach_from_files
from common.model.parallel import load_share, shard_of, whole_layers, whole_peaks
from common.model.parallel_check import check_split
from common.model.probe import Probe, forward, probe
from common.model.rotary import freeze_rotary
from common.model.round_linears import round_to_groups
from common.platform import memory
from common.platform.device import Device, choose_dtype, probe_cpu


def follow(
    checkpoint: Checkpoint,
    collective: Collective,
    followed: Followed,
    *,
    machine: Device | None = None,
    dtype: KvDtype | Literal["auto"] = "auto",
    max_model_len: int | None = None,
    block_size: int = 16,
    batch_hint: int,
    trust_remote_code: bool = False,
    attention: Wanted = AUTO,
    quantization: Quantization = "none",
    products: Products = "auto",
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    gpu_fusion: Sequence[str] = PARTS,
) -> None:
    """Load this rank's share onto ``machine`` (default: the CPU) as rank 0 does its own, and do what rank 0 asks for
    until it leaves. The arguments must be those of rank 0's :func:`common.engine.loading.load_engine`. StartError if
    the model cannot be served."""
    machine = machine or probe_cpu()
    where = torch.device(machine.address)
    chosen, _ = choose_dtype(dtype, checkpoint.dtype, machine)
    check_split(checkpoint, chosen, collective, trust_remote_code, where)
    model, plan = load_share(checkpoint, chosen, collective, trust_remote_code)
    freeze_rotary(model, max_model_len or checkpoint.max_position)
    with shortage_in_words("for the weights", where, FEWER_WEIGHTS):
        move(model, where)
        seen = probe(model, checkpoint)
        if quantization == "fp8":
            round_linears(model, collective)
        elif machine.gpu is not None:
            fuse_for_gpu(model, gpu_fusion, where, collective)
    if machine.gpu is None:
        if quantization in ROUNDED:
            round_to_groups(model, ROUNDED[quantization], exact=products == "exact")
        pack_linears(model, batch_hint)
    detach_from_files(model)
    memory.keep_freed_memory()
    whole, shards = whole_layers(checkpoint, plan, seen.layers)
    shard, codec = shard_of(plan, shards), None
    if kv_cache_dtype == "fp8":
        scales = KvScales.for_peaks(whole_peaks(collective, seen.peaks, shards, where))
        codec = Fp8Codec(scales.shard(shard, shards), DTYPES[chosen], where)
    layout = KvLayout(whole, chosen if codec is None else "fp8", block_size, shards)
    choose = partial(_backend, seen, attention)
    ranks = GraphRanks(collective, followed.settle)
    with closing(_Follower(model, followed, layout, shard, codec, machine, choose, ranks)) as follower:
        follower.run()


def _backend(seen: Probe, attention: Wanted, store: KvStorage) -> AttentionBackend:
    return select_backend(store, attention, seen.calls).backend


class _Follower:
    """A rank other than 0, with a loaded share of the model: it has the ``shard`` of a pool of ``layout``, in fp8 with
    ``codec``, and ``choose`` returns its attention backend for a store. ``ranks``: what captured steps exchange."""

    def __init__(
        self,
        model: torch.nn.Module,
        followed: Followed,
        layout: KvLayout,
        shard: int,
        codec: Fp8Codec | None,
        machine: Device,
        choose: Callable[[KvStorage], AttentionBackend],
        ranks: GraphRanks,
    ) -> None:
        self._model, self._followed, self._layout, self._shard = model, followed, layout, shard
        self._codec = codec
        self._where, self._choose = torch.device(machine.address), choose
        self._staging = None if machine.gpu is None else UploadStaging(self._where)
        self._store: KvStorage | None = None
        self._meter: UseMeter | None = None
        self._ranks = ranks
        self._graphs: DecodeGraphs | None = None
        self._graph_use = GraphUse()

    @torch.inference_mode()
    def run(self) -> None:
        """Do what rank 0 asks for until it leaves."""
        self._followed.watch(sentinel(self._where))
        for message in self._followed.messages():
            match message:
                case Step(packed):
                    self._compute(unpack(packed))
                case Replay(packed):
                    assert self._graphs is not None, "rank 0 has graphs only if all ranks have"
                    self._graphs.repeat(*unpack_replay(packed))
                case NewPool():
                    self._open(message)
                case CopyBlocks(copies):
                    self._pool.copy_blocks(BlockCopy(BlockId(source), BlockId(target)) for source, target in copies)
                    wait_for(self._where)
                    self._followed.copied()
                case ClearBlocks(blocks):
                    self._pool.clear(blocks)
                case BeginMeasuring():
                    self._meter = UseMeter(self._where)
                    self._meter.begin()
                case MeasureGraphs(rows, max_model_len, driver_bytes):
                    assert self._meter is not None
                    self._meter.end()
                    with no_room_for_graphs(rows, self._where):
                        calls, memory_taken = CudaCalls(self._where), partial(taken, self._where, driver_bytes)
                        capture = self._capture(rows, max_model_len)
                        self._graph_use = capture.measure(calls, memory_taken, driver_bytes)
                case CaptureGraphs(rows, max_model_len):
                    capture = self._capture(rows, max_model_len)
                    self._graphs, _ = capture.graphs(CudaCalls(self._where))
                case EndMeasuring():
                    assert self._meter is not None
                    self.close()
                    self._meter.end()
                    self._followed.report(self._meter.read(0, self._graph_use))  # rank 0 knows the rows
                case _:
                    assert_never(message)

    @property
    def _pool(self) -> KvStorage:
        assert self._store is not None, "rank 0 makes a pool first"
        return self._store

    def _capture(self, rows: int, max_model_len: int) -> Capture:
        return Capture(self._model, self._attention, rows, max_model_len, self._ranks)

    def _compute(self, step: FlatStep) -> None:
        if self._staging is not None:
            step = uploaded(step, self._staging)
        self._attention.begin(step)
        if step.scored:
            for _ in forward_in_slices(self._model, step)[1]:
                pass  # rank 0 alone needs the logits
            return
        forward(self._model, step.tensor("ids")[None], step.tensor("positions")[None], step.tensor("kept"))

    def _open(self, new: NewPool) -> None:
        self.close()
        slab = None
        if new.descriptor is None:
            self._store, slab = rank_store(self._layout, new.blocks, self._where, self._codec)
        else:
            joined = KvMemory.join(new.descriptor, self._layout, new.blocks)
            self._store = KvStore(joined, self._shard, self._codec)
        with shortage_in_words("for the trial of attention kernels", self._where, SMALLER_POOL):
            self._attention = PagedAttention(self._store, self._choose(self._store))
        bind(self._model, self._attention)
        self._followed.ready(slab)

    def close(self) -> None:
        """Free the graphs and the pool, or this rank's part of it, once no step uses it any more."""
        if self._store is not None:
            wait_for(self._where)
            self._graphs = None
            self._store.close()
            self._store = None
