"""Fault injection on the sending side, for tests: damages the frames of any other link.

The receiving side stays the real one. :class:`FaultyLink` damages payloads. :class:`FaultyChannels` loses, duplicates
and reorders whole frames of any link. The random generator is an argument and no clock is read, so that one seed gives
one history of faults.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import zmq

from common.core.ids import BlockId, TransferId
from common.net.keys import Party
from common.net.sockets import Channels
from kvtransfer.frames import Rectangle
from kvtransfer.links.base import Made, SendLink


@dataclass(frozen=True)
class FaultRates:
    """Probabilities per frame.

    For a link: a bit is flipped (``corrupt``), the end cut off (``truncate``), the previous frame's payload sent
    instead (``swap``). For channels: lost (``drop``), sent twice (``duplicate``), sent after the next frame that is
    neither lost nor delayed (``delay``).
    """

    corrupt: float = 0.0
    truncate: float = 0.0
    swap: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0


class FaultyLink:
    """A link whose payloads are damaged. ``happened`` counts the injected faults by name."""

    def __init__(self, inner: SendLink, rates: FaultRates, rng: Random) -> None:
        self.inner, self.rates, self.rng = inner, rates, rng
        self.name, self.grain = inner.name, inner.grain
        self.happened: Counter[str] = Counter()
        self._before = b""

    def payload(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> Made | None:
        if (made := self.inner.payload(transfer, table, cells)) is None:
            return None
        payload, size, checksum = made
        right = bytes(payload)
        sent, self._before = self._spoiled(right), right
        return sent, size, checksum

    def checksum(self, transfer: TransferId, table: Sequence[BlockId], cells: Rectangle) -> int | None:
        return self.inner.checksum(transfer, table, cells)

    def forget(self, transfer: TransferId) -> None:
        self.inner.forget(transfer)

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


class FaultyChannels(Channels):
    """The channels of a prefill worker with faults in its KV frames; messages always arrive. ``happened`` counts the
    injected faults by name."""

    def __init__(self, rates: FaultRates, rng: Random) -> None:
        super().__init__()
        self.rates, self.rng = rates, rng
        self.happened: Counter[str] = Counter()

    def dealer(
        self,
        address: str,
        name: bytes,
        *,
        to: Party = "coordinator",
        watch: Callable[[zmq.Socket[Any]], object] = lambda socket: None,
    ) -> zmq.Socket[Any]:
        socket = super().dealer(address, name, to=to, watch=watch)
        return cast("zmq.Socket[Any]", _FaultyLine(socket, self)) if to == "decode" else socket

    def register(self, what: Any) -> None:
        super().register(what.socket if isinstance(what, _FaultyLine) else what)

    def unregister(self, what: Any) -> None:
        super().unregister(what.socket if isinstance(what, _FaultyLine) else what)

    def strikes(self, fault: str) -> bool:
        """Decide whether ``fault`` happens to the current frame."""
        struck = bool(self.rng.random() < getattr(self.rates, fault))
        self.happened[fault] += struck
        return struck


class _FaultyLine:
    """A socket to a decode worker; everything but sending goes to the real one."""

    def __init__(self, socket: zmq.Socket[Any], channels: FaultyChannels) -> None:
        self.socket, self.channels = socket, channels
        self._late: list[tuple[list[Any], bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)

    def send_multipart(self, parts: list[Any], flags: int = 0, copy: bool = True) -> None:
        if len(parts) == 1:  # a message
            self.socket.send_multipart(parts, flags, copy=copy)
        elif self.channels.strikes("drop"):
            return
        elif self.channels.strikes("delay"):
            self._late.append((parts, copy))
        else:
            self.socket.send_multipart(parts, flags, copy=copy)
            again = [(parts, copy)] if self.channels.strikes("duplicate") else []
            late, self._late = [*again, *self._late], []
            with contextlib.suppress(zmq.Again):  # a delayed frame may be lost too
                for each, copied in late:
                    self.socket.send_multipart(each, flags, copy=copied)
