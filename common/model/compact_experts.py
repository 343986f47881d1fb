"""The experts of a mixture whose weights stay quantized: two linear layers per expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from common.model.compact import ACTIVATIONS, CompactLinear


class CompactExperts(nn.Module):
    """Replaces the module ``experts`` of transformers, which keeps the gate's function and the biases. ``gate_up`` and
    ``down``: the projections of each expert. A usual gate is computed with its projection."""

    def __init__(self, experts: Any, gate_up: Sequence[CompactLinear], down: Sequence[CompactLinear]) -> None:
        super().__init__()
        activation = _activation(experts, gate_up)
        self.is_gated = activation is not None
        """Whether ``gate_up`` apply the gate."""
        layers = gate_up if activation is None else [_gated(each, activation) for each in gate_up]
        self.experts, self.gate_up, self.down = experts, nn.ModuleList(layers), nn.ModuleList(down)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, hidden] for ``hidden_states`` [T, hidden] and the router's choice: indices and weights of k
        experts per token, [T, k] each. An index beyond the last expert chooses none. Sums are in float32, in the order
        of the experts."""
        chosen, order = top_k_index.flatten().sort(stable=True)
        spans = list(_spans(chosen.tolist(), len(self.down)))
        out = torch.zeros(hidden_states.shape, device=hidden_states.device)
        if not spans:
            return out.to(hidden_states.dtype)
        order = order[: spans[-1][2]]
        rows = order // top_k_index.shape[1]
        inputs, weights = hidden_states[rows], top_k_weights.flatten()[order].float()
        parts = torch.cat([self._one(expert, inputs[first:last]) for expert, first, last in spans])
        return out.index_add_(0, rows, parts.float() * weights[:, None]).to(hidden_states.dtype)

    def _one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of one expert, [rows, hidden] for ``x`` [rows, hidden]."""
        gate_up, down = self.gate_up[expert], self.down[expert]
        assert isinstance(gate_up, CompactLinear) and isinstance(down, CompactLinear)
        first = gate_up.rows(x)
        if self.is_gated:
            return down.rows(first)
        if self.experts.has_bias:
            first = first + self.experts.gate_up_proj_bias[expert]
        out = down.rows(self.experts._apply_gate(first))
        return out + self.experts.down_proj_bias[expert] if self.experts.has_bias else out


def _spans(chosen: Sequence[int], experts: int) -> Iterator[tuple[int, int, int]]:
    """Yield each expert in the sorted list ``chosen``, and the positions [first, last) that it has there."""
    first = 0
    for expert, found in groupby(chosen):
        last = first + len(list(found))
        if expert < experts:
            yield expert, first, last
        first = last


def _activation(experts: Any, gate_up: Sequence[CompactLinear]) -> str | None:
    """Return the activation with which ``gate_up`` can apply the gate; None if transformers' code has to."""
    from transformers.activations import ACT2FN
    from transformers.integrations import moe

    apply_gate = getattr(type(experts), "_apply_gate", None)
    if experts.has_bias or apply_gate is not getattr(moe, "_default_apply_gate", ""):
        return None
    if any(layer.activation or len(layer.parts) > 2 or layer.out_features % 32 for layer in gate_up):
        return None
    return next((name for name in ACTIVATIONS if type(ACT2FN[name]) is type(experts.act_fn)), None)


def _gated(layer: CompactLinear, activation: str) -> CompactLinear:
    """Return ``layer``, whose rows are those of a gate and of the values, with an ``activation``; it shares weights."""
    dtype, exact = layer.weight.dtype, layer.exact
    if len(layer.parts) == 1:
        return CompactLinear(layer.parts[0], layer.bias, dtype, exact=exact, activation=activation)
    return CompactLinear.joined(layer.parts, layer.biases, dtype, exact=exact, activation=activation)


def takes_compact(module: Any) -> bool:
    """Return whether ``module`` holds experts as transformers' common functions compute them, with a gate."""
    usual = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    return bool(usual) and {"gate_up_proj", "down_proj"} <= dict(module.named_parameters(recurse=False)).keys()
