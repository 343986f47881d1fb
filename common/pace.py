"""How long a worker's steps take, so that a long one can be told from one that hangs.

Pure. A step has two sizes, both in powers of two: its tokens, for which linear layers take time, and the positions
that these attend to. Durations of the last steps are remembered by size. What is expected is the longest of the same
size or below; of a size not seen yet, what a larger one took; beyond all that was seen, as much more as it is larger.
Before anything was seen nothing is known, and the first step may warm up for long (a worker with a model has warmed up
before it serves).
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 32
FIRST_STEP_S = 30.0


class Pace:
    """Durations of the last steps, by size."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], deque[float]] = {}
        self._longest: dict[tuple[int, int], float] = {}
        """Of each of these."""
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self.longest = self.last = 0.0
        """The longest of the last steps, and the last one, in seconds; 0 before the first."""

    def took(self, tokens: int, attended: int, seconds: float) -> None:
        """A step of ``tokens`` tokens, which attend to ``attended`` positions in all, took ``seconds``."""
        size = tokens.bit_length(), attended.bit_length()
        if (same := self._sizes.get(size)) is None:
            same = self._sizes[size] = deque(maxlen=REMEMBERED)
        same.append(seconds)
        self._longest[size] = max(same)
        self._last.append(seconds)
        self.longest, self.last = max(self._last), seconds

    def expect(self, tokens: int, attended: int) -> float:
        """Seconds that such a step may well take."""
        took = self._longest
        if not took:
            return FIRST_STEP_S
        size = tokens.bit_length(), attended.bit_length()
        if size in took:
            return max(seconds for each, seconds in took.items() if each[0] <= size[0] and each[1] <= size[1])
        if larger := [seconds for each, seconds in took.items() if each[0] >= size[0] and each[1] >= size[1]]:
            return min(larger)
        beyond = max(size[0] - max(each[0] for each in took), size[1] - max(each[1] for each in took), 0)
        return float(max(took.values()) * 2.0**beyond)
