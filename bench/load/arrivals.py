"""Arrival times of an open-loop load, as ``vllm bench serve`` defines them.

Pure. Gaps between requests are Gamma distributed with shape ``burstiness`` and mean 1/rate (1: a Poisson process;
smaller: bursts; inf: constant gaps). The times are then scaled so that the last request leaves at count/rate; runs with
different seeds therefore offer the same load. With a ramp nothing is scaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

RampStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A request rate that goes from ``start`` to ``end`` (requests per second) over the requests of a run."""

    strategy: RampStrategy
    start: float
    end: float

    def rate(self, index: int, count: int) -> float:
        """Return the rate, in requests per second, at request ``index`` of ``count``."""
        progress = index / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def arrivals(
    count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0, ramp: Ramp | None = None
) -> list[float]:
    """Return the send time of each of ``count`` requests, ascending, in seconds after the start.

    ``rate`` is in requests per second; inf sends all at once. The gaps are drawn one by one, as vLLM's client does: the
    same seed gives the same arrivals as there."""
    rates = [ramp.rate(index, count) if ramp else rate for index in range(count)]
    generator = np.random.RandomState(seed)
    times: list[float] = []
    now = 0.0
    for each in rates:
        now += _gap(generator, each, burstiness)
        times.append(now)
    if ramp is None and count and now > 0:
        scale = count / rate / now
        return [time * scale for time in times]
    return times


def _gap(generator: np.random.RandomState, rate: float, burstiness: float) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1.0 / rate
    return float(generator.gamma(burstiness, 1.0 / (rate * burstiness)))
