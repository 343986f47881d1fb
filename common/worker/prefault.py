"""Pre-faults the memory of KV blocks while a worker is idle, so that its steps have no page faults."""

from __future__ import annotations

import logging

from common.kv.pool import BlockPool
from common.kv.storage.cuda import Memory

log = logging.getLogger("tandem.worker")

POPULATED_BYTES = 1 << 20
"""Bytes to pre-fault per idle turn. This takes about half a millisecond, and may delay a message by as much."""


class PoolPrefault:
    """Keeps ``ahead_bytes`` bytes of never-used blocks pre-faulted, behind the blocks of ``pool`` that were used."""

    def __init__(self, memory: Memory, pool: BlockPool, ahead_bytes: int) -> None:
        self._memory, self._pool, self._ahead_bytes = memory, pool, ahead_bytes
        self._populated = 0
        """Bytes of the pool, from its start, that have been pre-faulted."""

    def advance(self) -> bool:
        """Pre-fault up to POPULATED_BYTES; return False if enough is ready."""
        size = self._memory.layout.block_bytes
        wanted = min(self._pool.peak * size + self._ahead_bytes, self._memory.blocks * size)
        if not self._ahead_bytes or self._populated >= wanted:
            return False
        last = min(self._populated + POPULATED_BYTES, wanted)
        try:
            self._memory.populate(self._populated, last)
        except OSError as error:
            log.debug("KV blocks cannot be pre-faulted: %s", error)
            last = self._memory.blocks * size
        self._populated = last
        return True
