"""The weights of a GGUF model under the names, and in the order of rows, of transformers' checkpoint.

Quantized matrices stay as they are. Files are read, not mapped: one that is overwritten while it is served must not
change the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from common.checkpoint.gguf import GgufModel, GgufTensor
from common.checkpoint.gguf_config import uniform
from common.checkpoint.gguf_names import Target, head_order, targets
from common.core.errors import reason
from common.quantization.gguf_blocks import FLOATS, numbers_of, weight_of
from common.quantization.source import Lazy, Make, WeightSource, damaged
from common.quantization.weight import QuantizedWeight, concatenate, requantize

_CHUNK = 1 << 20
"""Bytes of a tensor that are read at a time: few enough that what is made of them stays in a core's cache."""
_FUSED = frozenset({"gpt-oss"})
"""Architectures whose model in transformers has one tensor for all experts, [experts, in, out]."""


def open_gguf_weights(model: GgufModel) -> WeightSource:
    """Return the weights of ``model``. Raises StartError if it has a tensor that its architecture does not have."""
    found = _Found()
    for name, target in targets(model).items():
        tensor = model.tensors[name]
        if target.stacked and model.architecture in _FUSED:
            _add_fused(found, tensor, target)
        elif target.stacked:
            for expert in range(tensor.shape[0]):
                _add(found, model, _part(tensor, expert), target, target.name.format(expert))
        else:
            _add(found, model, tensor, target, target.name)
    for name, (gate, up) in _pairs(found.halves).items():
        _add_pair(found, name, gate, up)
    return WeightSource(found.compact, found.plain, found.stacked)


@dataclass
class _Found:
    compact: dict[str, Make] = field(default_factory=dict)
    plain: dict[str, Lazy] = field(default_factory=dict)
    stacked: dict[str, Callable[[], list[QuantizedWeight]]] = field(default_factory=dict)
    halves: dict[str, dict[str, GgufTensor]] = field(default_factory=dict)
    """By name: tensors "gate" and "up" that become the even and the odd rows of one."""


def _add(found: _Found, model: GgufModel, tensor: GgufTensor, target: Target, name: str) -> None:
    """Add a tensor of which ``name`` is the name in the model."""
    order = _order(model, tensor, target)
    matrix = len(tensor.shape) == 2 and name.endswith(".weight")
    if matrix and tensor.type not in FLOATS and not target.minus_one and not target.unsqueeze:
        found.compact[name] = partial(_compact, tensor, order)
    else:
        found.plain[name] = Computed(partial(_plain, tensor, order, target), _plain_shape(tensor, target))


def _order(model: GgufModel, tensor: GgufTensor, target: Target) -> torch.Tensor | None:
    """Return which row of ``tensor`` each row of the model is, None if they are the same."""
    if target.rows not in ("query", "key"):
        return None
    heads = uniform(model, "attention.head_count")
    if target.rows == "key":
        heads = uniform(model, "attention.head_count_kv", heads)
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise damaged(tensor.name, f"it has {rows} rows, which are not {heads} heads")
    return torch.tensor(head_order(heads, rows // heads))


def _add_fused(found: _Found, tensor: GgufTensor, target: Target) -> None:
    """Add a tensor of all experts that the model has in one tensor, too."""
    if target.rows in ("gate", "up"):
        found.halves.setdefault(target.name, {})[target.rows] = tensor
        return
    name = _fused_name(target.name)
    if len(tensor.shape) == 3 and tensor.type not in FLOATS:
        found.stacked[name] = partial(_experts, tensor)
    elif len(tensor.shape) == 3:
        found.plain[name] = Computed(lambda: _numbers(tensor).transpose(1, 2), _transposed(tensor.shape))
    else:
        found.plain[name] = Computed(partial(_numbers, tensor), tensor.shape)


def _add_pair(found: _Found, name: str, gate: GgufTensor, up: GgufTensor) -> None:
    """Add the tensor of which ``gate`` has the even and ``up`` the odd rows, for each expert."""
    if gate.shape != up.shape:
        raise damaged(gate.name, f"it is {list(gate.shape)}, but {up.name} {list(up.shape)}")
    fused, (experts, rows, *rest) = _fused_name(name), gate.shape
    shape = (experts, 2 * rows, *rest)
    if rest and not {gate.type, up.type} & FLOATS.keys():
        found.stacked[fused] = partial(_pair_of_experts, gate, up)
        return

    def numbers() -> torch.Tensor:
        both = torch.stack([_numbers(gate), _numbers(up)], 2).view(shape)
        return both.transpose(1, 2) if rest else both

    found.plain[fused] = Computed(numbers, _transposed(shape) if rest else shape)


def _pairs(halves: Mapping[str, Mapping[str, GgufTensor]]) -> dict[str, tuple[GgufTensor, GgufTensor]]:
    for name, parts in halves.items():
        if len(parts) != 2:
            raise damaged(name, f"the file has only its part {', '.join(parts)}")
    return {name: (parts["gate"], parts["up"]) for name, parts in halves.items()}


def _fused_name(name: str) -> str:
    """Return the name of the model's tensor for all experts: ``…experts.down_proj``, ``…experts.down_proj_bias``."""
    whole = name.replace(".{}", "")
    return whole.removesuffix(".weight") if whole.endswith(".weight") else f"{whole.removesuffix('.bias')}_bias"


# -- reading ----------------------------------------------------------------------------------------------------------


def _part(tensor: GgufTensor, at: int) -> GgufTensor:
    """Return entry ``at`` of the first dimension."""
    nbytes = tensor.nbytes // tensor.shape[0]
    return GgufTensor(
        tensor.name, tensor.type, tensor.shape[1:], tensor.file, tensor.offset + at * nbytes, nbytes
    )  # fmt: skip


def _read(tensor: GgufTensor, first: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a tensor from its byte ``first`` on."""
    try:
        data = np.fromfile(tensor.file, np.uint8, nbytes, offset=tensor.offset + first)
    except OSError as error:
        raise damaged(tensor.name, reason(error)) from error
    if len(data) != nbytes:
        raise damaged(tensor.name, f"{tensor.file} has become shorter")
    return torch.from_numpy(data)


def _matrix(tensor: GgufTensor) -> QuantizedWeight:
    """Read a quantized matrix, some rows at a time."""
    rows, columns = tensor.shape
    row = tensor.nbytes // rows
    step = max(1, _CHUNK // row)
    parts = []
    for at in range(0, rows, step):
        count = min(step, rows - at)
        try:
            parts.append(weight_of(tensor.type, _read(tensor, at * row, count * row), (count, columns)))
        except ValueError as error:
            raise damaged(tensor.name, str(error)) from error
    joined = parts[0] if len(parts) == 1 else concatenate(parts)
    assert joined is not None
    return joined


def _compact(tensor: GgufTensor, order: torch.Tensor | None) -> QuantizedWeight:
    weight = _matrix(tensor)
    return weight if order is None else weight.rows(order)


def _experts(tensor: GgufTensor) -> list[QuantizedWeight]:
    return [_matrix(_part(tensor, expert)) for expert in range(tensor.shape[0])]


def _pair_of_experts(gate: GgufTensor, up: GgufTensor) -> list[QuantizedWeight]:
    rows = gate.shape[1]
    order = torch.arange(2 * rows).view(2, rows).t().flatten()
    found = []
    for one, other in zip(_experts(gate), _experts(up), strict=True):
        joined = concatenate([one, other])
        if joined is None:  # of two formats
            dense = torch.cat([one.dequantize(), other.dequantize()])
            joined = requantize(dense, f"{one.source} and {other.source}")
        found.append(joined.rows(order))
    return found


def _numbers(tensor: GgufTensor) -> torch.Tensor:
    try:
        return numbers_of(tensor.type, _read(tensor, 0, tensor.nbytes), tensor.shape)
    except ValueError as error:
        raise damaged(tensor.name, str(error)) from error


def _plain(tensor: GgufTensor, order: torch.Tensor | None, target: Target) -> torch.Tensor:
    values = _numbers(tensor)
    if target.minus_one:
        values = values.float() - 1
    if order is not None:
        values = values[order]
    return values.view(_plain_shape(tensor, target))


def _plain_shape(tensor: GgufTensor, target: Target) -> tuple[int, ...]:
    return (1, *tensor.shape) if target.unsqueeze and len(tensor.shape) == 1 else tensor.shape


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1])


class Computed:
    """A tensor that is read and brought to the model's form each time it is indexed."""

    def __init__(self, make: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> None:
        self._make, self._shape = make, shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._make()[index]

    def get_shape(self) -> list[int]:
        return list(self._shape)
