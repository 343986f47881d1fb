"""How many bytes the senders of one receiver may have on their way, in all, per peer and per transfer.

Pure. A transfer's credit is a place in its byte stream before which its sender may begin frames (much as QUIC's
limits, RFC 9000 section 4). The place only ever moves forward, so what the sender may have on its way is exactly that
place less what has landed, and lost or overtaken answers change nothing.

A transfer that has sent nothing yet may wait long for its prompt's turn. All of those together hold half of the bytes
at most; the other half turns over among the transfers that send, in equal shares. Nothing here can lock up, because a
sender may always have one frame on its way, whatever its credit.
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
    """Lends at most ``total_bytes`` in all, ``peer_bytes`` to the transfers of one peer, ``transfer_bytes`` to one."""

    def __init__(
        self, total_bytes: int = TOTAL_BYTES, peer_bytes: int = PEER_BYTES, transfer_bytes: int = TRANSFER_BYTES
    ) -> None:
        self.total_bytes, self.peer_bytes, self.transfer_bytes = total_bytes, peer_bytes, transfer_bytes
        self._accounts: dict[TransferId, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def held(self, peer: Hashable | None = None) -> int:
        """Bytes lent and not landed, by one peer or in all."""
        return sum(account.held for account in self._accounts.values() if peer is None or account.peer == peer)

    def open(self, transfer: TransferId, peer: Hashable) -> int:
        """Credit in bytes for a transfer that begins; the same again if it is open already."""
        account = self._accounts.get(transfer)
        if account is None:
            account = self._accounts[transfer] = _Account(peer)
            account.limit = self._share(account, self.total_bytes // 2, self.peer_bytes // 2)
        return account.held

    def landed(self, transfer: TransferId, landed_bytes: int) -> int:
        """Credit in bytes beyond ``landed_bytes``, which is what has arrived of an open transfer so far."""
        account = self._accounts[transfer]
        if landed_bytes > account.landed:
            account.landed = landed_bytes
            share = self._share(account, self.total_bytes, self.peer_bytes)
            account.limit = max(account.limit, landed_bytes + share)
        return account.held

    def close(self, transfer: TransferId) -> None:
        """The transfer is over, in whatever way. Unknown ones are fine."""
        self._accounts.pop(transfer, None)

    def _share(self, mine: _Account, total: int, peer_total: int) -> int:
        """What ``mine`` may hold of these sums: no more than is free, and than its like would get as well."""
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
