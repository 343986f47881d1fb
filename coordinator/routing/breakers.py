"""Workers that keep failing, and pairs whose hand-offs do, are left alone for a while, then tried with one request.

    CLOSED ── 3 failures in 10 s ──► OPEN ── cool-down over ──► HALF_OPEN ── success ──► CLOSED
                                      ▲  (1 s, doubling to 30 s)    │
                                      └───────── failure ───────────┘

Pure: time comes in as an argument. Nothing stays broken after its cause is gone: a cool-down ends by itself, and one
success forgets everything. A peer that never failed has no entry.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from common.core.ids import Incarnation, RequestId

FAILURES = 3
WITHIN_S = 10.0
FIRST_COOL_DOWN_S = 1.0
LONGEST_COOL_DOWN_S = 30.0


class Pair(NamedTuple):
    """A prefill worker and the decode worker that it ships to."""

    prefill: Incarnation
    decode: Incarnation


class Alone(NamedTuple):
    """A worker by itself."""

    worker: Incarnation


Peer = Pair | Alone


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(slots=True)
class _Breaker:
    state: BreakerState = BreakerState.CLOSED
    failures: deque[float] = field(default_factory=lambda: deque(maxlen=FAILURES))
    cool_down_s: float = FIRST_COOL_DOWN_S
    opens_until: float = 0.0
    probe: RequestId | None = None
    """Half open, and this request, which tries it, is on its way."""

    def open(self, now: float, cool_down_s: float) -> None:
        self.state, self.probe = BreakerState.OPEN, None
        self.cool_down_s = min(cool_down_s, LONGEST_COOL_DOWN_S)
        self.opens_until = now + self.cool_down_s


class Breakers:
    """One breaker per pair and per worker. Every placement ends for each of them in exactly one of :meth:`succeeded`,
    :meth:`failed` and :meth:`dropped`."""

    def __init__(self) -> None:
        self._breakers: dict[Peer, _Breaker] = {}

    @property
    def calm(self) -> bool:
        """Whether nothing has failed since its last success."""
        return not self._breakers

    def allows(self, peer: Peer) -> bool:
        """Whether a request may be placed on ``peer``, as of the last :meth:`tick`."""
        breaker = self._breakers.get(peer)
        if breaker is None or breaker.state is BreakerState.CLOSED:
            return True
        return breaker.state is BreakerState.HALF_OPEN and breaker.probe is None

    def state(self, peer: Peer) -> BreakerState:
        breaker = self._breakers.get(peer)
        return breaker.state if breaker else BreakerState.CLOSED

    @property
    def open(self) -> int:
        """Pairs and workers that are not used as usual."""
        return sum(breaker.state is not BreakerState.CLOSED for breaker in self._breakers.values())

    def tick(self, now: float) -> bool:
        """Ends cool-downs; whether there was one."""
        ended = False
        for breaker in self._breakers.values():
            if breaker.state is BreakerState.OPEN and now >= breaker.opens_until:
                breaker.state, ended = BreakerState.HALF_OPEN, True
        return ended

    def placed(self, peer: Peer, request: RequestId) -> None:
        """``request`` was placed on ``peer``: of a half-open one it is the only one."""
        breaker = self._breakers.get(peer)
        if breaker is not None and breaker.state is BreakerState.HALF_OPEN:
            breaker.probe = request

    def succeeded(self, peer: Peer) -> bool:
        """A hand-off was accepted, a worker has computed; whether ``peer`` may be used again."""
        breaker = self._breakers.pop(peer, None)
        return breaker is not None and breaker.state is not BreakerState.CLOSED

    def failed(self, peer: Peer, request: RequestId, now: float) -> None:
        """``request`` failed there. Those that were on their way when it opened say nothing new."""
        breaker = self._breakers.setdefault(peer, _Breaker())
        match breaker.state:
            case BreakerState.CLOSED:
                breaker.failures.append(now)
                if len(breaker.failures) == FAILURES and now - breaker.failures[0] <= WITHIN_S:
                    breaker.open(now, FIRST_COOL_DOWN_S)
            case BreakerState.HALF_OPEN if breaker.probe == request:
                breaker.open(now, 2 * breaker.cool_down_s)

    def dropped(self, peer: Peer, request: RequestId) -> None:
        """``request`` left ``peer`` before its hand-off had an end: if it was the one that tries, the next one may."""
        breaker = self._breakers.get(peer)
        if breaker is not None and breaker.probe == request:
            breaker.probe = None

    def forget(self, worker: Incarnation) -> None:
        """The worker is gone; a restarted one begins anew."""
        for peer in [peer for peer in self._breakers if worker in peer]:
            del self._breakers[peer]
