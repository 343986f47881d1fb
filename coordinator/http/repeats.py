"""Log lines that clients can cause as often as they like."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

LOG_EVERY_S = 10.0

log = logging.getLogger("tandem.http")


class RateLimitedLog:
    """Logs at ``level`` in at most one line every ten seconds: the first event at once, those after it counted by kind,
    in a line of ``more``, which has places for their number and for ``COUNT KIND, ...``.

    There must be few kinds, none of which a client names."""

    def __init__(self, level: int, more: str) -> None:
        self._level, self._more = level, more
        self._counts: Counter[str] = Counter()
        self._pause: asyncio.TimerHandle | None = None

    def add(self, kind: str, line: str) -> None:
        """An event of ``kind``, which ``line`` tells of if it is not counted."""
        if self._pause is not None:
            self._counts[kind] += 1
            return
        log.log(self._level, "%s", line)
        self._wait()

    def close(self) -> None:
        """Logs what was counted and not logged yet."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._log_counts()

    def _wait(self) -> None:
        self._pause = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._counts:
            self._log_counts()
            self._wait()

    def _log_counts(self) -> None:
        if self._counts:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._counts.most_common())
            log.log(self._level, self._more, self._counts.total(), kinds)
            self._counts.clear()
