"""The link inside one process: the receiver maps the sender's pool as over shared memory, at an endpoint without a
thread.

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
    """The pools of one world, each behind its endpoint."""

    def __init__(self) -> None:
        self._endpoints: dict[str, MemoryPoolEndpoint] = {}

    def endpoint(self, memory: KvMemory, incarnation: Incarnation) -> MemoryPoolEndpoint:
        """In place of :class:`shm.PoolEndpoint`."""
        endpoint = MemoryPoolEndpoint(memory, _address(incarnation), self._endpoints.pop)
        self._endpoints[endpoint.address] = endpoint
        return endpoint

    def of(self, incarnation: Incarnation) -> MemoryPoolEndpoint:
        """The endpoint of its pool."""
        return self._endpoints[_address(incarnation)]

    def connect(self, address: str) -> MemoryPoolConnection:
        """In place of :class:`shm.PoolConnection`; OSError if there is no such endpoint."""
        if address not in self._endpoints:
            raise OSError(f"no door {address} in this process")
        return MemoryPoolConnection(self._endpoints[address])


def _address(incarnation: Incarnation) -> str:
    return f"memory-{incarnation}"


class MemoryPoolEndpoint:
    """Gives away the descriptor of ``memory`` while its owner ``answers``; ``closes`` hears that it does so no more."""

    def __init__(self, memory: KvMemory, address: str, closes: Callable[[str, None], object]) -> None:
        self.memory, self.address, self._closes = memory, address, closes
        self.answers: Callable[[], bool] = lambda: True

    def close(self) -> None:
        self._closes(self.address, None)


class MemoryPoolConnection:
    """One connection; like one to a real endpoint it has a descriptor to wait for, which here is always ready."""

    def __init__(self, endpoint: MemoryPoolEndpoint) -> None:
        self._endpoint, self._ready = endpoint, os.eventfd(1)

    def fileno(self) -> int:
        return self._ready

    def answer(self) -> int | None:
        """The pool's descriptor, which is the caller's from here on; None while nobody answers."""
        return os.dup(self._endpoint.memory.fd) if self._endpoint.answers() else None

    def close(self) -> None:
        os.close(self._ready)
