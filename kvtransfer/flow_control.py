"""Limits on the bytes in flight to one receiver: in total, per peer and per transfer.

Pure. A transfer's credit is an offset in its byte stream; its sender may begin frames before that offset (much as with
QUIC's limits, RFC 9000 section 4). The offset only moves forward. The bytes in flight are therefore at most that offset
minus the bytes landed, and lost or reordered answers do no harm.

A transfer that has sent nothing yet may wait long for its prompt to be computed. All such transfers together hold at
most half of the bytes; the transfers that are sending share the rest equally. There is no deadlock, because a sender
may always have one frame in flight, whatever its credit.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from common.core.ids import TransferId

TOTAL_BYTES = 256 << 20
PEER_BYTES = 128 << 20
TRANSFER_BYTES = 16 << 20


@dataclass(slots=True)
class _Account:
    peer: Hashable
    limit: int = 0
    landed: int = 0

    @property
    def held(self) -> int:
        return max(0, self.limit - self.landed)

    @property
    def idle(self) -> bool:
        return not self.landed


class CreditBook:
    """Lends credit: at most ``total_bytes`` in all, ``peer_bytes`` per peer and ``transfer_bytes`` per transfer."""

    def __init__(
        self, total_bytes: int = TOTAL_BYTES, peer_bytes: int = PEER_BYTES, transfer_bytes: int = TRANSFER_BYTES
    ) -> None:
        self.total_bytes, self.peer_bytes, self.transfer_bytes = total_bytes, peer_bytes, transfer_bytes
        self._accounts: dict[TransferId, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def held(self, peer: Hashable | None = None) -> int:
        """Return the bytes lent and not landed, of one peer or in all."""
        return sum(account.held for account in self._accounts.values() if peer is None or account.peer == peer)

    def open(self, transfer: TransferId, peer: Hashable) -> int:
        """Open a transfer and return its credit in bytes; idempotent."""
        account = self._accounts.get(transfer)
        if account is None:
            account = self._accounts[transfer] = _Account(peer)
            account.limit = self._share(account, self.total_bytes // 2, self.peer_bytes // 2)
        return account.held

    def landed(self, transfer: TransferId, landed_bytes: int) -> int:
        """Record that ``landed_bytes`` of an open transfer have landed so far; return its credit in bytes beyond
        them."""
        account = self._accounts[transfer]
        if landed_bytes > account.landed:
            account.landed = landed_bytes
            share = self._share(account, self.total_bytes, self.peer_bytes)
            account.limit = max(account.limit, landed_bytes + share)
        return account.held

    def close(self, transfer: TransferId) -> None:
        """End a transfer and take its credit back; unknown transfers are ignored."""
        self._accounts.pop(transfer, None)

    def _share(self, mine: _Account, total: int, peer_total: int) -> int:
        """Return what ``mine`` may hold: at most what is free, and at most an equal share among transfers like it."""
        others = [account for account in self._accounts.values() if account is not mine]
        of_peer = [account for account in others if account.peer == mine.peer]
        share = self.transfer_bytes
        for lendable, rivals in ((total, others), (peer_total, of_peer)):
            if mine.idle:
                share = min(share, lendable - sum(each.held for each in rivals if each.idle), self._free(mine))
                continue
            sending = 1 + sum(not each.idle for each in rivals)
            fair = (lendable - sum(each.held for each in rivals if each.idle)) // sending
            share = min(share, fair, lendable - sum(each.held for each in rivals))
        return max(0, share)

    def _free(self, mine: _Account) -> int:
        return min(self.total_bytes - self.held(), self.peer_bytes - self.held(mine.peer))
