"""Steps of a link that end later than the call that starts them, and the buffers that they use.

A link's work on a device is a generator, which yields while it waits: :class:`Steps` resumes it at each call of
``payload`` or ``place``. :class:`Staging` lends buffers, none of which is used again before the last copy from or to it
has ended. :class:`DeviceWriter` writes received bytes into blocks on a device, through pinned memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from common.core.errors import WireError
from common.core.ids import BlockId
from common.kv.convert import Bytes, converted
from common.kv.layout import ELEMENT_BYTES, KvDtype
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.device_calls import DeviceBuffer, DeviceCalls, DeviceFailed, Event
from common.kv.storage.host import KvMemory
from kvtransfer.frames import FrameHeader, checksum_of
from kvtransfer.links.base import compare, placed

T = TypeVar("T")
SPIN_S = 0.001
"""How long to spin for a copy that has just begun: most end within microseconds. After that it is polled between other
work."""
LEAST_BYTES = 4 << 20
"""Least size of a buffer; most frames fit."""
STAGED_BYTES = 64 << 20
"""Most memory of one Staging; a larger frame still gets a buffer if it is the only one."""
MAX_FRAME_BYTES = 64 << 20
"""Largest frame that is staged. A regular one has less than 16 MiB (:mod:`kvtransfer.plan`)."""


class Steps(Generic[T]):
    """The unfinished generators of one link, by the hand-off to which they belong."""

    def __init__(self) -> None:
        self._running: dict[Hashable, Generator[None, None, T]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def go_on(self, key: Hashable, start: Callable[[], Generator[None, None, T]]) -> T | None:
        """Resume the generator of ``key``, or start one; return its result, or None while it is unfinished. An
        exception that it raises ends it."""
        steps = self._running.pop(key, None) or start()
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        self._running[key] = steps
        return None

    def drop(self, key: Hashable) -> None:
        """Abandon the generator of ``key``, if there is one."""
        if (steps := self._running.pop(key, None)) is not None:
            steps.close()

    def clear(self) -> None:
        """Abandon all generators."""
        for key in list(self._running):
            self.drop(key)


def ended(calls: DeviceCalls, event: Event) -> Generator[None]:
    """Yield until ``event`` has ended. Raises DeviceFailed."""
    until = time.monotonic() + SPIN_S
    while not calls.query(event):
        if time.monotonic() >= until:
            yield


class Staging:
    """Buffers made by ``make`` (pinned or device memory) and lent to the steps of links."""

    def __init__(self, calls: DeviceCalls, make: Callable[[int], DeviceBuffer], least_bytes: int = LEAST_BYTES) -> None:
        self._calls, self._make, self._least_bytes = calls, make, least_bytes
        self._free: list[DeviceBuffer] = []
        self._busy: list[tuple[DeviceBuffer, Event]] = []
        self._lent: dict[int, DeviceBuffer] = {}

    def __len__(self) -> int:
        """Return how many buffers are lent, or not yet free after that."""
        return len(self._lent) + len(self._busy)

    def lend(self, size: int) -> DeviceBuffer | None:
        """Return a buffer of at least ``size`` bytes; None if too many are in use now. Raises DeviceFailed."""
        self._collect()
        fitting = next((each for each in self._free if each.size >= size), None)
        if fitting is not None:
            self._free.remove(fitting)
        else:
            whole = max(self._least_bytes, 1 << (size - 1).bit_length())
            while self._free and self._total() + whole > STAGED_BYTES:
                self._calls.free(self._free.pop(0))  # too small
            if self._total() and self._total() + whole > STAGED_BYTES:
                return None
            fitting = self._make(whole)
        self._lent[fitting.address] = fitting
        return fitting

    def lent(self, size: int) -> Generator[None, None, DeviceBuffer]:
        """Yield until there is a buffer of at least ``size`` bytes, and return it."""
        while (buffer := self.lend(size)) is None:
            yield
        return buffer

    def give_back(self, buffer: DeviceBuffer, after: Event | None = None) -> None:
        """Take back a buffer whose last copy ends with ``after`` (None: has ended)."""
        del self._lent[buffer.address]
        if after is None:
            self._free.append(buffer)
        else:
            self._busy.append((buffer, after))

    def close(self) -> None:
        """Free all buffers, after waiting for those that are in use. Raises DeviceFailed."""
        for buffer, event in self._busy:
            self._calls.wait(event)
            self._free.append(buffer)
        for buffer in self._free:
            self._calls.free(buffer)
        self._free, self._busy = [], []

    def _total(self) -> int:
        return sum(each.size for each in (*self._free, *self._lent.values(), *(busy for busy, _ in self._busy)))

    def _collect(self) -> None:
        """Free the buffers whose last copy has ended. One whose copy has failed stays out of use: it may still be
        written."""
        for entry in self._busy[:]:
            buffer, event = entry
            try:
                if self._calls.query(event):
                    self._busy.remove(entry)
                    self._free.append(buffer)
            except DeviceFailed:
                continue


class BlockWriter(Protocol):
    """Writes cells that have arrived in this process's memory into its blocks."""

    def write(
        self, header: FrameHeader, data: Bytes, dtype: KvDtype, table: Sequence[BlockId]
    ) -> Generator[None, None, int]:
        """Verify ``data``, canonical bytes with elements of ``dtype``, write them into the blocks of ``table`` and
        return their checksum; yields while a copy is under way. Raises as :func:`compare`, and DeviceFailed. If it is
        closed before its end, nothing writes the blocks afterwards."""
        ...


class HostWriter:
    """Writes into host memory, at once. ``data`` must be a copy that only this process can change."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def write(
        self, header: FrameHeader, data: Bytes, dtype: KvDtype, table: Sequence[BlockId]
    ) -> Generator[None, None, int]:
        yield from ()
        return placed(header, data, dtype, self._memory, table)


class DeviceWriter:
    """Writes into the blocks of a GPU: a copy in pinned memory is verified, then copied by the GPU.

    ``after`` is an event behind the engine's earlier work on the blocks, which must end before they are written.
    """

    def __init__(self, memory: CudaMemory, pinned: Staging, after: Event | None) -> None:
        self._memory, self._pinned, self._after = memory, pinned, after

    def write(
        self, header: FrameHeader, data: Bytes, dtype: KvDtype, table: Sequence[BlockId]
    ) -> Generator[None, None, int]:
        own_type, cells = self._memory.layout.dtype, header.cells
        own_bytes = data.nbytes * ELEMENT_BYTES[own_type] // ELEMENT_BYTES[dtype]
        buffer = yield from self._pinned.lent(max(data.nbytes, own_bytes, 1))
        copying: Event | None = None  # until it has ended
        try:
            assert buffer.array is not None
            copy = buffer.array[: data.nbytes]
            copy[:] = data
            compare(header, checksum := checksum_of(copy), data.nbytes)
            if dtype != own_type:
                own = converted(copy.copy(), dtype, own_type)
                buffer.array[: own.nbytes] = own
            self._memory.scatter(table, cells.tokens, cells.layers, buffer, self._after)
            copying = self._memory.calls.record_event()
            yield from writing_ended(self._memory.calls, copying)
            copying = None
            return checksum
        finally:
            self._pinned.give_back(buffer, copying)


def writing_ended(calls: DeviceCalls, writing: Event) -> Generator[None]:
    """Yield until a copy into blocks has ended. Closed before that, it blocks until then, because the blocks may be
    given to another request next. Raises DeviceFailed if the copy fails or does not end: then the blocks may still be
    written, and this process must end."""
    try:
        yield from ended(calls, writing)
    except GeneratorExit:
        calls.wait(writing)
        raise


def checked_size(header: FrameHeader) -> int:
    """Return the size in bytes of a frame to be staged; raises WireError if it is 0 or above MAX_FRAME_BYTES."""
    if not 0 < header.size_bytes <= MAX_FRAME_BYTES:
        raise WireError(f"a frame of {header.size_bytes} bytes")
    return header.size_bytes
