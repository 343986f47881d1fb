"""The link over NIXL and UCX: the receiver reads the sender's pool one-sidedly, on the same host or over a network.

As with shared memory the message names the blocks, and the receiver pulls them as described in
:mod:`kvtransfer.links.pull`: generations before and after, checksum over its own copy. Reads land in a buffer of the
receiver that is registered with UCX, never directly in its pool. NIXL is optional (the extra ``nixl``). UCX neither
encrypts nor restricts its peers to reading, so this link is for networks and workers that trust each other.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from common.core.errors import StartError, WireError
from common.core.ids import Incarnation
from common.kv.convert import Bytes
from common.kv.layout import KvLayout
from common.kv.storage.host import BlockArray, KvMemory
from kvtransfer.links.pull import Reading, T

NAME = "nixl"
CONNECT_S, READ_S = 2.0, 0.5
"""Timeouts of the first read of a pool, which connects, and of the others, which take about 1 ms."""
SPIN_S = 0.002
"""How long to spin for a read that has just begun; after that it is polled between other work."""
_LANDING_BYTES = 4 << 20
_ADDRESSES = struct.Struct("<QQ")
"""Addresses of the blocks and of the generation words in the sender's process."""
_BACKEND = "UCX"


def _agent(name: str) -> Any:
    """Create a NIXL agent with UCX, which serves its peers from a thread outside Python. Raises StartError without
    NIXL."""
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise StartError(
            "KV cannot travel over NIXL", f"its Python package is missing ({error})", "pip install 'tandem[nixl]'"
        ) from error
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[_BACKEND]))
    if _BACKEND not in agent.backends:
        raise StartError("KV cannot travel over NIXL", "it has no UCX plugin", "use another --kv-transport")
    return agent


def _registered(agent: Any, *arrays: npt.NDArray[Any]) -> Any:
    return agent.register_memory([(each.ctypes.data, each.nbytes, 0, "") for each in arrays], "DRAM", [_BACKEND])


class NixlPoolEndpoint:
    """The sending side: registers ``memory`` with UCX; a receiver reads it with ``announcement``."""

    def __init__(self, memory: KvMemory, owner: Incarnation) -> None:
        self._agent = _agent(owner)
        self._registration = _registered(self._agent, memory.raw, memory.generations)
        addresses = _ADDRESSES.pack(memory.raw.ctypes.data, memory.generations.ctypes.data)
        self.announcement: bytes = addresses + self._agent.get_agent_metadata()

    def close(self) -> None:
        """Deregister the memory and drop the agent: receivers can read nothing afterwards."""
        self._agent.deregister_memory(self._registration, [_BACKEND])
        del self._agent


class _Landing:
    """A buffer of the receiver that is registered for UCX to write."""

    def __init__(self, agent: Any, size: int) -> None:
        self.bytes: Bytes = np.empty(max(_LANDING_BYTES, 1 << (size - 1).bit_length()), np.uint8)
        self._agent = agent
        self._registration = _registered(agent, self.bytes)

    def close(self) -> None:
        self._agent.deregister_memory(self._registration, [_BACKEND])


class NixlReader:
    """The receiving side of one process: reads the pools of any number of senders without blocking."""

    def __init__(self, owner: Incarnation) -> None:
        self._agent = _agent(owner)

    def reach(self, owner: Incarnation, announcement: bytes, layout: KvLayout, blocks: int) -> NixlPool:
        """Return the pool that ``owner`` announced; raises ValueError if the announcement is not one of ``owner``.
        Nothing is read yet: :class:`NixlPoolConnection` finds out whether the pool can be read."""
        if len(announcement) <= _ADDRESSES.size:
            raise ValueError("no announcement of a NIXL agent")
        raw, generations = _ADDRESSES.unpack_from(announcement)
        try:
            peer = self._agent.add_remote_agent(announcement[_ADDRESSES.size :])
        except Exception as error:  # NIXL has its own exception for each status
            raise ValueError(f"not the metadata of a NIXL agent: {error!r}") from error
        if peer not in (owner, owner.encode()):
            self._agent.remove_remote_agent(peer)
            raise ValueError(f"the metadata of NIXL agent {peer!r}, sent by {owner}")
        return NixlPool(self._agent, peer, layout, blocks, raw, generations)

    def close(self) -> None:
        """Drop the agent; all pools must be closed before."""
        del self._agent


class NixlPool:
    """One sender's pool, read remotely. After one failed read the pool is lost and must be reached anew.

    UCX may still write the buffer of an abandoned read until the sender's agent is removed, which closes the
    connection. Such a buffer is therefore not reused, and is freed only with the pool.
    """

    def __init__(self, agent: Any, peer: Any, layout: KvLayout, blocks: int, raw: int, generations: int) -> None:
        self.layout, self.blocks = layout, blocks
        self._agent, self._peer, self._raw, self._generations = agent, peer, raw, generations
        self._landings: list[_Landing] = []
        self._free: list[_Landing] = []
        self._why_lost = ""
        self._closed = False

    @property
    def lost(self) -> bool:
        return bool(self._why_lost)

    def generations_of(self, ids: npt.NDArray[np.int64]) -> Reading[npt.NDArray[np.uint64]]:
        offsets = ids.astype(np.uint64) * np.uint64(8)
        return _NixlReading(self, offsets + np.uint64(self._generations), 8, lambda data: data.view(np.uint64).copy())

    def read(self, table: npt.NDArray[np.int64], tokens: range, layers: range) -> Reading[Bytes]:
        """Begin to read these layers of the blocks ``table`` [n]. The result is the canonical bytes of ``tokens``,
        uint8 [size]; only whole blocks are read."""
        layout = self.layout
        part = KvLayout(layout.layers[layers.start : layers.stop], layout.dtype, layout.block_size, layout.head_shards)
        shards = np.arange(layout.head_shards, dtype=np.uint64) * np.uint64(layout.shard_bytes)
        places = (table.astype(np.uint64) * np.uint64(layout.block_bytes))[:, None] + shards
        first = np.uint64(self._raw + layout.layer_offsets[layers.start])

        def take(data: Bytes) -> Bytes:
            blocks = BlockArray(part, data.reshape(len(table), part.block_bytes))
            return blocks.read(np.arange(len(table)), tokens, range(len(part.layers)))

        return _NixlReading(self, places.reshape(-1) + first, part.shard_bytes, take)

    def close(self) -> None:
        if self._closed:
            return
        self._closed, self._why_lost = True, self._why_lost or "the sender's pool is not read any more"
        self._agent.remove_remote_agent(self._peer)
        for landing in self._landings:
            landing.close()
        self._landings.clear()
        self._free.clear()
        self._agent = None  # freed with its last reference

    # -- for readings -------------------------------------------------------------------------------------------------

    def start(self, landing: _Landing, addresses: npt.NDArray[np.uint64], size: int) -> tuple[Any, str]:
        """Begin to read ``size`` bytes from each of ``addresses`` [n], contiguously into ``landing``; return the handle
        and its state."""
        first = np.uint64(landing.bytes.ctypes.data)
        local = self._pieces(first + np.arange(len(addresses), dtype=np.uint64) * np.uint64(size), size)
        remote = self._pieces(addresses, size)
        handle = self._agent.initialize_xfer("READ", local, remote, self._peer, b"", [_BACKEND])
        return handle, self._agent.transfer(handle)

    def state(self, handle: Any) -> str:
        """Return the state of a read: PROC, DONE or ERR."""
        return str(self._agent.check_xfer_state(handle))

    def room(self, size: int) -> _Landing:
        """Return a free buffer of at least ``size`` bytes."""
        for landing in self._free:
            if len(landing.bytes) >= size:
                self._free.remove(landing)
                return landing
        landing = _Landing(self._agent, size)
        self._landings.append(landing)
        return landing

    def give_back(self, landing: _Landing) -> None:
        """Take back the buffer of a read that has ended."""
        if not self._closed:
            self._free.append(landing)

    def lose(self, why: str) -> WireError:
        """Mark the pool as lost, the first time with the reason ``why``; return the WireError to raise."""
        self._why_lost = self._why_lost or f"the sender's pool cannot be read: {why}"
        return WireError(self._why_lost)

    def demand(self) -> None:
        """Raise WireError if the pool is lost."""
        if self._why_lost:
            raise WireError(self._why_lost)

    def _pieces(self, addresses: npt.NDArray[np.uint64], size: int) -> Any:
        rows = np.zeros((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1] = addresses, size
        return self._agent.get_xfer_descs(rows, "DRAM")


class _NixlReading(Reading[T]):
    """A read of ``size`` bytes from each of ``addresses``; ``take`` turns the bytes into the result."""

    def __init__(
        self, pool: NixlPool, addresses: npt.NDArray[np.uint64], size: int, take: Callable[[Bytes], T]
    ) -> None:
        pool.demand()
        self._pool, self._take, self._bytes = pool, take, len(addresses) * size
        self._until = time.monotonic() + READ_S
        self._handle: Any = None
        self._fresh = True
        self._landing = pool.room(self._bytes)
        try:
            self._handle, self._state = pool.start(self._landing, addresses, size)
        except Exception as error:  # NIXL has its own exception for each status
            raise pool.lose(repr(error)) from error

    def wait_until(self, until: float) -> None:
        self._until = until

    def landed(self) -> T | None:
        pool = self._pool
        pool.demand()
        if self._fresh:  # most reads end before the next poll would come
            self._fresh, soon = False, time.monotonic() + SPIN_S
            while self._look() == "PROC" and time.monotonic() < soon:
                pass
        state = self._look()
        if state == "PROC" and time.monotonic() < self._until:
            return None
        if state != "DONE":
            raise pool.lose(state)
        data = self._take(self._landing.bytes[: self._bytes])
        pool.give_back(self._landing)
        self._release()
        return data

    def close(self) -> None:
        """Abandon the read. Its buffer is reused only if the read is certain to have ended."""
        with contextlib.suppress(WireError):  # the pool is lost: none of its buffers is reused
            if self._handle is not None and not self._pool.lost and self._look() != "PROC":
                self._pool.give_back(self._landing)
        self._release()

    def _look(self) -> str:
        if self._state == "PROC":
            try:
                self._state = self._pool.state(self._handle)
            except Exception as error:  # as above
                raise self._pool.lose(repr(error)) from error
        return self._state

    def _release(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with contextlib.suppress(Exception):  # a running read cannot be cancelled: NIXL frees it with the agent
                handle.release()


class NixlPoolConnection:
    """The first read of a pool, which makes UCX connect to its owner; that may take long or never end."""

    def __init__(self, pool: NixlPool) -> None:
        self._pool = pool
        self._answered = False
        try:
            self._word = pool.generations_of(np.zeros(1, np.int64))
        except WireError:
            pool.close()
            raise
        assert isinstance(self._word, _NixlReading)
        self._word.wait_until(math.inf)  # the caller has its own deadline

    def answer(self) -> NixlPool | None:
        """Return the pool, which the caller then owns; None until it has answered. Raises WireError if it cannot be
        read."""
        if self._word.landed() is None:
            return None
        self._answered = True
        return self._pool

    def close(self) -> None:
        """Abandon the read, and close the pool unless :meth:`answer` has returned it."""
        self._word.close()
        if not self._answered:
            self._pool.close()
