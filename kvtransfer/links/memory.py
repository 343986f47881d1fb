"""The shared-memory link inside one process, for tests and simulations where both sides are objects of one process.

:class:`Pools` hands descriptors over in place of the sockets of :mod:`kvtransfer.links.shm`, without a thread.
Everything else is the same: mapping, directions, generation checks and checksums. Faults of the network are injected
elsewhere: by :mod:`kvtransfer.links.faulty` and by the simulated network of the tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from common.core.ids import Incarnation
from common.kv.storage.host import KvMemory


class Pools:
    """The pool endpoints of one simulated system."""

    def __init__(self) -> None:
        self._endpoints: dict[str, MemoryPoolEndpoint] = {}

    def endpoint(self, memory: KvMemory, incarnation: Incarnation) -> MemoryPoolEndpoint:
        """Create an endpoint in place of :class:`shm.PoolEndpoint`."""
        endpoint = MemoryPoolEndpoint(memory, _address(incarnation), self._endpoints.pop)
        self._endpoints[endpoint.address] = endpoint
        return endpoint

    def of(self, incarnation: Incarnation) -> MemoryPoolEndpoint:
        """Return the endpoint of the pool of ``incarnation``."""
        return self._endpoints[_address(incarnation)]

    def connect(self, address: str) -> MemoryPoolConnection:
        """Connect in place of :class:`shm.PoolConnection`; raises OSError if there is no such endpoint."""
        if address not in self._endpoints:
            raise OSError(f"no endpoint {address} in this process")
        return MemoryPoolConnection(self._endpoints[address])


def _address(incarnation: Incarnation) -> str:
    return f"memory-{incarnation}"


class MemoryPoolEndpoint:
    """Hands out the descriptor of ``memory`` while ``answers()`` is true; :meth:`close` calls ``closes``."""

    def __init__(self, memory: KvMemory, address: str, closes: Callable[[str, None], object]) -> None:
        self.memory, self.address, self._closes = memory, address, closes
        self.answers: Callable[[], bool] = lambda: True

    def close(self) -> None:
        """Accept no further connections."""
        self._closes(self.address, None)


class MemoryPoolConnection:
    """One connection. Like a real one it has a descriptor to poll, which here is always ready."""

    def __init__(self, endpoint: MemoryPoolEndpoint) -> None:
        self._endpoint, self._ready = endpoint, os.eventfd(1)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._ready

    def answer(self) -> int | None:
        """Return the pool's descriptor, which the caller then owns; None while the endpoint does not answer."""
        return os.dup(self._endpoint.memory.fd) if self._endpoint.answers() else None

    def close(self) -> None:
        """Close the descriptor to poll."""
        os.close(self._ready)
