"""The senders' pools that one receiver can read.

Nothing here blocks: a connection is begun, and its completion is polled between other work, since the sender may be
stopped and the receiver's streams must not stall. Over NIXL the first read takes the place of the connection. A pool
that cannot be reached, or no longer be read, is tried again with exponential backoff. A pool is released a lease after
its last use: its owner may have died, and the mapping keeps all of its memory alive.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from common.core.errors import WireError
from common.core.ids import Incarnation
from common.kv.layout import KvLayout
from common.kv.storage.cuda import AttachedCudaBlocks, DeviceDescriptors
from common.kv.storage.device_calls import DeviceCalls, DeviceFailed
from common.kv.storage.host import KvMemory
from common.net.messages import Open
from common.net.sockets import Channels
from kvtransfer.links import nixl, shm
from kvtransfer.links.pull import SourcePool

log = logging.getLogger("tandem.kv")

MAX_POOLS = 64
POOL_CONNECT_S = 1.0
"""Timeout of a connection to an endpoint; an owner that is running answers much sooner."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
_PoolKey = tuple[Incarnation, str, bytes, KvLayout, int]
"""Everything announced about a pool, so that one wrong announcement does not affect the correct ones after it."""


@dataclass(frozen=True, slots=True)
class Connecting:
    """The connection to the pool is not complete: call :meth:`Sources.reach` again."""


@dataclass(slots=True)
class _Source:
    """One pool, in one of three states: connected (``pool``, last used at ``used_at``), connecting (``connection``,
    until the deadline ``until``), or backing off (not tried before ``retry_at``). Times in seconds."""

    pool: SourcePool | AttachedCudaBlocks | None = None
    connection: shm.PoolConnection | nixl.NixlPoolConnection | None = None
    until: float = 0.0
    retry_at: float = 0.0
    pause_s: float = PAUSE_S
    used_at: float = 0.0


class Sources:
    """The pools announced to one receiver: read over NIXL with ``reader``, else mapped on this host, those in a GPU's
    memory through ``calls``. A pool that no hand-off has used for ``lease_s``, as long as a hand-off may be silent, is
    released."""

    def __init__(
        self,
        channels: Channels,
        lease_s: float,
        reader: nixl.NixlReader | None = None,
        calls: DeviceCalls | None = None,
    ) -> None:
        self._channels, self.lease_s, self._reader, self._calls = channels, lease_s, reader, calls
        self._sources: OrderedDict[_PoolKey, _Source] = OrderedDict()

    def reach(
        self, announced: Open, travels: KvLayout, now: float
    ) -> SourcePool | AttachedCudaBlocks | Connecting | None:
        """Return the announced pool, whose KV has the element type of ``travels``; None if it cannot be reached now."""
        try:
            layout = replace(travels, block_size=announced.pool_block_size, head_shards=announced.pool_shards)
        except ValueError:
            return None
        key = (announced.sender, announced.pool, announced.agent, layout, announced.pool_blocks)
        source = self._sources.setdefault(key, _Source())
        self._sources.move_to_end(key)
        source.used_at = now
        self._drop_if_lost(key, source, now)
        if source.pool is None and source.connection is None and now >= source.retry_at:
            self._try(key, source, now)
        return source.pool or (Connecting() if source.connection is not None else None)

    def tick(self, now: float) -> None:
        """Poll the connections, and drop pools whose reads have failed."""
        for key, source in self._sources.items():
            self._drop_if_lost(key, source, now)
            if source.connection is not None:
                self._look(key, source, now)

    @property
    def connecting(self) -> bool:
        """Whether a connection is pending whose completion wakes no poll."""
        return any(isinstance(source.connection, nixl.NixlPoolConnection) for source in self._sources.values())

    def let_go(self, uses: Iterable[tuple[object, float]], now: float) -> None:
        """Close pools that are no longer used and, while there are more than MAX_POOLS, those unused for longest.
        ``uses`` are the pools of all running hand-offs, each with the time of the hand-off's last progress."""
        heard: dict[int, float] = {}
        for pool, at in uses:
            heard[id(pool)] = max(at, heard.get(id(pool), at))
        for key, source in list(self._sources.items()):
            source.used_at = max(source.used_at, heard.get(id(source.pool), 0.0))
            used = source.connection is not None or id(source.pool) in heard
            idle = source.pool is not None and now - source.used_at > self.lease_s
            if not used and (idle or len(self._sources) > MAX_POOLS):
                del self._sources[key]
                if source.pool is not None:
                    source.pool.close()

    def close(self) -> None:
        """Release all pools and abandon all connections. A reader is not closed: its owner does that."""
        for source in self._sources.values():
            if source.pool is not None:
                source.pool.close()
            self._turn_away(source)
        self._sources.clear()

    def _try(self, key: _PoolKey, source: _Source, now: float) -> None:
        owner, address, agent, layout, blocks = key
        try:
            if self._reader is not None:
                pool = self._reader.reach(owner, agent, layout, blocks)
                source.connection, source.until = nixl.NixlPoolConnection(pool), now + nixl.CONNECT_S
            else:
                source.connection, source.until = shm.PoolConnection(address), now + POOL_CONNECT_S
                self._channels.register(source.connection.fileno())
        except (OSError, ValueError, WireError) as error:
            self._put_off(key, source, str(error), now)
            return
        self._look(key, source, now)

    def _look(self, key: _PoolKey, source: _Source, now: float) -> None:
        assert source.connection is not None
        try:
            answer = source.connection.answer()
            if answer is None:
                if now > source.until:
                    raise OSError("the endpoint does not answer")
                return
            source.pool = self._attached(key, answer)
            source.pause_s = PAUSE_S
        except (OSError, ValueError, WireError, DeviceFailed) as error:
            self._put_off(key, source, str(error), now)
        self._turn_away(source)

    def _attached(
        self, key: _PoolKey, answer: int | DeviceDescriptors | nixl.NixlPool
    ) -> SourcePool | AttachedCudaBlocks:
        *_, layout, blocks = key
        match answer:
            case int():
                return KvMemory.attach(answer, layout, blocks)
            case DeviceDescriptors():
                if self._calls is None:
                    answer.close()
                    raise OSError("it is in the memory of a GPU, and this worker has none")
                return AttachedCudaBlocks(answer, layout, blocks, self._calls)
            case _:
                return answer

    def _drop_if_lost(self, key: _PoolKey, source: _Source, now: float) -> None:
        if source.pool is not None and source.pool.lost:
            source.pool.close()
            source.pool = None
            self._put_off(key, source, "a read has failed", now)

    def _put_off(self, key: _PoolKey, source: _Source, why: str, now: float) -> None:
        log.info("the KV pool of %s cannot be reached: %s; next try in %g s", key[0], why, source.pause_s)
        source.retry_at = now + source.pause_s
        source.pause_s = min(2 * source.pause_s, LONGEST_PAUSE_S)

    def _turn_away(self, source: _Source) -> None:
        if source.connection is not None:
            if not isinstance(source.connection, nixl.NixlPoolConnection):
                self._channels.unregister(source.connection.fileno())
            source.connection.close()
            source.connection = None
