"""How long stages of a start report their progress."""

from __future__ import annotations

from collections.abc import Callable

StepProgress = Callable[[int, int], None]
"""Called with the number of steps that are done, and that of all."""


def not_reported(done: int, total: int) -> None:
    """Take progress that nothing follows."""
