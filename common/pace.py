"""How long a worker's steps take, so that a long one can be told from one that hangs.

Pure. Durations are remembered by the size of the step, in powers of two of its tokens; what is expected of a step is
the longest of its size or below among the last ones. A size that was not seen yet is extrapolated; before anything was
seen nothing is known, and the first step may warm up for long (a worker with a model has warmed up before it serves).
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 32
FIRST_STEP_S = 30.0


class Pace:
    """Durations of the last steps, by size."""

    def __init__(self) -> None:
        self._sizes: dict[int, deque[float]] = {}

    def took(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` tokens took ``seconds``."""
        self._sizes.setdefault(tokens.bit_length(), deque(maxlen=REMEMBERED)).append(seconds)

    def expect(self, tokens: int) -> float:
        """Seconds that a step of ``tokens`` tokens may well take."""
        if not self._sizes:
            return FIRST_STEP_S
        size, largest = tokens.bit_length(), max(self._sizes)
        known = [max(seconds) for each, seconds in self._sizes.items() if each <= max(size, min(self._sizes))]
        return max(known) * 2.0 ** max(0, size - largest)

    @property
    def longest(self) -> float:
        """The longest of the last steps, in seconds; 0 before the first."""
        return max((max(seconds) for seconds in self._sizes.values()), default=0.0)
