"""The pools of senders that a receiver reads, as far as they are within its reach.

Nothing here waits. At a door it is knocked, and whether somebody has opened is looked at between other things: the
sender may be stopped, and streams must not stand still for it. Over NIXL the first read is the knock. What could not be
reached, or read any more, is tried again after a pause that doubles, since the cause may be gone by then. A pool is
held no longer than a lease after its last use: it may be what is left of a process that died, and all its memory with
it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from common.core.errors import WireError
from common.core.ids import Incarnation
from common.kv.layout import KvLayout
from common.kv.storage.host import KvMemory
from common.net.messages import Open
from common.net.sockets import Channels
from kvtransfer.links import nixl, shm
from kvtransfer.links.pull import SourcePool

log = logging.getLogger("tandem.kv")

MAX_POOLS = 64
POOL_CONNECT_S = 1.0
"""A door that is not opened by then belongs to somebody who stands still."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
_PoolKey = tuple[Incarnation, str, bytes, KvLayout, int]
"""All that was said about a pool, so that one wrong announcement does not spoil the right ones after it."""


@dataclass(frozen=True, slots=True)
class Connecting:
    """The pool may come within reach any moment: ask again."""


@dataclass(slots=True)
class _Source:
    """One pool: within reach and last of use at ``used_at``, knocked at until ``until``, or not tried before
    ``retry_at``."""

    pool: SourcePool | None = None
    connection: shm.PoolConnection | nixl.NixlPoolConnection | None = None
    until: float = 0.0
    retry_at: float = 0.0
    pause_s: float = PAUSE_S
    used_at: float = 0.0


class Sources:
    """The pools that were announced to one receiver; ``reader`` reaches them over NIXL, else they are on this host.
    What no hand-off has used for ``lease_s``, which is how long one may be silent, is let go."""

    def __init__(self, channels: Channels, lease_s: float, reader: nixl.NixlReader | None = None) -> None:
        self._channels, self.lease_s, self._reader = channels, lease_s, reader
        self._sources: OrderedDict[_PoolKey, _Source] = OrderedDict()

    def reach(self, announced: Open, travels: KvLayout, now: float) -> SourcePool | Connecting | None:
        """The announced pool, whose KV ``travels`` in that layout's element type; None if it is out of reach now."""
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
        """Looks whether doors were opened, and gives up what cannot be read any more."""
        for key, source in self._sources.items():
            self._drop_if_lost(key, source, now)
            if source.connection is not None:
                self._look(key, source, now)

    @property
    def knocking(self) -> bool:
        """Whether somebody may open any moment, without waking who waits."""
        return any(isinstance(source.connection, nixl.NixlPoolConnection) for source in self._sources.values())

    def let_go(self, uses: Iterable[tuple[SourcePool, float]], now: float) -> None:
        """Closes what is not used any more, and what was longest out of use if there still are too many. ``uses``: the
        pools of all hand-offs that go on, and when each of these was last heard of (within the lease)."""
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
                    raise OSError("nobody opens")
                return
            *_, layout, blocks = key
            source.pool = KvMemory.attach(answer, layout, blocks) if isinstance(answer, int) else answer
            source.pause_s = PAUSE_S
        except (OSError, ValueError, WireError) as error:
            self._put_off(key, source, str(error), now)
        self._turn_away(source)

    def _drop_if_lost(self, key: _PoolKey, source: _Source, now: float) -> None:
        if source.pool is not None and source.pool.lost:
            source.pool.close()
            source.pool = None
            self._put_off(key, source, "a read has failed", now)

    def _put_off(self, key: _PoolKey, source: _Source, why: str, now: float) -> None:
        log.info("the KV pool of %s is out of reach: %s; the next try is in %g s", key[0], why, source.pause_s)
        source.retry_at = now + source.pause_s
        source.pause_s = min(2 * source.pause_s, LONGEST_PAUSE_S)

    def _turn_away(self, source: _Source) -> None:
        if source.connection is not None:
            if not isinstance(source.connection, nixl.NixlPoolConnection):
                self._channels.unregister(source.connection.fileno())
            source.connection.close()
            source.connection = None
