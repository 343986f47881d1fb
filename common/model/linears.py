"""Surgery on a loaded model: its linear layers in the packed weight format of oneDNN.

Packing once saves a reorder (or an unpacked product) in every step; measured on AVX-512 cores, a bfloat16 layer of one
row takes half the time and a float32 layer of many rows less than half. The packed weight takes the place of the plain
one. Only a weight that is tied to an embedding exists twice, because rows cannot be looked up in the packed form.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with a weight that oneDNN has reordered for about ``rows`` rows per call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
        self.bias = None if bias is None else bias.detach()
        # modelling code may ask for the dtype or the shape, never for the numbers
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, packed"


def packing_pays(dtype: torch.dtype, rows: int) -> bool:
    """Whether packed layers of ``dtype`` are faster here; a single float32 row is quicker with the plain weight."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32 and rows > 1


def pack_linears(model: nn.Module, rows: int) -> int:
    """Replaces every plain linear layer for which it pays, one by one, freeing as it goes; how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = _linear_weight(child)
            if weight is not None and weight.device.type == "cpu" and packing_pays(weight.dtype, rows):
                setattr(parent, name, PackedLinear(weight, child.bias, rows))  # type: ignore[arg-type]
                del weight, child
                count += 1
    return count


def _linear_weight(module: nn.Module) -> torch.Tensor | None:
    """The [out, in] weight of a plain linear layer; None for anything else, even subclasses: they may differ."""
    if type(module) is nn.Linear:
        return module.weight
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return module.weight.t()  # type: ignore[operator]
    return None
