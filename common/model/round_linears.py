"""Quantizes linear layers of a loaded model: those that were not read quantized, and those of ranks. Chooses the layers
of which activations are rounded more finely."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from common.model.compact import CompactLinear
from common.model.linears import linear_weight
from common.model.parallel_layers import GatheredLinear
from common.quantization.rounded import GROUP, ROUTERS, name_of
from common.quantization.weight import quantize

OUTPUT_BITS: Literal[8] = 8
"""Bits of the output layer, whose logits need more precision."""
COARSE = ("gate_proj", "up_proj", "gate_up_proj", "o_proj")
"""Names of the layers for which 8 bits per activation are enough: most of the work, and no measurable loss."""


def round_to_groups(model: nn.Module, bits: Literal[4, 8], *, exact: bool) -> dict[str, int]:
    """Replace every plain linear layer that is no router by one whose weight has ``bits`` in groups of 64 columns, the
    output layer's 8; return their number by format. Products are ``exact``, or integer with as many bits per
    activation as :func:`refine` chooses. Layers are replaced one by one, to keep the peak of memory low.

    A rank that has some columns of a weight rounds its part alone.
    """
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    head = head.linear if isinstance(head, GatheredLinear) else head
    formats: dict[str, int] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ROUTERS or (weight := linear_weight(child)) is None:
                continue
            width = OUTPUT_BITS if child is head else bits
            rounded = _rounded(weight, child.bias, width, exact)  # type: ignore[arg-type]
            setattr(parent, name, rounded)
            del weight, child
            formats[name_of(width)] = formats.get(name_of(width), 0) + 1
    if not exact:
        refine(model)
    return formats


def refine(model: nn.Module) -> None:
    """Round activations to 16 bits rather than 8 (as the sum of two 8-bit numbers) in all integer products but those
    with :data:`COARSE` layers and experts."""
    for parent in list(model.modules()):
        if isinstance(parent, nn.ModuleList):  # of experts
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, CompactLinear) and name not in COARSE:
                setattr(parent, name, child.changed(exact=child.exact, terms=2))


def _rounded(weight: torch.Tensor, bias: torch.Tensor | None, bits: Literal[4, 8], exact: bool) -> CompactLinear:
    owned = None if bias is None else bias.detach().clone()
    rounded = replace(quantize(weight, bits, GROUP), source=name_of(bits))
    return CompactLinear(rounded, owned, weight.dtype, exact=exact)
