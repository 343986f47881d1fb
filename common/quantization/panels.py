"""Weights in groups as the kernels for CPUs read them: panels of 16 rows, the same for all instruction sets.

Packing only moves bytes, so panels can be kept in a file and mapped, and a product of several weights (q, k and v; gate
and up) takes the panels of each as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from common.platform import memory
from common.quantization.weight import QuantizedWeight

PANEL = 16
"""Rows of the weight in a panel."""
_CACHE_LINE = 64
_COLUMNS = ("scales", "minima", "zeros", "sub_scales", "sub_minima")
_WHOLE = ("table", "order")
_STATED = ("bits", "group", "coding", "zero", "span", "most", "source")


@dataclass(frozen=True, eq=False)
class Panels:
    """A :class:`QuantizedWeight` of ``shape`` (out, in), rearranged. ``tensors``: "codes" int32 [panels, steps, 16],
    four bytes of codes of a row in each; "scales" and "minima" [panels, groups / span, 16]; "zeros", "sub_scales" and
    "sub_minima" [panels, groups, 16], and "table" and "order" as they are. ``stated``: the weight's other fields. Rows
    behind the last have scale 0.
    """

    shape: tuple[int, int]
    tensors: dict[str, torch.Tensor]
    stated: dict[str, Any]

    @classmethod
    def of(cls, weight: QuantizedWeight) -> Panels:
        """Rearrange ``weight``."""
        tensors = {"codes": _panels(weight.codes.contiguous().view(torch.int32))}
        tensors |= {name: _panels(weight.tensors()[name]) for name in _COLUMNS if name in weight.tensors()}
        tensors |= {name: weight.tensors()[name] for name in _WHOLE if name in weight.tensors()}
        return cls(weight.shape, _copied(tensors), {name: getattr(weight, name) for name in _STATED})

    def weight(self) -> QuantizedWeight:
        """Undo :meth:`of`."""
        fields: dict[str, Any] = {"shape": self.shape, **self.stated}
        for name, tensor in self.tensors.items():
            fields[name] = tensor if name in _WHOLE else _rows(tensor, self.shape[0])
        fields["codes"] = fields["codes"].view(torch.uint8)
        return QuantizedWeight(**fields)

    def rows(self, first: int, last: int) -> Panels:
        """Return the rows [first, last), without a copy. Raises ValueError if ``first`` is not the first of a panel, or
        ``last`` neither that nor the end."""
        if first % PANEL or (last % PANEL and last != self.shape[0]) or not 0 <= first < last <= self.shape[0]:
            raise ValueError(f"rows {first} to {last} are no whole panels")
        some = slice(first // PANEL, -(-last // PANEL))
        tensors = {name: tensor if name in _WHOLE else tensor[some] for name, tensor in self.tensors.items()}
        return replace(self, shape=(last - first, self.shape[1]), tensors=tensors)

    @property
    def bits(self) -> int:
        bits: int = self.stated["bits"]
        return bits

    @property
    def source(self) -> str:
        """Format in which the checkpoint has the weight."""
        return str(self.stated["source"])

    @property
    def padded(self) -> int:
        """Columns in whole groups."""
        return self.tensors["codes"].shape[1] * 32 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors alone, to be kept in a file beside ``shape`` and ``stated``."""
        return dict(self.tensors)

    @classmethod
    def of_state(cls, shape: tuple[int, int], stated: dict[str, Any], state: dict[str, torch.Tensor]) -> Panels:
        """Undo :meth:`state`, without a copy: the tensors may be mapped from a file."""
        return cls(shape, dict(state), {name: stated[name] for name in _STATED})


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` [out, n] as a view [panels, n, 16], filled with zeros behind the last row."""
    out, columns = rows.shape
    if out % PANEL:
        filled = rows.new_zeros(-(-out // PANEL) * PANEL, columns)
        filled[:out] = rows
        rows = filled
    return rows.view(-1, PANEL, columns).transpose(1, 2)


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy ``tensors`` to contiguous ones behind one another, in large pages if they fill one."""
    sizes = {name: -(-tensor.nbytes // _CACHE_LINE) * _CACHE_LINE for name, tensor in tensors.items()}
    if sum(sizes.values()) < memory.LARGE_PAGE:
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    copied: dict[str, torch.Tensor] = {}
    pages, at = memory.large_pages(sum(sizes.values()))
    for name, tensor in tensors.items():
        room = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=at)
        copied[name] = room.view(tensor.shape).copy_(tensor)
        at += sizes[name]
    return copied


def _rows(panels: torch.Tensor, out: int) -> torch.Tensor:
    """Undo :func:`_panels`."""
    count, columns, _ = panels.shape
    return panels.transpose(1, 2).reshape(count * PANEL, columns)[:out].contiguous()
