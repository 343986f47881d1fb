"""How much slower this machine is than the one for which bounds of real time in tests were set.

Not for promises that the product makes in its own time: those are of a virtual clock, or stand beside an allowance for
the machine, which is what grows here.
"""

from __future__ import annotations

import statistics
import time
from functools import cache

REFERENCE_S = 0.01
"""The piece of work below on the machine of the bounds: two quiet cores, AMD EPYC of the first generation at 2 GHz."""
MOST = 20.0
"""Beyond that a bound would find nothing any more."""


def work() -> None:
    """What tests wait for is mostly the interpreter."""
    seen: dict[int, str] = {}
    for number in range(30_000):
        seen[number * 7919 % 1009] = str(number)


@cache
def slowness() -> float:
    """From 1 to ``MOST``; measured once per process, by the clock on the wall: neighbours that take the cores count."""
    took = []
    for _ in range(9):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(MOST, max(1.0, statistics.median(took) / REFERENCE_S))


def scaled(seconds: float) -> float:
    """A bound of real time, in seconds, for this machine."""
    return seconds * slowness()
