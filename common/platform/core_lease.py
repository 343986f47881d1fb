"""Cores that the workers of one machine lend each other while they have nothing to compute.

A byte per core in memory that the launcher makes and all of its workers map: 0, or 1 while the worker that owns the
core rests. The others' helper threads (``common/kernels/cpu/borrow.h``) work there then, one at a time, which makes it
2. A byte behind these for each core says whether it has one owner: a core that several workers share is never lent,
since none of them knows of the others. Must not know: what is computed.
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
    """What a launcher tells a worker: the descriptor of its :class:`CoreLease`, and the ``cores`` of all workers."""

    descriptor: int
    cores: tuple[int, ...]


class CoreLease:
    """The shared bytes, behind ``descriptor``: a memfd, which is gone with the last process that has it open."""

    def __init__(self, descriptor: int, own: Iterable[int] = ()) -> None:
        self.descriptor = descriptor
        self.own = [core for core in own if core < MAX_CORES]
        self.borrowed_s: Callable[[], float] = float
        """Seconds of processor time that this process has had on others' cores."""
        self._bytes = mmap.mmap(descriptor, 2 * MAX_CORES)

    @classmethod
    def create(cls) -> CoreLease:
        """For the launcher. OSError if the system has no such memory."""
        descriptor = os.memfd_create("tandem-cores", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 2 * MAX_CORES)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def address(self) -> int:
        """Of the byte of core 0, for helpers; good for as long as this object is."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def settle(self, shares: Iterable[Iterable[int]]) -> None:
        """Who owns which cores now: only what one worker has for itself may be lent."""
        owners = Counter(core for share in shares for core in share if core < MAX_CORES)
        for core in range(MAX_CORES):
            self._bytes[MAX_CORES + core] = owners[core] == 1
            if owners[core] != 1:  # whoever lends it may be gone, or does not know yet that it is not alone
                self._bytes[core] = 0

    def lend(self) -> None:
        """This worker has nothing to compute. Who has died with a core of it has it no more."""
        for core in self.own:
            self._bytes[core] = self._bytes[MAX_CORES + core]

    def take_back(self) -> None:
        """It may have."""
        for core in self.own:
            self._bytes[core] = 0

    def lent(self) -> list[int]:
        """The cores that can be borrowed now."""
        return [core for core in range(MAX_CORES) if self._bytes[core] == 1]

    def close(self) -> None:
        """Nothing may use :attr:`address` any more."""
        self._bytes.close()
        os.close(self.descriptor)
