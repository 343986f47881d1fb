"""Scales real-time bounds in tests by how much slower this machine is than the reference machine.

Do not scale times that the product itself promises: tests check those on a virtual clock, or add an allowance for the
machine to them and scale only the allowance.
"""

from __future__ import annotations

import statistics
import time
from functools import cache

REFERENCE_S = 0.01
"""Seconds that :func:`work` takes on the reference machine: two quiet cores of a first-generation AMD EPYC, 2 GHz."""
MOST = 20.0
"""The largest factor. A bound scaled by more would no longer find anything."""


def work() -> None:
    """Do a fixed amount of pure Python work: tests wait mostly for the interpreter."""
    seen: dict[int, str] = {}
    for number in range(30_000):
        seen[number * 7919 % 1009] = str(number)


@cache
def slowness() -> float:
    """Return the factor, from 1 to ``MOST``. It is measured once per process in wall time, so load from other processes
    counts."""
    took = []
    for _ in range(9):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(MOST, max(1.0, statistics.median(took) / REFERENCE_S))


def scaled(seconds: float) -> float:
    """Scale a real-time bound in seconds to this machine."""
    return seconds * slowness()
