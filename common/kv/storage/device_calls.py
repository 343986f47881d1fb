"""The calls into a GPU's driver that a KV pool and its hand-offs need, as an interface.

:mod:`common.kv.storage.cuda_driver` implements it, and is the only module that calls CUDA for hand-offs; the tests
implement it with a fake whose work ends when a test says so. Nothing here blocks except :meth:`DeviceCalls.wait`. Must
not know blocks, layouts or links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from common.core.errors import TandemError
from common.kv.convert import Bytes
from common.kv.pieces import Numbers

Event = Any
"""A point in the device's work. Opaque: only the DeviceCalls that recorded it understand it."""
HASH_WORD_BYTES = 8


class DeviceFailed(TandemError):
    """The device refuses a call, or its work has failed or does not end."""


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """``size`` bytes of memory at ``address`` that copies of the device can read and write. ``array`` is the same
    memory for this process, uint8 [size]; None if it is the device's own. ``handle`` belongs to the DeviceCalls."""

    address: int
    size: int
    array: Bytes | None = None
    handle: Any = None


class DeviceCalls(Protocol):
    """One device. Copies and hashes run on a stream of their own, in the order of the calls and beside the engine's
    work; :meth:`record_event` says when they have ended. Raises DeviceFailed for a refused call."""

    name: str
    """Such as cuda:0."""
    group_backend: str
    """The backend of torch.distributed that sends and receives this device's memory."""

    def allocate(self, size: int) -> DeviceBuffer:
        """Return device memory of at least ``size`` bytes, at a fixed address, that can be exported."""
        ...

    def export(self, memory: DeviceBuffer) -> int:
        """Return a file descriptor of allocated memory, which the caller then owns. A process that gets it can attach
        the memory, which then lives at least as long as one of the two processes has it."""
        ...

    def attach(self, descriptor: int, size: int, *, writable: bool = False) -> DeviceBuffer:
        """Map ``size`` bytes of another process's exported memory, which may be on another GPU; the descriptor stays
        the caller's. Read-only, unless ``writable`` (among the ranks of one worker)."""
        ...

    def host_pin(self, size: int) -> DeviceBuffer:
        """Return pinned host memory: ``array`` is set."""
        ...

    def free(self, memory: DeviceBuffer) -> None:
        """Give memory of any of the above back. No work on it may be under way."""
        ...

    def mark(self) -> Event:
        """Record an event behind all work that the engine has started so far."""
        ...

    def copy_async(self, sources: Numbers, targets: Numbers, sizes: Numbers, after: Event | None = None) -> None:
        """Copy n pieces between addresses (int64 [n] each), of the device, of pinned memory or attached ones, in any
        order, once ``after`` has ended."""
        ...

    def hash_async(self, memory: DeviceBuffer, size: int, word: DeviceBuffer) -> None:
        """Write :func:`common.kv.device_hash.device_hash` of the first ``size`` bytes of device memory into the pinned
        ``word``, as little-endian uint64."""
        ...

    def record_event(self) -> Event:
        """Record an event behind the copies and hashes so far."""
        ...

    def query(self, event: Event) -> bool:
        """Return whether ``event`` has ended. Raises DeviceFailed if the work before it failed."""
        ...

    def wait(self, event: Event) -> None:
        """Block until ``event`` has ended. Raises DeviceFailed if the work failed, or does not end within WAIT_S."""
        ...

    def tensor(self, memory: DeviceBuffer, size: int) -> Any:
        """Return the first ``size`` bytes as a torch tensor of uint8 that shares the memory. Imports torch."""
        ...

    def close(self) -> None:
        """Release the stream and whatever else belongs to the calls; all memory must be freed before."""
        ...


WAIT_S = 2.0
"""Longest wait for work of the device; copies of a frame take microseconds."""


def word_of(word: DeviceBuffer) -> int:
    """Return what :meth:`DeviceCalls.hash_async` has written."""
    assert word.array is not None
    return int(word.array[:HASH_WORD_BYTES].view(np.dtype("<u8"))[0])
