"""A link that does to its payloads what broken machines do, in front of any other: for tests and simulations.

It is the sending side, so that the receiving side is the real one. Chance is an argument (one seed is one history), and
whole frames are lost, repeated, delayed and overtaken on the network, not here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from common.ids import BlockId
from kvtransfer.frames import Rectangle
from kvtransfer.links.base import Payload, SendLink


@dataclass(frozen=True)
class FaultRates:
    """Chances per frame: a bit flipped, the end cut off, the payload of the frame before sent instead."""

    corrupt: float = 0.0
    truncate: float = 0.0
    swap: float = 0.0


class FaultyLink:
    """``happened`` counts the faults that struck, by name."""

    def __init__(self, inner: SendLink, rates: FaultRates, rng: Random) -> None:
        self.inner, self.rates, self.rng = inner, rates, rng
        self.name, self.grain = inner.name, inner.grain
        self.happened: Counter[str] = Counter()
        self._before = b""

    def payload(self, table: Sequence[BlockId], cells: Rectangle) -> tuple[Payload, int, int]:
        payload, size, checksum = self.inner.payload(table, cells)
        right = bytes(payload)
        sent, self._before = self._spoiled(right), right
        return sent, size, checksum

    def _spoiled(self, right: bytes) -> bytes:
        if self._before not in (b"", right) and self.rng.random() < self.rates.swap:
            self.happened["swap"] += 1
            return self._before
        if self.rng.random() < self.rates.truncate:
            self.happened["truncate"] += 1
            return right[: self.rng.randrange(len(right))]
        if self.rng.random() < self.rates.corrupt:
            self.happened["corrupt"] += 1
            spoiled = bytearray(right)
            spoiled[self.rng.randrange(len(spoiled))] ^= 1 << self.rng.randrange(8)
            return bytes(spoiled)
        return right
