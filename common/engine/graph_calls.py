"""The calls of a device that captured graphs need, as a seam: CUDA's, and a fake in the tests that computes late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

import torch


class Event(Protocol):
    """A point in the device's queue."""

    def synchronize(self) -> None:
        """Wait until the device has come to this point."""
        ...


class GraphCalls(Protocol):
    """Queues work on one device, which does it in the order of the calls while the host goes on."""

    def pinned(self, *shape: int) -> torch.Tensor:
        """Return zeros, int64 [*shape], in host memory that the device copies from and to while the host goes on."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target``, of the same shape; one is on the device, the other in pinned memory."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what ``run`` computes, without computing it, and return what repeats it on the same tensors.
        RuntimeError if it cannot be captured."""
        ...

    def event(self) -> Event:
        """Return the present end of the queue."""
        ...


class CudaCalls:
    """CUDA's calls on ``device``. The captured graphs that are alive share one memory pool: as they run one after
    another, each may use what the others use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()
        """The graphs in the pool that are alive."""
        self._invalid: list[Any] = []
        """Graphs whose captures CUDA has invalidated: torch's allocator of pinned memory refers to them for ever."""
        self._captures = torch.cuda.Stream(device)

    def pinned(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # torch.cuda.graph does the same, but frees memory first, which for a hundred graphs takes seconds
        torch.cuda.synchronize(self._device)
        if not self._graphs:  # torch takes no graph into a pool whose last one is gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._captures):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        self._graphs.add(graph)
        return graph.replay

    def _abandon(self, graph: Any) -> None:
        """End a capture that has failed. If CUDA has invalidated it, torch's own end does not reach the allocator,
        which would keep the pool, and free no cached memory any more. Later graphs then get another pool."""
        try:
            graph.capture_end()
        except RuntimeError:  # its complaint would hide why
            where = self._captures.device_index, self._pool
            with contextlib.suppress(RuntimeError):  # of an end that did reach the allocator
                torch._C._cuda_endAllocateToPool(*where)
                torch._C._cuda_releasePool(*where)
                self._invalid.append(graph)
                self._graphs.clear()

    def event(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
