"""Assignment of this machine's GPUs to its workers. Pure.

Each worker computes on one GPU. Workers share a GPU, and its memory, only where there are more workers than GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.platform.gpu import Gpu


class Place(NamedTuple):
    """Where a worker computes: the device as the launcher counts it, and the GPU unless that is the CPU. ``sharing``:
    the number of workers on that GPU."""

    device: str = "cpu"
    gpu: Gpu | None = None
    sharing: int = 1

    @property
    def visible(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES for the worker: the GPU's UUID, which is the same GPU after every restart
        of the worker. "" on the CPU."""
        return "" if self.gpu is None else self.gpu.uuid


def deal(gpus: Sequence[Gpu], workers: int, taken: Iterable[str] = ()) -> list[Place]:
    """Return the places of ``workers`` workers: each in turn on the first of the GPUs with the fewest workers, where
    ``taken`` are the UUIDs of the GPUs of the workers that run already. Without GPUs all are on the CPU."""
    load = Counter(taken)
    chosen: list[Gpu] = []
    for _ in range(workers if gpus else 0):
        gpu = min(gpus, key=lambda each: load[each.uuid])
        load[gpu.uuid] += 1
        chosen.append(gpu)
    if not chosen:
        return [Place()] * workers
    return [Place(address(gpu), gpu, load[gpu.uuid]) for gpu in chosen]


def address(gpu: Gpu) -> str:
    """Return ``gpu`` as ``--device`` names it."""
    return f"cuda:{gpu.index}"
