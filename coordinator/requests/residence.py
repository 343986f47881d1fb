"""Residence times of requests at workers, and a forecast of when the next places there become free.

Pure: time comes in as an argument. A place frees when a request at a worker ends, so the forecast is one simulated
future: each running request ends after one of the measured residence times that are longer than its age, the next one
takes its place, and so on. Prefill, hand-off, decoding and clients that hang up are all in the measured times.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

REMEMBERED = 64
ENOUGH = 8
ASSUMED_S = 5.0
"""Counts as one residence time until ENOUGH were measured: the first request after a start may be a short trial."""
OLDER_FACTOR = 2.0
"""A request whose age exceeds all measured times is expected to go on for its age times this, or to its own limit."""
_STEP = (math.sqrt(5) - 1) / 2
"""Fractions of multiples of the golden ratio fill [0, 1) evenly however many are taken: draws without randomness."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request at a worker: its age there, and a function that returns the seconds after which its own limit ends it
    at the latest (inf if it has none)."""

    age_s: float
    limit_s: Callable[[], float]


class Residence:
    """The last REMEMBERED residence times, in seconds."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=REMEMBERED)

    def ended(self, seconds: float) -> None:
        """Note that a request has left its workers ``seconds`` after it was placed there."""
        self._seen.append(seconds)

    def forecast(self, running: Iterable[Running]) -> Iterator[float]:
        """Yield, without end and never falling, in how many seconds the first place frees, the second, and so on. If
        ``running`` is empty one place is assumed, taken just now by the longest request that was measured."""
        seen = sorted(self._seen)
        if len(seen) < ENOUGH:
            insort(seen, ASSUMED_S)
        draws = (number * _STEP % 1.0 for number in itertools.count(1))
        ends = [_rest_s(each, seen, next(draws)) for each in running] or [seen[-1]]
        heapq.heapify(ends)
        while True:
            yield ends[0]
            heapq.heapreplace(ends, ends[0] + seen[int(next(draws) * len(seen))])


def _rest_s(running: Running, seen: list[float], draw: float) -> float:
    """Seconds until ``running`` ends; ``draw`` in [0, 1) chooses among the times of ``seen`` that exceed its age."""
    first = bisect_right(seen, running.age_s)
    if first == len(seen):
        return min(OLDER_FACTOR * running.age_s, running.limit_s())
    return seen[first + int(draw * (len(seen) - first))] - running.age_s
