"""When the next pass over the queue runs.

Owns the scheduled calls. Does not know what a pass does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.requests.queue import RequestQueue


class PlacementTimer:
    """Calls ``run`` in ``loop`` while ``queue`` is not empty, on request. ``clock`` gives the time in seconds."""

    def __init__(
        self, queue: RequestQueue, run: Callable[[], None], loop: asyncio.AbstractEventLoop, clock: Callable[[], float]
    ) -> None:
        self._queue, self._run, self._loop, self._clock = queue, run, loop, clock
        self._pending = False
        self._later: asyncio.TimerHandle | None = None

    def now(self) -> None:
        """Run a pass."""
        self._pending = False
        self._run()

    def soon(self) -> None:
        """Schedule one pass after the callbacks that are due, so that many requests that end in one turn of the event
        loop cost one pass over the queue."""
        if self._queue and not self._pending:
            self._pending = True
            self._loop.call_soon(self.now)

    def at(self, time: float | None) -> None:
        """Schedule a pass for ``time``, instead of the one scheduled before; None only cancels that one."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if time is not None:
            self._later = self._loop.call_later(time - self._clock() + 0.001, self.soon)
