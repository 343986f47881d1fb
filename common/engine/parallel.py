"""The engine of a tensor-parallel worker: rank 0 plans and samples, and all ranks compute the same steps.

    rank 0      step ──► columns to every rank ──► forward ──► sample
    rank 1..    wait for columns ────────────────► forward ──► wait again

Ranks meet in the sums behind each row-wise linear layer. On a CPU they have one KV pool in common, in which each writes
the heads that it has. Must not know how ranks are started or watched.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

from common.attention.interface import AttentionBackend, Params, Span, bind
from common.attention.registry import AUTO, Wanted, select_backend
from common.checkpoint.files import Checkpoint
from common.core.errors import StartError
from common.engine.batch import FlatStep
from common.engine.runner import ModelEngine, PagedAttention
from common.kv.layout import KvDtype, KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage
from common.kv.storage.tensors import KvStore
from common.model.collective import Collective
from common.model.linears import pack_linears
from common.model.load import detach_from_files
from common.model.parallel import Plan, load_share, shard_of, whole_layers
from common.model.parallel_check import check_split
from common.model.probe import forward, probe
from common.model.rotary import freeze_rotary
from common.platform import memory
from common.platform.device import Device, choose_dtype, probe_cpu

_HEADER = 3
"""Numbers before the columns of a packed step: rows, kept rows, spans."""
_SPAN = 4
"""Numbers per span: row, length, start, number of blocks."""


class Channel(Protocol):
    """Rank 0's way to the other ranks."""

    def share_pool(self, descriptor: int, blocks: int) -> None:
        """Give every rank the pool's memory; return when all have mapped it."""

    def share_step(self, columns: Sequence[array[int]]) -> None:
        """Send one step to every rank."""


class Followed(Protocol):
    """Another rank's way to rank 0."""

    def pool(self) -> tuple[int, int]:
        """Wait for the pool; return its descriptor, owned by the caller, and its number of blocks."""

    def mapped(self) -> None:
        """Report that the pool is mapped, and that this rank waits for steps."""

    def steps(self) -> Iterator[memoryview]:
        """Yield each step as packed, valid until the next; end when rank 0 leaves."""


# -- a step on its way ------------------------------------------------------------------------------------------------


def pack(step: FlatStep) -> list[array[int]]:
    """Return ``step`` as int64 columns: header, ids, positions, blocks, offsets, kept, spans, block tables."""
    spans, tables = array("q"), array("q")
    for span in step.spans:
        spans.extend((span.row, span.length, span.start, len(span.blocks)))
        tables.extend(iter(span.blocks))  # they may be an array of another kind
    header = array("q", (len(step.ids), len(step.kept), len(step.spans)))
    return [header, step.ids, step.positions, step.blocks, step.offsets, step.kept, spans, tables]


def unpack(data: memoryview) -> FlatStep:
    """Invert :func:`pack` from the bytes of all columns; ``sampled`` stays empty, since only rank 0 samples."""
    numbers = array("q")
    numbers.frombytes(data)
    rows, kept, spans = numbers[:_HEADER]
    bounds = [_HEADER]
    for size in (rows, rows, rows, rows, kept, _SPAN * spans):
        bounds.append(bounds[-1] + size)
    ids, positions, blocks, offsets, last_rows, described = (numbers[first:last] for first, last in pairwise(bounds))
    at, found = bounds[-1], list[Span]()
    for row, length, start, count in zip(*(described[each::_SPAN] for each in range(_SPAN)), strict=True):
        found.append(Span(row, length, start, array("i", numbers[at : at + count])))
        at += count
    return FlatStep(ids, positions, blocks, offsets, last_rows, found, [])


# -- rank 0 -----------------------------------------------------------------------------------------------------------


class _LateAttention(PagedAttention):
    """Announces a layer when every rank has written its heads, which is known at the next sum behind it."""

    written = 0
    """Number of layers of this step whose keys and values this rank has written."""

    def begin(self, step: FlatStep) -> Any:
        self.written = 0
        return super().begin(step)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params
    ) -> torch.Tensor:
        self.store.write(layer, key, value, (self._step.tensor("blocks"), self._step.tensor("offsets")))
        self.written = layer + 1
        return self.backend.attend(self._plan, layer, query, params)

    def announce_written(self) -> None:
        """Announce all layers written so far; called when every rank has come as far as this one."""
        for layer in range(self.stored, self.written):
            self.announce(layer)


class Leader:
    """Rank 0 of a tensor-parallel worker: how its engine loads a share and reaches the other ranks."""

    def __init__(self, collective: Collective, channel: Channel) -> None:
        self.collective, self.channel = collective, channel

    def check(self, machine: Device) -> None:
        """Raise StartError unless the ranks can compute on ``machine``."""
        if machine.gpu is not None:
            raise StartError(
                "--tensor-parallel-size works on CPUs only so far",
                f"this worker computes on {machine.name}, and on GPUs each rank needs a KV pool of its own",
                "give --tensor-parallel-size 1, or --device cpu",
            )

    def load(self, checkpoint: Checkpoint, dtype: str, trust_remote_code: bool) -> torch.nn.Module:
        """Return this rank's share of the model, as :func:`common.model.parallel.load_share`."""
        self.note = check_split(checkpoint, dtype, self.collective, trust_remote_code)
        model, self.plan = load_share(checkpoint, dtype, self.collective, trust_remote_code)
        return model

    def whole_layers(
        self, checkpoint: Checkpoint, layers: tuple[LayerLayout, ...]
    ) -> tuple[tuple[LayerLayout, ...], int]:
        """Return the KV shapes of all ranks together and the pool's number of shards."""
        return whole_layers(checkpoint, self.plan, layers)

    def make_store(self, layout: KvLayout, blocks: int) -> KvStore:
        """Return rank 0's share of a pool that every rank has mapped."""
        return KvStore(KvMemory(layout, blocks, lambda descriptor: self.channel.share_pool(descriptor, blocks)))

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
        self.notes.append(f"tensor parallel: {size} ranks, {heads}; layers are not fused; {leader.note}")

    def _logits(self, step: FlatStep) -> tuple[torch.Tensor, list[int] | None]:
        self._leader.channel.share_step(pack(step))
        try:
            return super()._logits(step)
        except Exception as error:  # other ranks wait in the middle of the step
            raise StartError(
                f"rank 0 of {self._leader.collective.size} failed in a step",
                f"{type(error).__name__}: {error}",
                "the worker ends, since its ranks are out of step",
            ) from error


# -- the other ranks --------------------------------------------------------------------------------------------------


def follow(
    checkpoint: Checkpoint,
    collective: Collective,
    followed: Followed,
    *,
    dtype: KvDtype | Literal["auto"] = "auto",
    max_model_len: int | None = None,
    block_size: int = 16,
    batch_hint: int,
    trust_remote_code: bool = False,
    attention: Wanted = AUTO,
    quantization: Literal["none", "int8", "fp8"] = "none",
) -> None:
    """Load this rank's share as rank 0 does its own, and compute every step that rank 0 sends, until it leaves. The
    arguments must be those of rank 0's :func:`common.engine.loading.load_engine`. StartError if the model cannot be
    served."""
    chosen, _ = choose_dtype(dtype, checkpoint.dtype, probe_cpu())
    check_split(checkpoint, chosen, collective, trust_remote_code)
    model, plan = load_share(checkpoint, chosen, collective, trust_remote_code)
    freeze_rotary(model, max_model_len or checkpoint.max_position)
    seen = probe(model, checkpoint)
    pack_linears(model, batch_hint, quantization == "int8")
    detach_from_files(model)
    memory.keep_freed_memory()
    store = _join_pool(checkpoint, plan, seen.layers, chosen, block_size, followed)
    try:
        paged = PagedAttention(store, select_backend(store, attention, seen.calls).backend)
        followed.mapped()
        bind(model, paged)
        _compute(model, paged, followed)
    finally:
        store.close()


@torch.inference_mode()
def _compute(model: torch.nn.Module, attention: PagedAttention, followed: Followed) -> None:
    for packed in followed.steps():
        step = unpack(packed)
        attention.begin(step)
        forward(model, step.tensor("ids")[None], step.tensor("positions")[None], step.tensor("kept"))


def _join_pool(
    checkpoint: Checkpoint,
    plan: Plan,
    layers: tuple[LayerLayout, ...],
    dtype: KvDtype,
    block_size: int,
    followed: Followed,
) -> KvStore:
    whole, shards = whole_layers(checkpoint, plan, layers)
    descriptor, blocks = followed.pool()
    pool = KvMemory.join(descriptor, KvLayout(whole, dtype, block_size, shards), blocks)
    return KvStore(pool, shard_of(plan, shards))
