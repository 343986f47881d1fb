"""Circuit breakers for workers that keep failing and for pairs whose hand-offs keep failing.

    CLOSED ── 3 failures in 10 s ──► OPEN ── cool-down over ──► HALF_OPEN ── success ──► CLOSED
                                      ▲  (1 s, doubling to 30 s)    │
                                      └───────── failure ───────────┘

Pure: time comes in as an argument. An open breaker excludes its worker or pair from placement; half open, it admits one
request as a probe. No breaker stays open after the cause is gone: a cool-down ends by itself, and one success deletes
the entry. A peer that never failed has no entry.
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
    """A prefill worker and the decode worker that receives its KV."""

    prefill: Incarnation
    decode: Incarnation


class SingleWorker(NamedTuple):
    """A single worker, as the key of a breaker beside Pair."""

    worker: Incarnation


BreakerKey = Pair | SingleWorker


class BreakerState(Enum):
    """The states of a circuit breaker; the diagram above shows the transitions."""

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
    """The request that probes the half-open breaker and has not ended yet."""

    def open(self, now: float, cool_down_s: float) -> None:
        """Open the breaker for ``cool_down_s`` seconds, at most LONGEST_COOL_DOWN_S."""
        self.state, self.probe = BreakerState.OPEN, None
        self.cool_down_s = min(cool_down_s, LONGEST_COOL_DOWN_S)
        self.opens_until = now + self.cool_down_s


class Breakers:
    """One breaker per pair and per worker. Every call of :meth:`placed` is followed by :meth:`succeeded`,
    :meth:`failed` or :meth:`dropped` for the same peer."""

    def __init__(self) -> None:
        self._breakers: dict[BreakerKey, _Breaker] = {}

    @property
    def calm(self) -> bool:
        """Whether no peer has failed since its last success."""
        return not self._breakers

    def allows(self, peer: BreakerKey) -> bool:
        """Return whether a request may be placed on ``peer``, as of the last :meth:`tick`."""
        breaker = self._breakers.get(peer)
        if breaker is None or breaker.state is BreakerState.CLOSED:
            return True
        return breaker.state is BreakerState.HALF_OPEN and breaker.probe is None

    def state(self, peer: BreakerKey) -> BreakerState:
        """Return the state as of the last :meth:`tick`; CLOSED for a peer that has not failed."""
        breaker = self._breakers.get(peer)
        return breaker.state if breaker else BreakerState.CLOSED

    @property
    def open(self) -> int:
        """Number of pairs and workers whose breaker is not closed."""
        return sum(breaker.state is not BreakerState.CLOSED for breaker in self._breakers.values())

    def tick(self, now: float) -> bool:
        """Make breakers half open whose cool-down is over; return whether there were any."""
        ended = False
        for breaker in self._breakers.values():
            if breaker.state is BreakerState.OPEN and now >= breaker.opens_until:
                breaker.state, ended = BreakerState.HALF_OPEN, True
        return ended

    def placed(self, peer: BreakerKey, request: RequestId) -> None:
        """Note that ``request`` was placed on ``peer``; if the breaker is half open, the request is its probe."""
        breaker = self._breakers.get(peer)
        if breaker is not None and breaker.state is BreakerState.HALF_OPEN:
            breaker.probe = request

    def succeeded(self, peer: BreakerKey) -> bool:
        """Close the breaker after an accepted hand-off (of a pair) or computed tokens (of a worker); return whether it
        was open or half open."""
        breaker = self._breakers.pop(peer, None)
        return breaker is not None and breaker.state is not BreakerState.CLOSED

    def failed(self, peer: BreakerKey, request: RequestId, now: float) -> None:
        """Note that ``request`` failed on ``peer``. Requests that were already there when the breaker opened are
        ignored: only the probe counts then."""
        breaker = self._breakers.setdefault(peer, _Breaker())
        match breaker.state:
            case BreakerState.CLOSED:
                breaker.failures.append(now)
                if len(breaker.failures) == FAILURES and now - breaker.failures[0] <= WITHIN_S:
                    breaker.open(now, FIRST_COOL_DOWN_S)
            case BreakerState.HALF_OPEN if breaker.probe == request:
                breaker.open(now, 2 * breaker.cool_down_s)

    def dropped(self, peer: BreakerKey, request: RequestId) -> None:
        """Note that ``request`` left ``peer`` without a result; if it was the probe, the next request may be."""
        breaker = self._breakers.get(peer)
        if breaker is not None and breaker.probe == request:
            breaker.probe = None

    def forget(self, worker: Incarnation) -> None:
        """Delete the breakers of a worker that is gone."""
        for peer in [peer for peer in self._breakers if worker in peer]:
            del self._breakers[peer]
