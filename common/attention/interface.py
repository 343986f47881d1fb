"""The interface of attention backends, and the adapter that transformers calls.

A step is one flat row of T tokens made of *spans*: consecutive positions of one sequence. A backend plans once per step
(block gathers, masks, grouping) and is then called once per layer with the queries of all rows; by then the keys and
values of these rows are in the pool. For each span it reads positions ``[0, end)`` of that sequence and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

ATTENTION = "tandem_paged"
"""The name under which our function is registered with transformers."""


class Span(NamedTuple):
    """Rows ``[row, row + length)`` of the step are positions ``[start, start + length)`` of one sequence; the block ids
    ``blocks`` hold its positions ``[0, end)``."""

    row: int
    length: int
    start: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        """Position after the last one of the span."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters of one layer's attention beside q, k and v.

    ``scaling``: factor of the scores. ``window``: a row sees itself and the ``window - 1`` positions before it.
    ``softcap``: scores become ``softcap * tanh(score / softcap)``. ``sinks`` [heads], any float dtype: one extra logit
    per head that takes part in the softmax but has no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class LayerCall(NamedTuple):
    """How a model calls the attention of one layer: with how many query heads, and which parameters."""

    heads: int
    params: Params


class AttentionBackend(Protocol):
    """Attention over block tables for any mix of prefill chunks and decode steps."""

    name: str

    def plan(self, spans: Sequence[Span]) -> Any:
        """Return what all layers of one step share; called once per step."""

    def attend(self, plan: Any, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        """Return the outputs [T, heads, v_dim] for ``query`` [T, heads, k_dim], in the query's dtype, which is the
        pool's."""


class Rotation(NamedTuple):
    """What is still to be done to a layer's queries and keys: the rotary embedding by ``angles`` (cosines and sines [T,
    k_dim]), and before it the RMS norm of each head if ``norms`` are given: the weights [k_dim] of queries and of keys,
    and their epsilon."""

    angles: tuple[torch.Tensor, torch.Tensor]
    norms: tuple[torch.Tensor, torch.Tensor, float] | None


class LayerAttention(Protocol):
    """What a model's attention modules call, with one layer's queries, keys and values of one flat row."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params
    ) -> torch.Tensor:
        """Return [T, heads, v_dim], in the query's dtype, for ``query`` [T, heads, k_dim], ``key`` [T, kv_heads, k_dim]
        and ``value`` [T, kv_heads, v_dim]."""


class RotatingAttention(LayerAttention, Protocol):
    """A :class:`LayerAttention` that can rotate by itself, in the kernel that stores keys and values."""

    def rotated(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        params: Params,
    ) -> torch.Tensor:
        """Return what calling it with ``query`` and ``key`` after ``rotation`` returns. ``query`` and ``key`` are
        scratch afterwards."""


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
    """The attention function that transformers calls: ``query`` [1, heads, T, k_dim], ``key`` [1, kv_heads, T, k_dim]
    and ``value`` [1, kv_heads, T, v_dim] to [1, T, heads, v_dim], without attention weights.

    It calls the :class:`LayerAttention` that :func:`bind` stored on the module, so two models in one process never
    share state.
    """
    params = Params(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    attention: LayerAttention = module.__dict__["tandem_attention"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), params)
    return out.unsqueeze(0), None


def bind(model: torch.nn.Module, attention: LayerAttention) -> None:
    """Make every attention module of ``model`` call ``attention``."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.__dict__["tandem_attention"] = attention
