"""When requests arrive: an open loop, as ``vllm bench serve`` defines it.

Pure. Gaps are Gamma distributed with shape ``burstiness`` and mean 1/rate (1: a Poisson process; smaller: bursts; inf:
a metronome); all are then scaled so that the last request leaves at count/rate, which makes runs with different seeds
offer the same load. While the rate ramps up nothing is scaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

RampStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes from ``start`` to ``end`` requests per second over the requests of a run."""

    strategy: RampStrategy
    start: float
    end: float

    def rate(self, index: int, count: int) -> float:
        progress = index / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def arrivals(
    count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0, ramp: Ramp | None = None
) -> list[float]:
    """Seconds after the start at which each of ``count`` requests is sent, ascending. ``rate`` (requests per second)
    may be inf: all at once. The same seed gives the arrivals of vLLM's client, which draws them one by one, too."""
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
