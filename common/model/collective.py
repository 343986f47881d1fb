"""Sums and gathers over the ranks of one tensor-parallel worker.

On a CPU the ranks exchange tensors through memory that they share: each rank copies its part into a slot of its own,
wakes the others, and reads theirs. There is no port that another user could dial, a waiting rank sleeps, and every rank
adds the parts in the order of the ranks, so all of them get the same bits. On GPUs this is NCCL's work
(:mod:`common.model.process_group`).
"""

from __future__ import annotations

import abc
import mmap
import os
from collections.abc import Callable, Sequence

import torch

from common.platform.wiring import SLOT_BYTES, Wiring

_ONE = (1).to_bytes(8, "little")


class Collective(abc.ABC):
    """The exchange between the ranks of one model. All ranks must make the same calls, in the same order, with tensors
    of the same shapes. A call returns when every rank has made it; on a GPU it returns at once, and what the GPU is
    given to do after it waits for that."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.closing: list[Callable[[], None]] = []
        """What :meth:`close` calls first."""
        self.after_sum: Callable[[], None] | None = None
        """Called after each :meth:`sum`: by then (on a GPU: at that point of its stream) every rank has computed
        everything before it."""

    def close(self) -> None:
        """Release what the exchange holds; no call may be under way."""
        for close in self.closing:
            close()
        self._close()

    @abc.abstractmethod
    def _close(self) -> None: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x`` (any shape, the same on all ranks) by the sum over all ranks, in place, and return it."""
        self._sum(x)
        if self.after_sum is not None:
            self.after_sum()
        return x

    def copy_from_root(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x`` (any shape, the same on all ranks) by that of rank 0, in place, and return it."""
        if self.rank:
            x.zero_()
        self._sum(x)
        return x

    @abc.abstractmethod
    def _sum(self, x: torch.Tensor) -> None: ...

    @abc.abstractmethod
    def gather(self, x: torch.Tensor, widths: Sequence[int], *, root_only: bool = False) -> torch.Tensor:
        """Return the columns of all ranks side by side: ``x`` [..., widths[rank]] to [..., sum(widths)]. With
        ``root_only`` only rank 0 gets them, and the other ranks get ``x`` back."""


class SharedMemoryCollective(Collective):
    """The exchange between processes of one machine, in host memory; see the module's docstring.

    Each rank has two slots, used in turn. A rank overwrites a slot only two exchanges later, when the others have
    announced the exchange between, and so have read it.
    """

    def __init__(self, rank: int, size: int, wiring: Wiring) -> None:
        super().__init__(rank, size)
        self._memory = mmap.mmap(wiring.memory, 2 * size * SLOT_BYTES)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8).view(2, size, SLOT_BYTES)
        others = [other for other in range(size) if other != rank]
        self._wake = [wiring.signals[rank, other] for other in others]
        self._wait = [wiring.signals[other, rank] for other in others]
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._turn = 0

    def _exchange(self, part: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Show ``part`` (one dimension) to the other ranks; return the parts of all, of ``counts`` elements each, which
        stay valid until the next exchange."""
        self._turn ^= 1
        slots = self._slots(part.dtype)[self._turn]
        slots[self.rank][: len(part)].copy_(part)
        for descriptor in self._wake:
            os.write(descriptor, _ONE)
        for descriptor in self._wait:
            os.read(descriptor, 8)  # sleeps; the interpreter lock is released
        return [slot[:count] for slot, count in zip(slots, counts, strict=True)]

    def _slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Return the slots as tensors of ``dtype``: [turn][rank]."""
        if dtype not in self._views:
            self._views[dtype] = [[slot.view(dtype) for slot in turn] for turn in self._bytes]
        return self._views[dtype]

    def _sum(self, x: torch.Tensor) -> None:
        flat = x.reshape(-1)
        most = SLOT_BYTES // x.element_size()
        for start in range(0, flat.numel(), most):
            mine = flat[start : start + most]
            first, *others = self._exchange(mine, [len(mine)] * self.size)
            mine.copy_(first)
            for other in others:
                mine.add_(other)
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat.view(x.shape))

    def gather(self, x: torch.Tensor, widths: Sequence[int], *, root_only: bool = False) -> torch.Tensor:
        rows = x.reshape(-1, widths[self.rank])
        here = not root_only or self.rank == 0
        out = x.new_empty(len(rows) if here else 0, sum(widths))
        most = max(1, SLOT_BYTES // (max(widths) * x.element_size()))
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            count, at = len(part), 0
            for theirs, width in zip(
                self._exchange(part.reshape(-1), [count * w for w in widths]), widths, strict=True
            ):
                if here:
                    out[start : start + count, at : at + width] = theirs.view(count, width)
                at += width
        return out.view(*x.shape[:-1], -1) if here else x

    def _close(self) -> None:
        """Drop the shared memory."""
        self._views.clear()
        del self._bytes
        try:
            self._memory.close()
        except BufferError:  # a part of the last exchange is still alive; it unmaps the memory when it is freed
            pass
