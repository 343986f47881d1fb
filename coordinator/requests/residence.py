"""Residence times of requests on workers, and a forecast of when the next places there become free.

Pure: time comes in as an argument. A place frees when a request on a worker ends. The forecast simulates one future:
each running request ends after one of the measured residence times that exceed its age, the next request takes its
place, and so on. The measured times include prefill, hand-off, decoding and clients that disconnect.
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
"""Added as one residence time until ENOUGH have been measured, since the first request after a start may be a short
trial."""
OLDER_FACTOR = 2.0
"""A request whose age exceeds all measured times is expected to run for this many times its age longer, or to its own
limit if that comes first."""
_STEP = (math.sqrt(5) - 1) / 2
"""The fractional parts of its multiples fill [0, 1) evenly for any count: a low-discrepancy sequence instead of
randomness."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request on a worker: its age there in seconds, and a function that returns the seconds until its own limit ends
    it at the latest (inf if it has none)."""

    age_s: float
    limit_s: Callable[[], float]


class Residence:
    """Keeps the last REMEMBERED residence times, in seconds."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=REMEMBERED)

    def ended(self, seconds: float) -> None:
        """Record that a request left its workers ``seconds`` after it was placed."""
        self._seen.append(seconds)

    def forecast(self, running: Iterable[Running]) -> Iterator[float]:
        """Yield, without end, the seconds until the next place frees, in ascending order. The values never
        decrease. If ``running`` is empty, one place is assumed, just taken by the longest request measured."""
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
    """Return the seconds until ``running`` ends; ``draw`` in [0, 1) selects among the times in ``seen`` that exceed its
    age."""
    first = bisect_right(seen, running.age_s)
    if first == len(seen):
        return min(OLDER_FACTOR * running.age_s, running.limit_s())
    return seen[first + int(draw * (len(seen) - first))] - running.age_s
