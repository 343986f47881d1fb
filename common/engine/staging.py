"""Upload of a step's columns to the device in one copy."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Column: TypeAlias = "array[int] | array[float] | npt.NDArray[np.int64] | npt.NDArray[np.float64]"
"""A column of 8-byte numbers, int64 or float64."""


class _Buffer:
    """Host memory for one upload; pinned if ``device`` copies from it while the host goes on."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.words = torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.array: npt.NDArray[np.int64] = self.words.numpy()
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until the last upload from here has been copied, normally two steps ago."""
        if self.copied is not None:
            self.copied.synchronize()


class UploadStaging:
    """Two host buffers in turn, so that one can be filled while the device may still read the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [_Buffer(0, device), _Buffer(0, device)]

    def upload(self, columns: Mapping[str, Column]) -> dict[str, torch.Tensor]:
        """Return each of ``columns`` [n] as a tensor [n] on the device, int64 or float64. They are copied in one
        piece."""
        total = sum(map(len, columns.values()))
        buffer = self._next_buffer(total)
        at, ends = 0, []
        for column in columns.values():
            end = at + len(column)
            if end > at:
                buffer.array[at:end] = np.frombuffer(column, np.int64)
            ends.append((at, end))
            at = end
        words = torch.empty(total, dtype=torch.int64, device=self.device)
        words.copy_(buffer.words[:total], non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()
        return {
            name: words[first:last].view(torch.float64) if _is_real(column) else words[first:last]
            for (name, column), (first, last) in zip(columns.items(), ends, strict=True)
        }

    def _next_buffer(self, size: int) -> _Buffer:
        """Return a buffer of at least ``size`` words that the device no longer reads."""
        buffer = self._buffers.pop(0)
        buffer.wait()
        if len(buffer.words) < size:
            buffer = _Buffer(1 << (size - 1).bit_length(), self.device)
        self._buffers.append(buffer)
        return buffer


def _is_real(column: Column) -> bool:
    return column.typecode == "d" if isinstance(column, array) else column.dtype == np.float64
