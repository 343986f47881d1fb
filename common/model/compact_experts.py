"""The experts of a mixture whose weights stay quantized: two linear layers per expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from common.model.compact import CompactLinear


class CompactExperts(nn.Module):
    """Replaces the module ``experts`` of transformers, which keeps the gate's function and the biases. ``gate_up`` and
    ``down``: the projections of each expert."""

    def __init__(self, experts: Any, gate_up: Sequence[CompactLinear], down: Sequence[CompactLinear]) -> None:
        super().__init__()
        self.experts, self.gate_up, self.down = experts, nn.ModuleList(gate_up), nn.ModuleList(down)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, hidden] for ``hidden_states`` [T, hidden] and the router's choice: indices and weights of k
        experts per token, [T, k] each. An index beyond the last expert chooses none. Sums are in float32, in the order
        of the experts."""
        out = torch.zeros(hidden_states.shape, device=hidden_states.device)
        for expert in top_k_index.unique().tolist():
            if expert >= len(self.down):
                continue
            rows, choice = torch.where(top_k_index == expert)
            part = self._one(expert, hidden_states[rows])
            out.index_add_(0, rows, part.float() * top_k_weights[rows, choice, None].float())
        return out.to(hidden_states.dtype)

    def _one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of one expert, [rows, hidden] for ``x`` [rows, hidden]."""
        first = self.gate_up[expert](x)
        if self.experts.has_bias:
            first = first + self.experts.gate_up_proj_bias[expert]
        out: torch.Tensor = self.down[expert](self.experts._apply_gate(first))
        return out + self.experts.down_proj_bias[expert] if self.experts.has_bias else out


def takes_compact(module: Any) -> bool:
    """Return whether ``module`` holds experts as transformers' common functions compute them, with a gate."""
    usual = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    return bool(usual) and {"gate_up_proj", "down_proj"} <= dict(module.named_parameters(recurse=False)).keys()
