"""Queue pressure: whether prompts are piling up in front of prefill.

Pure. While they are, prefill is the bottleneck and the coordinator should stay off its cores; otherwise no stream
should wait for the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable

DEEP_STEPS, SHALLOW_STEPS = 16.0, 8.0
"""Pressure begins when a new prompt would wait for at least DEEP_STEPS full prefill steps, which means seconds, and
ends when it would wait for fewer than SHALLOW_STEPS."""

OnChange = Callable[[bool], None]
"""Called with True when prompts begin to pile up and with False when they no longer do."""


class QueuePressure:
    """Detects queue pressure with hysteresis and calls ``report`` at every change."""

    def __init__(self, report: OnChange) -> None:
        self._report = report
        self.deep = False

    def look(self, steps: float) -> None:
        """Update the state. ``steps`` is the number of full prefill steps that a new prompt would wait for on the
        prefill worker with the longest backlog."""
        if steps < SHALLOW_STEPS if self.deep else steps >= DEEP_STEPS:
            self.deep = not self.deep
            self._report(self.deep)
