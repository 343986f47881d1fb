"""Reservations: blocks kept for KV that is on its way.

Pure. A reservation takes all blocks of its prompt before a byte may leave prefill, and pins the prefix that decode has
in its own cache, so only the rest travels. When blocks are short, reservations wait here in order of arrival. Sequences
parked by preemption come before them, and so do prompts computed here that waited for blocks when a reservation came.

    asked ── blocks ──► granted ── claim ──► a running sequence         asked | granted ── drop ──► gone
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from common.core.ids import TransferId, transfer_holder
from common.core.request import Request
from common.core.sequence import Sequence
from common.kv.cache import KvCache
from common.kv.prefix import ChainKey
from common.kv.table import BlockTable
from common.net.messages import Peer


@dataclass(slots=True)
class Reservation:
    """One hand-off that this worker expects from ``peer``. ``asked_at``: when it arrived, in seconds. ``table`` is None
    while it waits for blocks. ``chain`` keeps its prefix keys between attempts to grant it."""

    request: Request
    sequence: Sequence
    asked_at: float
    peer: Peer
    table: BlockTable | None = None
    chain: list[ChainKey] = field(default_factory=list)

    @property
    def transfer(self) -> TransferId:
        """The id of the hand-off."""
        return self.sequence.id.transfer


class Reservations:
    """All reservations of one decode worker."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._waiting: OrderedDict[TransferId, Reservation] = OrderedDict()
        self._granted: dict[TransferId, Reservation] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._granted)

    @property
    def waiting(self) -> int:
        """Number of reservations that wait for blocks."""
        return len(self._waiting)

    def ask(self, reservation: Reservation) -> None:
        """Queue a reservation until :meth:`grant` finds blocks for it."""
        self._waiting[reservation.transfer] = reservation

    def grant(self, spare_blocks: int, asked_before: float = math.inf) -> Reservation | None:
        """Take blocks for the oldest waiting reservation and return it, leaving ``spare_blocks`` for running sequences
        to grow. None if blocks are short, or if it did not arrive before ``asked_before``."""
        if not self._waiting:
            return None
        transfer, reservation = next(iter(self._waiting.items()))
        if reservation.asked_at >= asked_before:
            return None
        tokens = reservation.sequence.tokens
        holder, salt = transfer_holder(transfer), reservation.request.cache_salt
        table = self._cache.open(holder, tokens, salt, reservation.chain, reservation.peer.dtype)
        if table.lacking(len(tokens)) + spare_blocks > self._cache.pool.available:
            self._cache.close(table)
            return None
        self._cache.grow(table, len(tokens))
        reservation.table = table
        del self._waiting[transfer]
        self._granted[transfer] = reservation
        return reservation

    def claim(self, transfer: TransferId) -> Reservation | None:
        """Return and forget a granted reservation whose KV has landed; the caller owns its table. None if unknown."""
        return self._granted.pop(transfer, None)

    def drop(self, transfer: TransferId) -> bool:
        """Forget a reservation and return its blocks to the pool; False if unknown."""
        if self._waiting.pop(transfer, None) is not None:
            return True
        reservation = self._granted.pop(transfer, None)
        if reservation is None or reservation.table is None:
            return False
        self._cache.close(reservation.table)
        return True
