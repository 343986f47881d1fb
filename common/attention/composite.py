"""Attention with one backend for decode rows and another for longer spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.attention.interface import AttentionBackend, Params, Span


@dataclass(slots=True)
class Half:
    """The spans of one backend: its plan for them alone, renumbered from row 0, and the indices of their rows in the
    step (int64)."""

    backend: AttentionBackend
    plan: Any
    rows: torch.Tensor


class CompositeAttention:
    """The backend that gives spans of one row to ``decode`` and the others to ``prefill``."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, device: torch.device) -> None:
        self.prefill, self.decode, self._device = prefill, decode, device
        self.name = f"{prefill.name}+{decode.name}"

    def plan(self, spans: Sequence[Span]) -> list[Half]:
        """Return the halves of a step that have spans."""
        single = [span for span in spans if span.length == 1]
        longer = [span for span in spans if span.length > 1]
        pairs = ((self.prefill, longer), (self.decode, single))
        return [self._half(backend, some) for backend, some in pairs if some]

    def _half(self, backend: AttentionBackend, spans: Sequence[Span]) -> Half:
        rows: list[int] = []
        renumbered = []
        for span in spans:
            renumbered.append(span._replace(row=len(rows)))
            rows += range(span.row, span.row + span.length)
        return Half(backend, backend.plan(renumbered), torch.tensor(rows, device=self._device))

    def attend(self, plan: list[Half], layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        outputs = [half.backend.attend(half.plan, layer, query[half.rows], params) for half in plan]
        if len(plan) == 1:
            return query.new_empty(outputs[0].shape).index_copy_(0, plan[0].rows, outputs[0])
        out = query.new_empty(query.shape[0], *outputs[0].shape[1:])
        for half, rows in zip(plan, outputs, strict=True):
            out.index_copy_(0, half.rows, rows)
        return out
