"""Find the operations of a step that would stop CUDA graph capture.

A captured graph repeats the kernels of one run with the same addresses and shapes, and no Python runs in between. So a
step can be captured only if no shape depends on numbers that are on the device, the host reads none of them, and
nothing is copied between host and device. :func:`audit` runs a step under a dispatch mode that sees every operation of
torch and lists those that break one of these rules, with the line of code that called them.

What happens inside an operation is invisible here: a kernel may wait for the device by itself. A capture that fails is
therefore handled, too (:mod:`common.engine.graph_capture`). Operations of the host on tensors of the host are harmless
during capture but are not repeated, so a result that changes from step to step must not depend on one; on a CPU, where
host and device are the same, the audit cannot tell.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

HOST_READ, SHAPE, COPY = "the host reads a number", "a shape depends on numbers", "host and device exchange a tensor"
_HOST_READS = {"aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.allclose"}
_SHAPES = {"aten.nonzero", "aten.masked_select", "aten.bincount", "aten._unique2", "aten.unique_dim"}
_INDEXING = {"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index"}
_TORCH = str(Path(torch.__file__).parent)
EXPERTS = ("grouped_mm", "batched_mm")
"""Implementations of transformers' expert layers, in the order in which they are tried. The first reads each active
expert's weights once, but only some GPUs have a kernel for it; the second copies the weights of every routed row."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """An operation that would stop capture: ``why``, its name in torch, the line that called it, and how often."""

    why: str
    operation: str
    place: str
    times: int

    def __str__(self) -> str:
        return f"{self.why} ({self.operation} at {self.place})"


class _Watch(TorchDispatchMode):
    """Counts the operations that would stop capture, and runs every operation unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if why := _depends_on_data(func, args, kwargs):
            self._note(why, func)
        result = func(*args, **kwargs)
        if _crosses_devices(func, args, kwargs, result):
            self._note(COPY, func)
        return result

    def _note(self, why: str, func: Any) -> None:
        self.found[why, str(func), _caller()] += 1


def _depends_on_data(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return why the host needs numbers of the device to run ``func``; "" if it does not."""
    name = str(func.overloadpacket)
    if name in _INDEXING:
        # tagged as data-dependent in every case, but only a mask makes a shape
        return SHAPE if _has_mask(args[1]) and not _fills_masked(name, args) else ""
    if name == "aten.repeat_interleave":
        sized = kwargs.get("output_size") is not None
        return SHAPE if func._overloadname == "Tensor" and not sized else ""
    if name in _HOST_READS or torch.Tag.data_dependent_output in func.tags:
        return HOST_READ
    return SHAPE if name in _SHAPES or torch.Tag.dynamic_output_shape in func.tags else ""


def _has_mask(indices: Iterable[Any]) -> bool:
    return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _fills_masked(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether torch runs ``x[mask] = number`` as a masked fill, which makes no shape."""
    return "put" in name and len(args[1]) == 1 and args[2].numel() == 1 and args[2].device.type == "cpu"


def _crosses_devices(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Return whether ``func`` copies between host and device, or makes a tensor from numbers of the host (on whichever
    device: torch may make it there without another operation)."""
    name = str(func.overloadpacket)
    if name in ("aten.lift_fresh", "aten.lift_fresh_copy", "aten.lift"):
        return True
    if name not in ("aten._to_copy", "aten.copy_", "aten._copy_from", "aten.set_"):
        return False
    tensors = [each for each in tree_iter((args, dict(kwargs), result)) if isinstance(each, torch.Tensor)]
    kinds = {each.device.type for each in tensors}
    return len(kinds) > 1


def _caller() -> str:
    """Return the innermost line outside torch and this module, as the last parts of its path and its number."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"


def audit(step: Callable[[], object]) -> list[Blocker]:
    """Run ``step`` once and return the operations in it that would stop capture, in order of their first use.

    The first run of a step may fill caches; run it once before, so that only what every run does is seen.
    """
    with _Watch() as watch:
        step()
    return [Blocker(why, operation, place, times) for (why, operation, place), times in watch.found.items()]


# -- expert layers ----------------------------------------------------------------------------------------------------


def choose_experts(model: Any, obstacle: Callable[[], str]) -> str:
    """Let the expert layers of ``model`` compute in a way in which its steps can be captured, and return "". If there
    is none, keep transformers' own choice and return why it cannot be captured.

    ``obstacle`` returns why a step of the model as it is cannot be captured, or "". transformers' plain loop over
    experts reads the routing on the host. A model without experts is only asked once.
    """
    before, why = experts_of(model), obstacle()
    if not (why and before):
        return why
    for experts in EXPERTS:
        if experts != before:
            model.set_experts_implementation(experts)
            if not obstacle():
                return ""
    model.set_experts_implementation(before)
    return why


def experts_of(model: Any) -> str:
    """Return how the expert layers of ``model`` compute; "" if it has none or transformers cannot change it."""
    if not getattr(model, "_can_set_experts_implementation", lambda: False)():
        return ""
    return str(model.config._experts_implementation or "eager")
