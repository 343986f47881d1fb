"""The reference implementation: attention over block tables, one sequence at a time, in float32 and plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.attention.interface import Params, Span
from common.kv.storage.interface import KvStorage


def attend_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, params: Params) -> torch.Tensor:
    """Return the causal attention, float32 [L, heads, v_dim], of ``query`` [L, heads, k_dim] at positions ``[start,
    start + L)`` over one sequence's ``key`` [S, kv_heads, k_dim] and ``value`` [S, kv_heads, v_dim] from position 0."""
    heads, rows, group = query.shape[1], query.shape[0], query.shape[1] // key.shape[1]
    q = query.float()
    k = key.float().repeat_interleave(group, dim=1)
    v = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * params.scaling
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    row = start + torch.arange(rows, device=q.device)[:, None]
    column = torch.arange(key.shape[0], device=q.device)[None, :]
    visible = column <= row
    if params.window is not None:
        visible &= column > row - params.window
    scores = scores.masked_fill(~visible, -torch.inf)
    if params.sinks is not None:
        sink = params.sinks.float().view(heads, 1, 1).expand(heads, rows, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).contiguous()  # models may call view on it


class TorchReference:
    """The reference implementation as a backend."""

    name = "torch"

    def __init__(self, store: KvStorage) -> None:
        self.store = store

    def plan(self, spans: Sequence[Span]) -> Sequence[Span]:
        return spans

    def attend(self, plan: Sequence[Span], layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        outputs = []
        for span in plan:
            key, value = self.store.gather(layer, torch.tensor(span.blocks, device=query.device))
            rows = query[span.row : span.row + span.length]
            outputs.append(attend_one(rows, key[: span.end], value[: span.end], span.start, params))
        return torch.cat(outputs).to(query.dtype)
