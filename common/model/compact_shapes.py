"""Checks that quantized matrices have the shapes of the parameters in whose place they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from common.quantization.source import Make, damaged
from common.quantization.weight import QuantizedWeight

Experts = Callable[[], Iterable[list[QuantizedWeight]]]
"""Returns, for each expert, the weights that are joined along their rows."""


def fitting(name: str, make: Make, wanted: torch.Tensor) -> Make:
    """Return what reads a matrix and raises StartError if it is not of the shape of the parameter ``wanted``."""

    def read() -> QuantizedWeight:
        weight = make()
        if weight.shape != wanted.shape:
            raise damaged(name, f"it is {list(weight.shape)}, the model has {list(wanted.shape)}")
        return weight

    return read


def fitting_experts(name: str, read: Experts, module: Any) -> Experts:
    """Return what reads the matrices of experts and raises StartError if they do not fit the parameter ``name`` of
    ``module``."""
    experts, *shape = getattr(module, name.rpartition(".")[2]).shape
    wanted = tuple(reversed(shape) if module.is_transposed else shape)

    def checked() -> Iterator[list[QuantizedWeight]]:
        count = 0
        for weights in read():
            found = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
            if found != wanted or any(weight.shape[1] != wanted[1] for weight in weights):
                raise damaged(name, f"expert {count} has {list(found)}, the model {list(wanted)}")
            count += 1
            yield weights
        if count != experts:
            raise damaged(name, f"it has {count} experts, the model {experts}")

    return checked
