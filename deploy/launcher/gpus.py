"""Assignment of this machine's GPUs to its workers. Pure.

Each worker computes on one GPU, or each of its ranks on one. Workers of one rank share a GPU, and its memory, where
there are more workers than GPUs; those of several ranks have theirs to themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.core.errors import StartError
from common.platform.gpu import Gpu

_SEPARATOR = ","


class Place(NamedTuple):
    """Where a worker computes: the device (of rank 0) as the launcher counts it, and the GPU of each rank, none for the
    CPU. ``sharing``: the number of workers on that GPU."""

    device: str = "cpu"
    gpus: tuple[Gpu, ...] = ()
    sharing: int = 1

    @property
    def gpu(self) -> Gpu | None:
        """The GPU of rank 0."""
        return self.gpus[0] if self.gpus else None

    @property
    def visible(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES for the worker: UUIDs, which are the same GPUs after every restart of the
        worker. "" on the CPU."""
        return _SEPARATOR.join(gpu.uuid for gpu in self.gpus)


def deal_ranks(gpus: Sequence[Gpu], ranks: Sequence[int], running: Iterable[str] = ()) -> list[Place]:
    """Return the places of workers with these numbers of ranks, where ``running`` are the :attr:`Place.visible` of
    those that run already. A worker of several ranks gets GPUs that no other worker has, the others share the rest as
    in :func:`deal`. Raises StartError if there are too few GPUs."""
    held = [each.split(_SEPARATOR) for each in running]
    reserved = {uuid for uuids in held if len(uuids) > 1 for uuid in uuids}
    shared = [uuids[0] for uuids in held if len(uuids) == 1]
    if not gpus or not (reserved or max(ranks, default=1) > 1):
        return deal(gpus, len(ranks), shared)
    free = [gpu for gpu in gpus if gpu.uuid not in {*reserved, *shared}]
    groups = [tuple(free.pop(0) for _ in range(min(count, len(free)))) for count in ranks if count > 1]
    taken = reserved | {gpu.uuid for group in groups for gpu in group}
    rest = [gpu for gpu in gpus if gpu.uuid not in taken]
    singles = ranks.count(1)
    if sum(map(len, groups)) < sum(ranks) - singles or (singles and not rest):
        raise _too_few(gpus, ranks, len({*reserved, *shared}))
    ones, several = iter(deal(rest, singles, shared)), iter(groups)
    return [next(ones) if count == 1 else _group(next(several)) for count in ranks]


def _group(gpus: tuple[Gpu, ...]) -> Place:
    return Place(address(gpus[0]), gpus)


def _too_few(gpus: Sequence[Gpu], ranks: Sequence[int], busy: int) -> StartError:
    needed = sum(count for count in ranks if count > 1) + (1 in ranks)
    also = f", of which {busy} have workers already" if busy else ""
    return StartError(
        f"workers of {' and '.join(map(str, ranks))} ranks need {needed} GPUs",
        f"each rank needs one to itself, and there are {len(gpus)}{also}",
        "give smaller --prefill-tensor-parallel-size and --decode-tensor-parallel-size, fewer workers, or --device cpu",
    )


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
    return [Place(address(gpu), (gpu,), load[gpu.uuid]) for gpu in chosen]


def address(gpu: Gpu) -> str:
    """Return ``gpu`` as ``--device`` names it."""
    return f"cuda:{gpu.index}"
