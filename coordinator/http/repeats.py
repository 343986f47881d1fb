"""Rate-limited logging, for events that clients can trigger as often as they like."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

LOG_EVERY_S = 10.0

log = logging.getLogger("tandem.http")


class RateLimitedLog:
    """Logs at ``level``, at most one line every ten seconds.

    The first event is logged at once. Later events are counted by kind and logged as a summary in the format ``more``,
    which has placeholders for the total and for ``COUNT KIND, ...``. There must be few kinds, and clients must not be
    able to make up new ones, because the counts are kept in memory."""

    def __init__(self, level: int, more: str) -> None:
        self._level, self._more = level, more
        self._counts: Counter[str] = Counter()
        self._pause: asyncio.TimerHandle | None = None

    def add(self, kind: str, line: str) -> None:
        """Log ``line``, or count the event under ``kind`` if a line was logged recently."""
        if self._pause is not None:
            self._counts[kind] += 1
            return
        log.log(self._level, "%s", line)
        self._wait()

    def close(self) -> None:
        """Log the events that were counted and not logged yet."""
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
