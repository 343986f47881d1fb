"""Linear layers in float8 e4m3: weights with one scale per output row, activations with one per token.

On GPUs with float8 units torch multiplies them in hardware (``torch._scaled_mm``). Elsewhere the same numbers are
multiplied in float32: for tests, and slow. Weights are rounded when the model is loaded, activations in each step, so
that a token's result does not depend on the other tokens of its batch.

Tensor-parallel ranks round their shares of the weights as one process rounds the whole: a weight of which a rank has
some columns gets the scales of whole rows. Activations get a scale for the part of a token that a rank sees, which is
the finer one. Each rank's product is in its own units before the sum over ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from common.kernels.e4m3 import LARGEST, lacks_units, to_e4m3
from common.model.collective import Collective
from common.model.linears import linear_weight
from common.model.parallel_layers import GatheredLinear, SummedLinear

_MULTIPLE = 16
"""Rows and columns of a weight that ``torch._scaled_mm`` takes are multiples of this."""


class Fp8Linear(nn.Module):
    """``x @ weight.T + bias`` with ``weight`` [out, in] in float8: ``x`` [..., in] to [..., out], in its dtype.

    ``rounded`` is the weight in units of ``scale``, float32 [out]. Sums are accumulated in float32. With ``collective``
    the weight is this rank's columns of a larger one; all ranks must make theirs at the same time.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, collective: Collective | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        whole = weight.detach().float()
        scale = row_scales(whole)
        if collective is not None:
            scale = _largest(scale, collective).clone()
        self.rounded, self.scale = to_e4m3(whole / scale), scale.squeeze(1)
        self.bias = None if bias is None else bias.detach()
        self.in_hardware, self.is_part = in_hardware(weight), collective is not None
        # modelling code may read the dtype or the shape, never the values
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).float()
        scale = row_scales(rows)
        rounded = to_e4m3(rows / scale)
        if self.in_hardware and rows.shape[0]:
            out = torch._scaled_mm(
                rounded, self.rounded.t(), scale_a=scale, scale_b=self.scale[None], out_dtype=x.dtype,
                use_fast_accum=False,
            )  # fmt: skip
        else:
            out = (rounded.float() @ self.rounded.float().t() * scale * self.scale).to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {'in hardware' if self.in_hardware else 'emulated'}"


def row_scales(rows: torch.Tensor) -> torch.Tensor:
    """Return the scale of each row of ``rows`` [n, columns], float32 [n, 1]: its largest magnitude becomes 448."""
    return (rows.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)


@torch.inference_mode()  # as everything that the ranks exchange
def _largest(column: torch.Tensor, collective: Collective) -> torch.Tensor:
    """Return the largest of all ranks' ``column`` [n, 1], element by element."""
    parts = collective.gather(column.view(1, -1), [len(column)] * collective.size)
    return parts.view(collective.size, -1).amax(dim=0)[:, None]


def in_hardware(weight: torch.Tensor) -> bool:
    """Return whether a product with ``weight`` [out, in] in float8 runs on float8 units: torch's operator with scales
    per row returns bfloat16 only."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or any(side % _MULTIPLE for side in weight.shape):
        return False
    return lacks_units(weight.device) is None


def round_linears(model: nn.Module, collective: Collective | None = None) -> list[Fp8Linear]:
    """Replace every plain linear layer but the output layer, whose logits need more precision, and return the new
    ones. Layers are replaced one by one, to keep the peak of memory low. ``collective``: of a rank's share of a model,
    the exchange with the other ranks, which must call this, too."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, GatheredLinear):
        head = head.linear
    replaced = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is head or (weight := linear_weight(child)) is None:
                continue
            between = collective if isinstance(parent, SummedLinear) else None
            replaced.append(Fp8Linear(weight, child.bias, between))  # type: ignore[arg-type]
            setattr(parent, name, replaced[-1])
    return replaced
