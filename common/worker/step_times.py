"""Expected durations of a worker's steps, so that a long step can be told from one that hangs.

Pure. The size of a step is a pair, each part rounded to powers of two: its tokens, which determine the time of linear
layers, and the positions to which they attend. The last durations are remembered by size. For a size already seen, the
longest one of that size or smaller is expected; for a size not seen yet, the shortest among the longest ones of larger
sizes; beyond all sizes seen, the longest of all, doubled for each power of two beyond. Before the first step nothing is
known, and that step may warm up for long (a worker with a model warms up before it serves).
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 32
"""Durations remembered per size, and over all sizes."""
FIRST_STEP_S = 30.0
"""Expected duration in seconds before any is known."""


class _Last:
    """The last durations and the longest of them; they are searched only when the longest one drops out."""

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
    """Durations of the last steps in seconds, by size."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Last] = {}
        self._all = _Last()
        self.last = 0.0
        """Duration of the last step in seconds; 0 before the first."""

    @property
    def longest(self) -> float:
        """Longest duration of the last REMEMBERED steps, in seconds; 0 before the first."""
        return self._all.longest

    def took(self, tokens: int, attended: int, seconds: float) -> None:
        """Record that a step of ``tokens`` tokens, which attend to ``attended`` positions in all, took ``seconds``."""
        size = tokens.bit_length(), attended.bit_length()
        if (same := self._sizes.get(size)) is None:
            same = self._sizes[size] = _Last()
        same.add(seconds)
        self._all.add(seconds)
        self.last = seconds

    def expect(self, tokens: int, attended: int) -> float:
        """Return an upper estimate in seconds for a step of ``tokens`` tokens, attending to ``attended`` positions."""
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
