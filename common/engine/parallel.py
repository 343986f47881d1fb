"""The engine of a tensor-parallel worker: rank 0 plans and samples, and all ranks compute the same steps.

    rank 0      step ──► columns to every rank ──► forward ──► sample
    rank 1..    wait for columns ────────────────► forward ──► wait again

Ranks meet in the sums behind each row-wise linear layer. On a CPU they have one KV pool in common, in which each writes
the heads that it has. On GPUs each has a slab with its heads (:mod:`common.engine.rank_pools`), and all repeat the same
graphs of decode steps (:mod:`common.engine.rank_graphs`). Must not know how ranks are started or watched, nor what the
other ranks do (:mod:`common.engine.rank_follower`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from common.attention.interface import AttentionBackend, bind
from common.checkpoint.files import Checkpoint
from common.core.errors import StartError
from common.engine import faults
from common.engine.batch import FlatStep
from common.engine.graph_calls import GraphCalls
from common.engine.graph_capture import Capture, GraphUse
from common.engine.packed_step import pack
from common.engine.progress import StepProgress, not_reported
from common.engine.rank_graphs import GraphRanks
from common.engine.rank_messages import Channel
from common.engine.rank_pools import leading_store
from common.engine.runner import ModelEngine, PagedAttention
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage
from common.kv.storage.tensors import KvStore
from common.model.collective import Collective
from common.model.parallel import load_share, whole_layers
from common.model.parallel_check import check_split
from common.platform.device import Device

_OUT_OF_STEP = "the worker ends, since its ranks are out of step"
_TOO_LARGE = f"lower --max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization; {_OUT_OF_STEP}"


class _LateAttention(PagedAttention):
    """Announces a layer when every rank has written its heads, which is known at the next sum behind it."""

    written = 0
    """Number of layers of this step whose keys and values this rank has written."""

    def begin(self, step: FlatStep) -> Any:
        self.written = 0
        return super().begin(step)

    def wrote(self, layer: int) -> None:
        self.written = layer + 1

    def announce_written(self) -> None:
        """Announce all layers written so far; called when every rank has come as far as this one."""
        for layer in range(self.stored, self.written):
            self.announce(layer)


class Leader:
    """Rank 0 of a tensor-parallel worker: how its engine loads a share and reaches the other ranks."""

    def __init__(self, collective: Collective, channel: Channel) -> None:
        self.collective, self.channel = collective, channel

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.collective.size

    def load(self, checkpoint: Checkpoint, dtype: str, trust_remote_code: bool, where: torch.device) -> torch.nn.Module:
        """Return this rank's share of the model, as :func:`common.model.parallel.load_share`, once the split was
        checked on ``where``."""
        self.note = check_split(checkpoint, dtype, self.collective, trust_remote_code, where)
        model, self.plan = load_share(checkpoint, dtype, self.collective, trust_remote_code)
        return model

    def whole_layers(
        self, checkpoint: Checkpoint, layers: tuple[LayerLayout, ...]
    ) -> tuple[tuple[LayerLayout, ...], int]:
        """Return the KV shapes of all ranks together and the pool's number of shards."""
        return whole_layers(checkpoint, self.plan, layers)

    def make_store(
        self, layout: KvLayout, blocks: int, machine: Device, where: torch.device, codec: Fp8Codec | None
    ) -> KvStorage:
        """Return rank 0's share of a pool of which every rank has its own, in fp8 with ``codec``, which is that of rank
        0's heads. StartError if a GPU has too little memory, or cannot reach that of another."""
        if machine.gpu is None:
            memory = KvMemory(layout, blocks, lambda descriptor: self.channel.share_pool(descriptor, blocks))
            return KvStore(memory, codec=codec)
        return leading_store(layout, blocks, where, self.channel, codec)

    def make_engine(
        self, model: torch.nn.Module, store: KvStorage, backend: AttentionBackend, *rest: Any
    ) -> ModelEngine:
        """Return the engine of rank 0; the arguments are those of :class:`common.engine.runner.ModelEngine`."""
        return LeadingEngine(self, model, store, backend, *rest)


class LeadingEngine(ModelEngine):
    """The engine of rank 0. A step that fails on one rank only leaves the ranks out of step, so it ends the worker: a
    StartError, with the reason in words."""

    def __init__(self, leader: Leader, model: torch.nn.Module, store: KvStorage, backend: AttentionBackend, *rest: Any):
        super().__init__(model, store, backend, *rest)
        self._leader = leader
        self._attention = late = _LateAttention(store, backend)
        bind(model, late)
        leader.collective.after_sum = late.announce_written
        shards, size = self.layout.head_shards, leader.collective.size
        heads = f"each with 1/{shards} of the KV heads" if shards > 1 else "each with all KV heads"
        where = "GPUs" if self._device_steps is not None else "ranks"
        fusion = "" if self._device_steps is not None else "layers are not fused; "
        self.notes.append(f"tensor parallel: {size} {where}, {heads}; {fusion}{leader.note}")

    def capture_graphs(self, calls: GraphCalls, captured: StepProgress = not_reported) -> None:
        self._leader.channel.capture_graphs(self.max_num_seqs, self.max_model_len)
        super().capture_graphs(calls, captured)

    def measure_graphs(self, calls: GraphCalls, taken: Callable[[], int], driver_bytes: int) -> GraphUse:
        self._leader.channel.measure_graphs(self.max_num_seqs, self.max_model_len, driver_bytes)
        return super().measure_graphs(calls, taken, driver_bytes)

    @property
    def _capture(self) -> Capture:
        channel = self._leader.channel
        ranks = GraphRanks(self._leader.collective, channel.settle, channel.share_replay)
        return replace(super()._capture, ranks=ranks)

    def _logits(self, step: FlatStep, most: int = 0) -> Any:
        self._leader.channel.share_step(pack(step))
        try:
            return super()._logits(step, most)
        except Exception as error:  # other ranks wait in the middle of the step
            faults.raise_if_lost(error)
            raise StartError(
                f"rank 0 of {self._leader.size} failed in a step",
                f"{type(error).__name__}: {error}",
                _TOO_LARGE if faults.is_out_of_memory(error) else _OUT_OF_STEP,
            ) from error
