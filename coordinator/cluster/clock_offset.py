"""How far the clock of a worker's host is from the coordinator's, estimated from heartbeats.

Pure. A heartbeat arrives later than it was sent, so each difference is too small by its delay; the largest of the last
ones had the shortest delay.
"""

from __future__ import annotations

from collections import deque

KEPT = 32
"""Heartbeats, of which one has a delay of a few milliseconds even if the coordinator is busy."""


class ClockOffset:
    """The estimate of one worker."""

    __slots__ = ("_differences",)

    def __init__(self) -> None:
        self._differences: deque[int] = deque(maxlen=KEPT)

    def took(self, sent_ms: int, received_ms: int) -> None:
        """Take a heartbeat that was sent at ``sent_ms`` of the worker's clock (0: unknown) and arrived at
        ``received_ms`` of the coordinator's."""
        if sent_ms:
            self._differences.append(sent_ms - received_ms)

    @property
    def ms(self) -> int | None:
        """By how many milliseconds the worker's clock is ahead of the coordinator's, negative if it is behind; None if
        it is unknown."""
        return max(self._differences, default=None)
