"""Who has sent messages that make no sense, and who is not listened to any more. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

STRIKES = 3
REMEMBERED = 4096
"""Peers; who has not been heard of for longest is forgotten first."""


class PeerBanList:
    """Counts bad messages per peer; at the third one (``most``) the peer is cut off for good."""

    def __init__(self, most: int = STRIKES) -> None:
        self._most = most
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self.cut_off = 0
        """Peers that have been cut off."""

    def out(self, peer: Hashable) -> bool:
        """Whether ``peer`` is cut off."""
        return self._counts.get(peer, 0) >= self._most

    def strike(self, peer: Hashable) -> bool:
        """Counts a bad message of ``peer``; True if this is the one that cuts it off."""
        count = self._counts[peer] = self._counts.get(peer, 0) + 1
        self._counts.move_to_end(peer)
        if len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)
        self.cut_off += count == self._most
        return count == self._most
