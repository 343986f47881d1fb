"""A torch mode that fails where code of the GPU path would wait for the device or leave it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique2",
    "aten::item",
}
"""Operators whose result, or its shape, the host must wait for."""


class DeviceWatch(TorchDispatchMode):
    """Raises AssertionError for an operator that has a tensor on another device than ``device`` (scalars that were
    numbers in Python excepted), or whose shapes depend on values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.name().partition(".")[0]
        assert name not in _WAITS, f"{function} waits for the device"
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            boolean = [
                each for each in tree_leaves(args[1]) if isinstance(each, torch.Tensor) and each.dtype == torch.bool
            ]
            assert not boolean, f"{function} with a mask waits for the device"
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs, result)):
            assert tensor.device == self.device or _is_number(tensor), f"{function} has a tensor on {tensor.device}"
        return result


def _tensors(tree: object) -> Iterable[torch.Tensor]:
    return (each for each in tree_leaves(tree) if isinstance(each, torch.Tensor))


def _is_number(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` may be a Python number that became a tensor, which an operator reads without a copy."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"
