"""Captured graphs on a device that computes late, on a CPU.

A graph repeats the Python code that was captured, on the same tensors. Uploads, replays and downloads wait in a queue
until the host waits for an event, or before, as ``eager`` decides: a pinned buffer that is written too early, or an
input that depends on Python, gives wrong tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from common.attention.interface import Params, Span
from common.attention.torch_reference import TorchReference, attend_one


def _opaque() -> AbstractContextManager[object]:
    """Hide a block from the capture audit: on a GPU it is one kernel."""
    return nullcontext() if _get_current_dispatch_mode() is None else _pop_mode_temporarily()


class LateCalls:
    """Implements :class:`common.engine.graph_calls.GraphCalls`. ``eager`` says, after each call, whether the device has
    caught up."""

    def __init__(self, eager: Callable[[], bool] = lambda: False) -> None:
        self.eager = eager
        self.queue: deque[Callable[[], object]] = deque()
        self.tried = self.captured = self.done = self._queued = 0
        self.replayed: list[int] = []
        """The graphs that were repeated, by how many captures were tried before."""
        self.refuses: Callable[[], str] = lambda: ""
        """Returns why the next capture fails, or ""."""

    @property
    def replays(self) -> int:
        """How often graphs were repeated."""
        return len(self.replayed)

    def pinned(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert torch.is_inference_mode_enabled() or not target.is_inference(), "torch refuses to write it"
        self.put(lambda: target.copy_(source))

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        number, self.tried = self.tried, self.tried + 1
        if why := self.refuses():
            raise RuntimeError(why)
        self.captured += 1

        def replay() -> None:
            self.replayed.append(number)
            self.put(run)

        return replay

    def event(self) -> _Event:
        return _Event(self, self._queued)

    def put(self, work: Callable[[], object]) -> None:
        """Queue ``work``."""
        self._queued += 1
        self.queue.append(work)
        if self.eager():
            self.catch_up(self._queued)

    def catch_up(self, until: int) -> None:
        """Do the first ``until`` pieces of work of all that were queued."""
        while self.done < until:
            self.done += 1
            with torch.inference_mode():
                self.queue.popleft()()


@dataclass
class _Event:
    calls: LateCalls
    until: int

    def synchronize(self) -> None:
        self.calls.catch_up(self.until)


@dataclass
class _Plan:
    """A step's plan at fixed addresses: ``lengths`` [rows], ``tables`` [rows, blocks]."""

    lengths: torch.Tensor
    tables: torch.Tensor


class LateAttention(TorchReference):
    """The reference backend with plans at fixed addresses: a graph's plan is read when the graph runs."""

    def __init__(self, store: Any, calls: LateCalls) -> None:
        super().__init__(store)
        self._calls = calls
        self._reserved: tuple[int, int] | None = None

    def for_graphs(self) -> LateAttention:
        return LateAttention(self.store, self._calls)

    def reserve(self, rows: int, blocks: int, heads: int) -> None:
        self._reserved = rows, blocks
        self._lengths = torch.zeros(rows, dtype=torch.int64)
        self._tables = torch.zeros(rows, blocks, dtype=torch.int64)

    def plan(self, spans: Sequence[Span], rows: int | None = None) -> Any:
        if rows is None:
            if self._reserved is not None:
                self.reserve(*self._reserved, 0)  # a large step moves the buffers away from what graphs have captured
            return super().plan(spans)
        lengths, tables = self._calls.pinned(rows), self._calls.pinned(rows, self._tables.shape[1])
        for row, span in enumerate(spans):
            lengths[row] = span.end
            tables[row, : len(span.blocks)] = torch.tensor(list(span.blocks))
        self._calls.copy(self._lengths[:rows], lengths)
        self._calls.copy(self._tables[:rows], tables)
        return _Plan(self._lengths[:rows], self._tables[:rows])

    def attend(self, plan: Any, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        if not isinstance(plan, _Plan):
            return super().attend(plan, layer, query, params)
        with _opaque():
            return self._attend_rows(plan, layer, query, params)

    def _attend_rows(self, plan: _Plan, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        out = query.new_zeros(query.shape[0], query.shape[1], self.store.v(layer).shape[-1])
        for row, (length, table) in enumerate(zip(plan.lengths.tolist(), plan.tables, strict=True)):
            if length:
                key, value = self.store.gather(layer, table[: -(-length // self.store.layout.block_size)])
                out[row] = attend_one(query[row : row + 1], key[:length], value[:length], length - 1, params)[0]
        return out


class PaddedStore:
    """The KV store of a CPU, which stores nothing for rows of block -1, as the kernels of a GPU do."""

    skips_padding = True

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        with _opaque():
            real = slots[0] >= 0
            blocks, offsets = (column[real].contiguous() for column in slots)
            self._store.write(layer, key[real].contiguous(), value[real].contiguous(), (blocks, offsets))
