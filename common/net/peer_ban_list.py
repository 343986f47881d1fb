"""Counts malformed messages per peer and bans peers that send too many. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

STRIKES = 3
REMEMBERED = 4096
"""Peers whose count is kept; beyond that the peer whose last bad message is oldest is forgotten."""


class PeerBanList:
    """Counts bad messages per peer. The ``most``-th one (by default the third) bans the peer."""

    def __init__(self, most: int = STRIKES) -> None:
        self._most = most
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self.cut_off = 0
        """Number of peers banned so far."""

    def out(self, peer: Hashable) -> bool:
        """Return whether ``peer`` is banned."""
        return self._counts.get(peer, 0) >= self._most

    def strike(self, peer: Hashable) -> bool:
        """Count a bad message of ``peer``; return True if this one bans it."""
        count = self._counts[peer] = self._counts.get(peer, 0) + 1
        self._counts.move_to_end(peer)
        if len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)
        self.cut_off += count == self._most
        return count == self._most
