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


class _Last:
    """The last durations, and the longest of them; all are looked at only when that one is forgotten."""

    __slots__ = ("_all", "longest")

    def __init__(self) -> None:
        self._all: deque[float] = deque(maxlen=REMEMBERED)
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        forgotten = self._all[0] if len(self._all) == REMEMBERED else 0.0
        self._all.append(seconds)
        if seconds >= self.longest:
            self.longest = seconds
        elif forgotten == self.longest:
            self.longest = max(self._all)


class StepTimeEstimator:
    """Durations of the last steps, by size."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Last] = {}
        self._all = _Last()
        self.last = 0.0
        """The last one, in seconds; 0 before the first."""

    @property
    def longest(self) -> float:
        """The longest of the last steps, in seconds; 0 before the first."""
        return self._all.longest

    def took(self, tokens: int, attended: int, seconds: float) -> None:
        """A step of ``tokens`` tokens, which attend to ``attended`` positions in all, took ``seconds``."""
        size = tokens.bit_length(), attended.bit_length()
        if (same := self._sizes.get(size)) is None:
            same = self._sizes[size] = _Last()
        same.add(seconds)
        self._all.add(seconds)
        self.last = seconds

    def expect(self, tokens: int, attended: int) -> float:
        """Seconds that such a step may well take."""
        took = self._sizes
        if not took:
            return FIRST_STEP_S
        size = tokens.bit_length(), attended.bit_length()
        if size in took:
            return max(last.longest for each, last in took.items() if each[0] <= size[0] and each[1] <= size[1])
        if larger := [last.longest for each, last in took.items() if each[0] >= size[0] and each[1] >= size[1]]:
            return min(larger)
        beyond = max(size[0] - max(each[0] for each in took), size[1] - max(each[1] for each in took), 0)
        return float(max(last.longest for last in took.values()) * 2.0**beyond)
