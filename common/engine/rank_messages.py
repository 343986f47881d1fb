"""What rank 0 of a tensor-parallel worker asks of the other ranks.

The ranks act on messages in the order in which they were sent, so what they ask of their GPUs has that order, too.
Imports no torch. Must not know how messages travel (:mod:`deploy.ranks.channel`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from common.kv.gpu_budget import GpuUse


@dataclass(frozen=True, slots=True)
class NewPool:
    """Use a pool of ``blocks`` blocks from now on, in place of an earlier one. On CPUs ``descriptor``, owned by the
    receiver, is the memory that all ranks share; on GPUs, where each makes its own slab, it is None."""

    blocks: int
    descriptor: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """Compute ``packed`` (see :func:`common.engine.packed_step.pack`), which is valid until the next message."""

    packed: memoryview


@dataclass(frozen=True, slots=True)
class Replay:
    """Compute ``packed`` (see :func:`common.engine.packed_step.pack_replay`), valid until the next message, by a
    captured graph."""

    packed: memoryview


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole blocks of this rank's slab, in this order: (source, target) each."""

    copies: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    """Zero whole blocks of this rank's slab."""

    blocks: list[int]


@dataclass(frozen=True, slots=True)
class BeginMeasuring:
    """Measure from now on what steps take of this rank's GPU."""


@dataclass(frozen=True, slots=True)
class MeasureGraphs:
    """Measure what CUDA graphs of decode steps of up to ``rows`` rows and ``max_model_len`` tokens of context take, as
    rank 0 does at the same time. ``driver_bytes``: what is added per graph; 0 if no other worker uses the GPU."""

    rows: int
    max_model_len: int
    driver_bytes: int


@dataclass(frozen=True, slots=True)
class CaptureGraphs:
    """Capture such graphs, as rank 0 does at the same time, for :class:`Replay`."""

    rows: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class EndMeasuring:
    """Report what was measured, without the pool, which is not used any more."""


RankMessage = (
    NewPool | Step | Replay | CopyBlocks | ClearBlocks | BeginMeasuring | MeasureGraphs | EndMeasuring | CaptureGraphs
)


class Outcome(IntEnum):
    """How something ended that all ranks have tried at the same time."""

    DONE = 0
    SHORT_OF_MEMORY = 1
    IMPOSSIBLE = 2


class Slab(NamedTuple):
    """The KV memory of one rank on its GPU: a descriptor, owned by the receiver, and the size in bytes."""

    descriptor: int
    size: int


class Channel(Protocol):
    """Rank 0's way to the other ranks. Methods raise StartError if one has gone."""

    def share_pool(self, descriptor: int, blocks: int) -> None:
        """Give every rank the pool's memory on a CPU; return when all have mapped it."""

    def make_slabs(self, blocks: int) -> list[Slab]:
        """Let every rank make its slab on its GPU; return them in the order of ranks, from rank 1 on."""

    def share_step(self, columns: Sequence[array[int]]) -> None:
        """Send one step to every rank."""

    def share_replay(self, columns: Sequence[array[int]]) -> None:
        """Send one step that repeats a graph to every rank."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Let every rank copy blocks of its slab; return when all have. A hand-off may be the next to write them, and
        it waits for the work of rank 0 only."""

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Let every rank zero blocks of its slab."""

    def begin_measuring(self) -> None:
        """Let every rank measure what steps take of its GPU."""

    def measure_graphs(self, rows: int, max_model_len: int, driver_bytes: int) -> None:
        """Let every rank measure what graphs take, as :class:`MeasureGraphs` says."""

    def capture_graphs(self, rows: int, max_model_len: int) -> None:
        """Let every rank capture graphs."""

    def settle(self, own: Outcome) -> Outcome:
        """Return the worst of all ranks' outcomes, of which ``own`` is that of rank 0; every rank gets the same."""

    def end_measuring(self) -> list[GpuUse]:
        """Return what the ranks have measured, from rank 1 on; their pools are gone after that."""


class Followed(Protocol):
    """Another rank's way to rank 0."""

    def messages(self) -> Iterator[RankMessage]:
        """Yield each message; end when rank 0 leaves."""

    def watch(self, check: Callable[[], None]) -> None:
        """Call ``check`` regularly from another thread, and end this rank if it raises DeviceLost: its own thread may
        wait for a message that rank 0, which waits for this rank's GPU, cannot send."""

    def ready(self, slab: Slab | None) -> None:
        """Answer NewPool: this rank can compute with the pool. On a GPU with its slab, whose descriptor is then
        closed."""

    def copied(self) -> None:
        """Answer CopyBlocks, once the copies have ended."""

    def settle(self, own: Outcome) -> Outcome:
        """Return the worst of all ranks' outcomes, of which ``own`` is this rank's. To be called as often as by rank 0,
        while MeasureGraphs or CaptureGraphs is done."""

    def report(self, use: GpuUse) -> None:
        """Answer EndMeasuring."""
