"""The link inside one process: the receiver pulls from a pool that it finds by its owner's incarnation.

For tests and simulations, where both sides are objects of one process: the same directions, generation checks and
checksums as between processes, without a descriptor to hand over, a clock or a thread.
"""

from __future__ import annotations

from common.ids import Incarnation
from common.kv.memory import KvMemory
from kvtransfer.links.pull import PullReceiveLink, PullSendLink

NAME = "memory"


class Pools:
    """The pools of one simulated world. A pool is withdrawn when its owner ends: who still pulls has it mapped."""

    def __init__(self) -> None:
        self._pools: dict[Incarnation, KvMemory] = {}

    def offer(self, owner: Incarnation, memory: KvMemory) -> PullSendLink:
        """The sending side for ``memory``, which others find under ``owner`` from now on."""
        self._pools[owner] = memory
        return PullSendLink(NAME, memory)

    def withdraw(self, owner: Incarnation) -> None:
        self._pools.pop(owner, None)

    def reach(self, owner: Incarnation, memory: KvMemory) -> PullReceiveLink:
        """The receiving side, from ``owner``'s pool into ``memory``; OSError if there is no such pool."""
        if owner not in self._pools:
            raise OSError(f"no pool of {owner} in this process")
        return PullReceiveLink(NAME, memory, self._pools[owner])
