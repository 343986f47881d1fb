"""Cores that the workers of one machine lend each other while they have nothing to compute.

The launcher creates shared memory that all of its workers map. The first MAX_CORES bytes hold the state of each core: 0
while its owner keeps it, 1 while its owner lends it, 2 while a helper thread of another worker uses it
(``common/kernels/cpu/borrow.h``; one helper at a time). The next MAX_CORES bytes are 1 for a core with exactly one
owner: a core that several workers share is never lent, since none of them knows whether the others idle. Must not know
what is computed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

MAX_CORES = 4096
"""Cores with larger numbers are not lent."""


class Lending(msgspec.Struct, frozen=True):
    """What a launcher passes to a worker: the descriptor of a :class:`CoreLease`, and the ``cores`` of all workers."""

    descriptor: int
    cores: tuple[int, ...]


class CoreLease:
    """The shared bytes of one machine, in the memfd ``descriptor``, which is gone with the last process that has it
    open. ``own`` are the cores that this process may lend; the launcher has none."""

    def __init__(self, descriptor: int, own: Iterable[int] = ()) -> None:
        self.descriptor = descriptor
        self.own = [core for core in own if core < MAX_CORES]
        self.borrowed_s: Callable[[], float] = float
        """Returns how many seconds of processor time this process has had on others' cores, in all."""
        self._bytes = mmap.mmap(descriptor, 2 * MAX_CORES)

    @classmethod
    def create(cls) -> CoreLease:
        """Create the shared memory, in the launcher. OSError if the system has no memfd."""
        descriptor = os.memfd_create("tandem-cores", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 2 * MAX_CORES)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def address(self) -> int:
        """Address of the byte of core 0, for helper threads; valid until :meth:`close`."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def settle(self, shares: Iterable[Iterable[int]]) -> None:
        """Record which cores each worker has now: only a core with exactly one owner may be lent."""
        owners = Counter(core for share in shares for core in share if core < MAX_CORES)
        for core in range(MAX_CORES):
            self._bytes[MAX_CORES + core] = owners[core] == 1
            if owners[core] != 1:  # the worker that lent it may be gone, or not know yet that it shares the core
                self._bytes[core] = 0

    def lend(self) -> None:
        """Lend this worker's cores, while it has nothing to compute. This also recovers a core whose borrower died."""
        for core in self.own:
            self._bytes[core] = self._bytes[MAX_CORES + core]

    def take_back(self) -> None:
        """Reclaim the cores that this worker had lent. A helper leaves at the end of its current part of the work."""
        for core in self.own:
            self._bytes[core] = 0

    def lent(self) -> list[int]:
        """Return the cores that can be borrowed now."""
        return [core for core in range(MAX_CORES) if self._bytes[core] == 1]

    def close(self) -> None:
        """Unmap the memory; helper threads must have stopped using :attr:`address`."""
        self._bytes.close()
        os.close(self.descriptor)
