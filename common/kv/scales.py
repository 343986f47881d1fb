"""The scales of a KV pool in float8: one per layer, KV head, and k or v.

Pure. A stored number is the value divided by its head's scale, rounded to e4m3. Because e4m3 has an exponent, a scale
moves the range (full precision from 2^-6 to 448) and changes no precision inside it. So a scale is 1 if the values seen
at start lie well inside the range, and else a power of two. Thus all workers of a model find the same scales, although
their devices round sums differently.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

LEAST_PEAK, MOST_PEAK = 1.0, 56.0
"""A head whose largest value lies between these has scale 1: it may still grow 8 times, and values 64 times smaller
keep full precision."""
_AIM = 3
"""Other heads are scaled so that their largest value lies in [2^_AIM, 2^(_AIM + 1))."""


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer: one per KV head for keys and one for values."""

    k: tuple[float, ...]
    v: tuple[float, ...]

    def shard(self, index: int, count: int) -> LayerScales:
        """Return the scales of the heads in shard ``index`` of ``count`` equal ones."""
        heads = len(self.k) // count
        mine = slice(index * heads, (index + 1) * heads)
        return LayerScales(self.k[mine], self.v[mine])


@dataclass(frozen=True)
class KvScales:
    """Scales of all layers."""

    layers: tuple[LayerScales, ...]

    @classmethod
    def for_peaks(cls, peaks: Iterable[tuple[Iterable[float], Iterable[float]]]) -> KvScales:
        """Return the scales for the largest magnitudes of the keys and of the values, per layer and head."""
        return cls(tuple(LayerScales(tuple(map(scale_for, k)), tuple(map(scale_for, v))) for k, v in peaks))

    def shard(self, index: int, count: int) -> KvScales:
        """Return the scales of the heads in shard ``index`` of ``count`` equal ones."""
        return KvScales(tuple(each.shard(index, count) for each in self.layers))

    @property
    def fingerprint(self) -> str:
        """A hash of all scales. Pools with different ones cannot exchange bytes."""
        text = "|".join(f"{layer.k},{layer.v}" for layer in self.layers)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def scaled_heads(self) -> int:
        """How many scales are not 1."""
        return sum(scale != 1.0 for layer in self.layers for scale in (*layer.k, *layer.v))


def scale_for(peak: float) -> float:
    """Return the scale of a head whose largest magnitude is ``peak``; 1 for one without any finite nonzero value."""
    if not math.isfinite(peak) or peak == 0.0 or LEAST_PEAK <= peak <= MOST_PEAK:
        return 1.0
    return 2.0 ** (math.frexp(peak)[1] - 1 - _AIM)
