"""Attention over block tables in C (:mod:`common.kernels.cpu`), which reads each block once and in place.

One kernel serves prefill chunks and decode rows, all element types, windows, softcaps, sinks and unequal head sizes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.attention.interface import Params, Span
from common.kernels import cpu
from common.kv.storage.tensors import KvStore, native_layer


@dataclass(slots=True)
class NativePlan:
    """One step's spans as a C struct; ``columns`` keeps alive the arrays to which ``spans`` points."""

    spans: cpu.Spans
    columns: list[array[int]]


class NativeAttention:
    """The backend for CPUs on which the C kernels were compiled; RuntimeError if they were not."""

    name = "native"

    def __init__(self, store: KvStore) -> None:
        library = cpu.library()
        if library is None:
            raise RuntimeError(cpu.MISSING)
        self.store = store
        self._library = library
        self._layers: dict[tuple[int, int], tuple[Params, cpu.Layer]] = {}

    def plan(self, spans: Sequence[Span]) -> NativePlan:
        rows, lengths, starts, blocks = zip(*spans, strict=True)
        tables, table_at = array("i"), array("q")
        for each in blocks:
            table_at.append(len(tables))
            tables.extend(each)
        columns = [array("q", rows), array("q", lengths), array("q", starts), table_at, tables]
        return NativePlan(cpu.Spans(*(column.buffer_info()[0] for column in columns), len(spans)), columns)

    def attend(self, plan: NativePlan, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        """Return [T, heads, v_dim] for ``query`` [T, heads, k_dim]. Raises MemoryError if a buffer does not fit."""
        if query.dtype != self.store.dtype or query.stride(2) != 1:
            query = query.to(self.store.dtype).contiguous()
        rows, heads, _ = query.shape
        shape = self.shape(layer, heads, params)
        out = query.new_empty(rows, heads, shape.v_dim)
        failed = self._library.attend(
            ctypes.addressof(shape), ctypes.addressof(plan.spans), query.data_ptr(), out.data_ptr(),
            query.stride(0), query.stride(1), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for attention")
        return out

    def shape(self, layer: int, heads: int, params: Params) -> cpu.Layer:
        """Return the layer's description in C for ``heads`` query heads; it is rebuilt only when ``params`` change."""
        found = self._layers.get((layer, heads))
        if found is not None and _same(found[0], params):
            return found[1]
        made = native_layer(self.store.k(layer), self.store.v(layer))
        made.group = heads // made.kv_heads
        made.scaling, made.window, made.softcap = params.scaling, params.window or 0, params.softcap or 0.0
        if params.sinks is not None:
            made.sinks_tensor = params.sinks.detach().float().contiguous()  # kept alive for the pointer
            made.sinks = made.sinks_tensor.data_ptr()
        self._layers[layer, heads] = params, made
        return made


def _same(one: Params, other: Params) -> bool:
    """Compare parameters; sinks are compared by identity, not by value."""
    return one.sinks is other.sinks and (one.scaling, one.window, one.softcap) == (
        other.scaling,
        other.window,
        other.softcap,
    )
