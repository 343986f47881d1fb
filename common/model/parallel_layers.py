"""The modules that combine the ranks' shares of a layer. Each replaces a module of the loaded share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from common.model.collective import Collective


class SummedLinear(nn.Module):
    """A linear layer of which each rank has some input columns: multiplies, sums over the ranks, then adds the bias.
    With ``columns`` (first, last) the input has the columns of all ranks, and this rank takes those."""

    def __init__(self, linear: nn.Linear, collective: Collective, columns: tuple[int, int] | None) -> None:
        super().__init__()
        self.bias = linear.bias
        linear.register_parameter("bias", None)
        self.linear, self._collective, self._columns = linear, collective, columns

    @property
    def weight(self) -> torch.Tensor:
        """This rank's share of the weight, [out, own columns]."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out], the same on all ranks, for ``x`` [..., own columns], or [..., in] with ``columns``."""
        if self._columns is not None:
            x = x[..., slice(*self._columns)]
        out = self._collective.sum(self.linear(x))
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear layer of which each rank has some output columns, ``widths`` of all ranks: returns all columns. With
    ``root_only`` (the output layer, whose logits only rank 0 samples from) the other ranks return their own."""

    def __init__(
        self, linear: nn.Linear, collective: Collective, widths: Sequence[int], *, root_only: bool = False
    ) -> None:
        super().__init__()
        self.linear, self._collective, self._widths, self._root_only = linear, collective, widths, root_only

    @property
    def weight(self) -> torch.Tensor:
        """This rank's share of the weight, [widths[rank], in]."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., sum(widths)] for ``x`` [..., in], the same on all ranks. With ``root_only`` ranks other than 0
        return [..., widths[rank]]."""
        return self._collective.gather(self.linear(x), self._widths, root_only=self._root_only)


class SplitExperts(nn.Module):
    """The experts ``[first, last)`` of a mixture. Takes what the whole module takes, the router's choice among all
    experts, and returns the sum over all ranks.

    A choice of another rank's expert gets weight 0 and an index one beyond the last expert here, which the experts of
    transformers skip.
    """

    def __init__(self, experts: Any, collective: Collective, experts_here: tuple[int, int]) -> None:
        super().__init__()
        self.experts, self._collective = experts, collective
        self._first, self._count = experts_here[0], experts_here[1] - experts_here[0]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, hidden], the same on all ranks, for ``hidden_states`` [T, hidden] and the router's choice: indices
        and weights of k experts per token, [T, k] each."""
        index = top_k_index - self._first
        elsewhere = (index < 0) | (index >= self._count)
        index = index.masked_fill(elsewhere, self._count)
        out: torch.Tensor = self.experts(hidden_states, index, top_k_weights.masked_fill(elsewhere, 0.0))
        return self._collective.sum(out)
