"""Captures the decode steps of an engine as CUDA graphs (:mod:`common.engine.cuda_graphs`), before it serves.

Graphs need memory of their own: buffers at fixed addresses, what a step computes with, and what CUDA keeps for each
graph. :meth:`Capture.measure` tells how much before the KV pool is made, which gets the rest. If memory is short all
the same, large steps run without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.attention.interface import Params, Rotation, bind
from common.core.errors import StartError
from common.engine import faults
from common.engine.capture_audit import choose_experts
from common.engine.cuda_graphs import KINDS, MAX_ROWS, DecodeGraphs, Slots
from common.engine.graph_calls import GraphCalls
from common.engine.progress import StepProgress, not_reported
from common.engine.rank_graphs import AgreedCalls, CaptureFailed, GraphRanks
from common.model.probe import forward

if TYPE_CHECKING:
    from common.engine.runner import PagedAttention

WITHOUT = "decode steps run without CUDA graphs: "
_ROOM = "lower --gpu-memory-utilization or --max-num-seqs to make room"
DRIVER_BYTES = 4 << 20
"""Memory that CUDA keeps for one graph of a few hundred kernels, where it cannot be measured."""


@dataclass(frozen=True)
class GraphUse:
    """Bytes that the graphs of decode steps of up to ``rows`` rows take; all 0 without graphs."""

    bytes: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Capture:
    """What is captured: decode steps of ``model``, which calls ``attention``, of up to ``rows`` rows and
    ``max_model_len`` tokens of context. All functions are to be called in inference mode, and by all ``ranks`` of a
    tensor-parallel worker at the same time. A rank that lacks memory outside a capture raises StartError, since the
    others cannot know it."""

    model: nn.Module
    attention: PagedAttention
    rows: int
    max_model_len: int
    ranks: GraphRanks | None = None

    def graphs(self, calls: GraphCalls, captured: StepProgress = not_reported) -> tuple[DecodeGraphs | None, str]:
        """Return the captured graphs and a note, or None and a note that says why there are none. If the device's
        memory is too small for all sizes, those of half as many rows are tried; if a step cannot be captured for
        another reason, which may show only with many rows, all run without."""
        if why := self._unusable():
            return None, f"{WITHOUT}{why}"
        most, started, short = min(self.rows, MAX_ROWS), perf_counter(), ""
        while most:
            try:
                graphs, why = self._prepared(calls, most)
                if graphs is None:
                    return None, f"{WITHOUT}{why}"
                graphs.capture(captured)
            except RuntimeError as error:
                self._require_agreed(error)
                if why := _refusal(error):
                    return None, f"{WITHOUT}{why}"
                short = faults.describe(error)
            else:
                if self.ranks is not None:
                    self.ranks.close_first(graphs.close)
                seconds = perf_counter() - started
                where = "" if self.ranks is None else ", the same on all ranks"
                note = f"decode steps of up to {most} rows run as CUDA graphs{where} (captured in {seconds:.1f} s)"
                return graphs, f"{note}; for larger ones there is {short}; {_ROOM}" if short else note
            graphs = None  # frees its memory
            faults.free_cached(self.attention.store.device)
            most //= 2
        return None, f"{WITHOUT}{short}; {_ROOM}"

    def measure(self, calls: GraphCalls, taken: Callable[[], int], driver_bytes: int = 0) -> GraphUse:
        """Return what all graphs would take. Only the two largest sizes are captured, and dropped again: the largest
        shows what all share, the second what each other size adds. ``taken`` returns the bytes that are taken now, and
        ``driver_bytes`` are added for each graph that it does not count. All 0 if a step cannot be captured.
        RuntimeError if memory is too small."""
        if self._unusable():
            return GraphUse()
        before = taken()
        graphs, _ = self._prepared(calls, min(self.rows, MAX_ROWS))
        if graphs is None:
            return GraphUse()
        levels = [before]
        for rows in graphs.sizes[:-3:-1]:
            try:
                graphs.capture_size(rows)
            except RuntimeError as error:
                self._require_agreed(error)
                if _refusal(error):
                    return GraphUse()
                raise
            faults.free_cached(self.attention.store.device)
            levels.append(taken())
        first, more = levels[1] - before, max(0, levels[-1] - levels[1])
        count = len(graphs.sizes)
        total = first + more * (count - 1) + driver_bytes * count * len(KINDS)
        return GraphUse(max(0, total), graphs.sizes[-1])

    def _require_agreed(self, error: RuntimeError) -> None:
        """Raise StartError if only this rank knows of ``error``."""
        if self.ranks is None or isinstance(error, CaptureFailed):
            return
        faults.raise_if_lost(error)
        raise StartError("CUDA graphs cannot be captured", faults.describe(error), f"{_ROOM}, or give --enforce-eager")

    def _unusable(self) -> str:
        """Return why there can be no graphs with this backend and this pool; "" if there can."""
        why = self._unusable_here()
        return why if self.ranks is None else self.ranks.agreed(why)

    def _unusable_here(self) -> str:
        backend: Any = self.attention.decode_backend
        if not hasattr(backend, "for_graphs"):
            return f"attention {backend.name} plans every step anew"
        if not getattr(self.attention.store, "skips_padding", False):
            return "without Triton the pool has no place for padding"
        return ""

    def _prepared(self, calls: GraphCalls, rows: int) -> tuple[DecodeGraphs | None, str]:
        """Return graphs of up to ``rows`` rows that are ready to be captured, or None and why the model cannot be
        captured."""
        store, backend = self.attention.store, self.attention.decode_backend
        placed = _PlacedAttention(store, backend.for_graphs())  # type: ignore[attr-defined]

        def run(ids: torch.Tensor, positions: torch.Tensor, slots: Slots, plan: Any) -> torch.Tensor:
            placed.place(slots, plan)
            bind(self.model, placed)
            try:
                return forward(self.model, ids[None], positions[None], None)
            finally:
                bind(self.model, self.attention)

        config: Any = self.model.config
        if self.ranks is not None:
            calls = AgreedCalls(calls, self.ranks)
        size = store.layout.block_size
        graphs = DecodeGraphs(calls, run, placed.backend, rows, store.device, size, self.ranks)
        graphs.prepare(store.layout.blocks_for(self.max_model_len), config.get_text_config().num_attention_heads)
        if why := choose_experts(self.model, graphs.obstacle):
            return None, why
        return graphs, ""


class _PlacedAttention:
    """What the model's attention modules call in a captured step: rows, slots and plan are those of the graph."""

    def __init__(self, store: Any, backend: Any) -> None:
        self._store, self.backend = store, backend

    def place(self, slots: Slots, plan: Any) -> None:
        self._slots, self._plan = slots, plan

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params
    ) -> torch.Tensor:
        self._store.write(layer, key, value, self._slots)
        out: torch.Tensor = self.backend.attend(self._plan, layer, query, params)
        return out

    def rotated(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        params: Params,
    ) -> torch.Tensor:
        """See :class:`common.attention.interface.RotatingAttention`."""
        self._store.write_rotated(layer, query, key, value, *rotation, self._slots)
        out: torch.Tensor = self.backend.attend(self._plan, layer, query, params)
        return out


def _refusal(error: RuntimeError) -> str:
    """Return why a step could not be captured; "" if only memory was too small. Raises DeviceLost."""
    faults.raise_if_lost(error)
    if faults.is_out_of_memory(error):
        return ""
    return f"capture fails: {str(error).partition(chr(10))[0]}"
