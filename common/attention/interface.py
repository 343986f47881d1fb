"""What an attention backend promises, and the seam to transformers.

A step is one flat row of T tokens made of *spans*: consecutive positions of one sequence. A backend plans once per step
(block gathers, masks, grouping) and is then called once per layer with the queries of all rows; by then the keys and
values of these rows are in the pool. It reads positions ``[0, end)`` of a span's own sequence and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

ATTENTION = "tandem_paged"
"""The name under which transformers finds our function."""


class Span(NamedTuple):
    """Rows ``[row, row + length)`` of the step are positions ``[start, start + length)`` of one sequence, whose
    positions ``[0, end)`` lie in ``blocks``."""

    row: int
    length: int
    start: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Params:
    """What a layer asks of attention beside q, k and v.

    ``window``: a row sees itself and the ``window - 1`` positions before it; ``softcap``: scores become
    ``softcap * tanh(score / softcap)``; ``sinks`` [heads]: one more logit per head that takes weight and gives nothing.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Attention over block tables for any mix of prefill chunks and decode steps."""

    name: str

    def plan(self, spans: Sequence[Span]) -> Any:
        """Whatever one step's layers share; made once per step."""

    def attend(self, plan: Any, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        """``query`` [T, heads, k_dim] to outputs [T, heads, v_dim], in the query's dtype."""


class LayerAttention(Protocol):
    """What a model's attention modules call: queries, keys and values of one layer for one flat row."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params
    ) -> torch.Tensor:
        """``query`` [T, heads, k_dim], ``key`` [T, kv_heads, k_dim] and ``value`` [T, kv_heads, v_dim] to
        [T, heads, v_dim]."""


def from_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: [1, heads, T, dim] in, [1, T, heads, v_dim] out.

    It hands over to the :class:`LayerAttention` that :func:`bind` put on the module, so two models in one process never
    share state.
    """
    params = Params(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    attention: LayerAttention = module.__dict__["tandem_attention"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), params)
    return out.unsqueeze(0), None


def bind(model: torch.nn.Module, attention: LayerAttention) -> None:
    """Makes every attention module of ``model`` call ``attention``."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.__dict__["tandem_attention"] = attention
