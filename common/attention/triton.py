"""Attention over block tables in Triton (:mod:`common.kernels.triton`), for GPUs.

Single rows and longer spans have kernels of their own, which run one after the other over the rows of a mixed step. A
step costs one upload, into buffers at fixed addresses, so that the kernels of a decode step can be captured in a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.attention.interface import Params, Span
from common.attention.step_buffer import StepBuffer
from common.kernels.triton.decode import attend_decode
from common.kernels.triton.prefill import attend_prefill
from common.kernels.triton.spans import DecodeRows, PrefillSpans
from common.kv.storage.interface import KvStorage, computed_dtype

MAX_SPLITS = 32
"""Most splits of a sequence: what adding them up costs grows with them."""
PROGRAMS_PER_PROCESSOR = 2
"""Decode programs per multiprocessor that hide each other's waits for memory."""


@dataclass(slots=True)
class TritonPlan:
    """One step's spans in the backend's buffer; valid until the next plan is made."""

    decode: DecodeRows | None
    prefill: PrefillSpans | None


class TritonAttention:
    """The backend for GPUs.

    ``splits`` is the number of parts into which a decode step splits each sequence. By default it follows from the
    number of rows in the step; with a fixed number, a row's result does not depend on how many rows are beside it.
    """

    name = "triton"

    def __init__(self, store: KvStorage, splits: int | None = None) -> None:
        self.store = store
        self._device, self._dtype = store.device, computed_dtype(store)
        self._buffer = StepBuffer(self._device, store.layout.block_size)
        self._fixed_splits = splits
        self._is_fixed = False
        self._programs = PROGRAMS_PER_PROCESSOR * _processors(self._device)
        self._scratch = (torch.empty(0, device=self._device), torch.empty(0, device=self._device))

    def for_graphs(self) -> TritonAttention:
        """Return a backend with buffers of its own, for captured steps: an eager step may move those of this one."""
        return TritonAttention(self.store, self._fixed_splits)

    def reserve(self, rows: int, blocks: int, heads: int) -> None:
        """Make room for decode steps of up to ``rows`` rows of ``blocks`` blocks each, in layers of up to ``heads``
        query heads. From then on no buffer moves, since a captured graph has their addresses: a larger step is a
        ValueError."""
        self._buffer.reserve(rows, blocks)
        v_dim = max(layer.v_dim for layer in self.store.layout.layers)
        self._scratch_for(max(count * self._splits(count, 1) for count in range(1, rows + 1)) * heads, v_dim)
        self._is_fixed = True

    def plan(self, spans: Sequence[Span], rows: int | None = None) -> TritonPlan:
        """Return the plan of a step. With ``rows``, the step has that many rows of one span each, of which those behind
        ``spans`` are padding: they attend to nothing, and their outputs are zero."""
        decode = [span for span in spans if span.length == 1]
        prefill = [span for span in spans if span.length > 1]
        return TritonPlan(*self._buffer.fill(decode, prefill, rows))

    def attend(self, plan: TritonPlan, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        if query.dtype != self._dtype or query.stride(2) != 1:
            query = query.to(self._dtype).contiguous()
        keys, values, codec = self.store.k(layer), self.store.v(layer), self.store.codec
        scales = None if codec is None else codec.scales_of(layer)
        kv_heads, v_dim = values.shape[2:]
        out = query.new_empty(query.shape[0], query.shape[1], v_dim)
        if (rows := plan.decode) is not None:
            count = rows.row_at.shape[0]
            splits = self._splits(count, kv_heads)
            scratch = self._scratch_for(count * query.shape[1] * splits if splits > 1 else 0, v_dim)
            attend_decode(query, keys, values, out, rows, splits, scratch, params, scales)
        if plan.prefill is not None:
            attend_prefill(query, keys, values, out, plan.prefill, params, scales)
        return out

    def _splits(self, rows: int, kv_heads: int) -> int:
        """Return the number of splits that gives all multiprocessors work."""
        if self._fixed_splits is not None:
            return self._fixed_splits
        return max(1, min(MAX_SPLITS, self._programs // (rows * kv_heads)))

    def _scratch_for(self, splits: int, v_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for ``splits`` partial outputs of ``v_dim`` elements and for their sums of weights. All layers
        share it, since they run one after the other."""
        parts, sums = self._scratch
        if parts.shape[0] < splits * v_dim or sums.shape[0] < splits:
            if self._is_fixed:
                raise ValueError(f"{splits} partial outputs are more than graphs have room for")
            parts, sums = (torch.empty(size, device=self._device) for size in (splits * v_dim, splits))
            self._scratch = (parts, sums)
        return self._scratch


def _processors(device: torch.device) -> int:
    """Return the device's multiprocessors; 1 on a CPU, where the interpreter runs one program after the other."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
