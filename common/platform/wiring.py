"""The descriptors through which the ranks of a tensor-parallel worker on one machine exchange tensors.

They exist before any rank imports torch; :mod:`common.model.collective` and :mod:`common.model.process_group` use them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

SLOT_BYTES = 4 << 20
"""Bytes of a slot; larger tensors are exchanged in parts. Memory that was never written takes none."""


@dataclass(frozen=True)
class Wiring:
    """The descriptors through which ranks on one machine exchange tensors. ``memory``: an anonymous file. ``signals``:
    an eventfd (in semaphore mode) for each ordered pair (from, to) of ranks on CPUs; none on GPUs, where the file is
    the store in which the ranks find each other."""

    memory: int
    signals: Mapping[tuple[int, int], int]

    @classmethod
    def create(cls, size: int) -> Wiring:
        """Create the descriptors for ``size`` ranks; the caller owns them."""
        memory = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
        os.ftruncate(memory, 2 * size * SLOT_BYTES)
        pairs = [(one, other) for one in range(size) for other in range(size) if one != other]
        return cls(memory, {pair: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE) for pair in pairs})

    @classmethod
    def create_store(cls) -> Wiring:
        """Create the descriptors for ranks on GPUs; the caller owns them."""
        return cls(os.memfd_create("tandem-ranks", os.MFD_CLOEXEC), {})

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All file descriptors."""
        return (self.memory, *self.signals.values())

    def close(self) -> None:
        """Close all file descriptors; called once, by their owner."""
        for descriptor in self.descriptors:
            os.close(descriptor)
