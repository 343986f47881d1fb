"""Linear layers and embeddings whose weights stay quantized, in torch: some rows at a time are dequantized in each
product. Small, correct on every device, and slow.

Products are *exact* (dequantized weights, activations as they are) or *integer* (activations in 8 bits, too). Integer
products are computed here in float32 on the rounded activations, which are the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from common.quantization.weight import QuantizedWeight, concatenate

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
"""Activations that a gated layer can apply, by transformers' names."""
SMALLEST_GROUP = 32
"""Fewest columns of an activation that share a scale."""
_CHUNK = 1 << 22
"""Elements of a weight that are dequantized at a time."""


class CompactLinear(nn.Module):
    """``x @ weight.T + bias``: ``x`` [..., in_features] to [..., out_features], in ``dtype``.

    With an ``activation`` the weight [2n, in] has a gate's rows before those of the values, and the result has n
    columns: ``activation(gate) * values``. ``parts``: the weight, one for each format if it is joined from several.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, exact: bool,
        activation: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.exact, self.activation, self.bias = exact, activation, None if bias is None else bias.detach().to(dtype)
        self._set([weight], dtype)

    @classmethod
    def joined(
        cls, weights: Sequence[QuantizedWeight], biases: Sequence[torch.Tensor | None], dtype: torch.dtype, *,
        exact: bool, activation: str | None = None,
    ) -> CompactLinear:  # fmt: skip
        """Return the layer of all rows of ``weights``, one after the other. Neighbours of one format are joined;
        weights of other formats are multiplied one by one. A missing bias is 0 where others have one."""
        bias = None
        if any(each is not None for each in biases):
            bias = torch.cat([
                torch.zeros(weight.shape[0], dtype=dtype) if each is None else each.detach().to(dtype)
                for weight, each in zip(weights, biases, strict=True)
            ])  # fmt: skip
        layer = cls(weights[0], bias, dtype, exact=exact, activation=activation)
        parts = [weights[0]]
        for weight in weights[1:]:
            both = concatenate([parts[-1], weight])
            parts[-1:] = [parts[-1], weight] if both is None else [both]
        layer._set(parts, dtype)
        return layer

    def _set(self, parts: list[QuantizedWeight], dtype: torch.dtype) -> None:
        self.parts, rows = parts, sum(part.shape[0] for part in parts)
        self.in_features = parts[0].shape[1]
        self.out_features = rows // 2 if self.activation else rows
        # modelling code may read the dtype or the shape, never the values
        self.weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")

    @property
    def quantized(self) -> QuantizedWeight | None:
        """The weight, None if it is joined from several formats."""
        return self.parts[0] if len(self.parts) == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` [rows, in_features]; return [rows, out_features]."""
        dtype = self.weight.dtype
        out = torch.cat([_product(part, x.to(dtype), self.exact) for part in self.parts], 1)
        if self.bias is not None:
            out = out + self.bias
        if self.activation:
            gate, values = out.chunk(2, dim=1)
            out = ACTIVATIONS[self.activation](gate) * values
        return out.to(dtype)

    def extra_repr(self) -> str:
        formats = ", ".join(dict.fromkeys(part.source or f"{part.bits} bits" for part in self.parts))
        return f"{self.in_features}, {self.out_features}, {formats}, {'exact' if self.exact else 'integer'}"


def _product(weight: QuantizedWeight, x: torch.Tensor, exact: bool) -> torch.Tensor:
    """Return ``x @ weight.T``, in the type of ``x`` if ``exact``, else in float32."""
    if not exact:
        x = round_activations(x, weight)
    step = max(1, _CHUNK // weight.shape[1])
    out = x.new_empty(x.shape[0], weight.shape[0])
    for at in range(0, weight.shape[0], step):
        some = weight.rows(slice(at, at + step)).dequantize(x.dtype)
        out[:, at : at + step] = functional.linear(x, some)
    return out


def round_activations(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return ``x`` [rows, in] rounded to 8 bits for an integer product with ``weight``, in float32: the largest
    magnitude of a row's group becomes 127. A group has as many columns as one of the weight, but at least 32."""
    columns, size = x.shape[1], max(SMALLEST_GROUP, weight.group)
    order = None if weight.order is None else weight.order.long()
    values = functional.pad(x.float(), (0, -columns % weight.group))
    width = values.shape[1]
    if order is not None:
        values = values[:, order]
    groups = functional.pad(values, (0, -width % size)).unflatten(1, (-1, size))
    scales = groups.abs().amax(2, keepdim=True) / 127
    codes = (groups / torch.where(scales == 0, 1.0, scales)).round_().clamp_(-127, 127)
    rounded = (codes * scales).view(x.shape[0], groups.shape[1] * size)[:, :width]
    if order is not None:
        rounded = torch.empty_like(rounded).index_copy_(1, order, rounded)
    return rounded[:, :columns]


class CompactEmbedding(nn.Module):
    """The rows of a ``weight`` [tokens, width], dequantized on look-up. Ids [...] to [..., width] in ``dtype``."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantized = weight
        self.num_embeddings, self.embedding_dim = weight.shape
        # modelling code may read the dtype or the shape, never the values
        self.weight = torch.empty(weight.shape, dtype=dtype, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.quantized.rows(ids.reshape(-1).long()).dequantize(self.weight.dtype)
        return rows.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.quantized.source or self.quantized.bits}"
