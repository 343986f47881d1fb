"""Whether prompts pile up.

Pure. While they do, prefill is what all wait for, and the coordinator should keep off its cores; while they do not, no
stream should wait for the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable

DEEP_STEPS, SHALLOW_STEPS = 16.0, 8.0
"""They do from so many full prefill steps before a new prompt on, until there are so few: whoever comes next waits for
seconds then."""

Tell = Callable[[bool], None]
"""Hears that prompts pile up (true), or do so no more."""


class QueuePressure:
    """``tell`` hears of every change."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.deep = False

    def look(self, steps: float) -> None:
        """``steps``: how many full steps of prefill a new prompt would wait for, where it waits the longest."""
        if steps < SHALLOW_STEPS if self.deep else steps >= DEEP_STEPS:
            self.deep = not self.deep
            self._tell(self.deep)
