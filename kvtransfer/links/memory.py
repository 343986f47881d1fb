"""The link inside one process: the receiver maps the sender's pool as over shared memory, at a door without a thread.

For tests and simulations, where both sides are objects of one process. :class:`Pools` hands descriptors over in place
of :mod:`kvtransfer.links.shm`; all else is the same: mapping, directions, generation checks and checksums. What happens
to frames on their way (loss, delay, repetition, reordering, damage) is up to whoever carries them: see
:mod:`kvtransfer.links.faulty`, and the simulated network of the tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from common.core.ids import Incarnation
from common.kv.storage.host import KvMemory


class Pools:
    """The pools of one world, each behind its door."""

    def __init__(self) -> None:
        self._doors: dict[str, Door] = {}

    def door(self, memory: KvMemory, incarnation: Incarnation) -> Door:
        """In place of :class:`shm.PoolDoor`."""
        door = Door(memory, _address(incarnation), self._doors.pop)
        self._doors[door.address] = door
        return door

    def of(self, incarnation: Incarnation) -> Door:
        """The door of its pool."""
        return self._doors[_address(incarnation)]

    def knock(self, address: str) -> Knock:
        """In place of :class:`shm.Knock`; OSError if there is no such door."""
        if address not in self._doors:
            raise OSError(f"no door {address} in this process")
        return Knock(self._doors[address])


def _address(incarnation: Incarnation) -> str:
    return f"memory-{incarnation}"


class Door:
    """Gives away the descriptor of ``memory`` while its owner ``answers``; ``closes`` hears that it does so no more."""

    def __init__(self, memory: KvMemory, address: str, closes: Callable[[str, None], object]) -> None:
        self.memory, self.address, self._closes = memory, address, closes
        self.answers: Callable[[], bool] = lambda: True

    def close(self) -> None:
        self._closes(self.address, None)


class Knock:
    """One visit; like one at a real door it has a descriptor to wait for, which here is always ready."""

    def __init__(self, door: Door) -> None:
        self._door, self._ready = door, os.eventfd(1)

    def fileno(self) -> int:
        return self._ready

    def answer(self) -> int | None:
        """The pool's descriptor, which is the caller's from here on; None while nobody answers."""
        return os.dup(self._door.memory.fd) if self._door.answers() else None

    def close(self) -> None:
        os.close(self._ready)
