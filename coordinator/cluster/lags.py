"""Our own lags, told from the silence of others.

Pure: time comes in as an argument. What was sent while this process stood still is read when it goes on, or, if all
of it was stopped, as soon as its sockets' own threads have run: so one lag is no silence. Several are, since between
them we did listen.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

REMEMBERED = 64


class _Look(NamedTuple):
    at: float
    late_s: float


class Lags:
    """How late looks were that are due every ``every_s``."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._looked_at: float | None = None
        self._late: deque[_Look] = deque(maxlen=REMEMBERED)
        """Later ones are shorter: a shorter one before a longer one excuses nothing that the longer one does not."""

    def look(self, now_s: float) -> None:
        """We have read what had arrived, and look who was silent."""
        late_s = 0.0 if self._looked_at is None else now_s - self._looked_at - self._every_s
        self._looked_at = now_s
        if late_s <= 0:
            return
        while self._late and self._late[-1].late_s <= late_s:
            self._late.pop()
        self._late.append(_Look(now_s, late_s))

    def silence(self, heard_at_s: float, now_s: float) -> float:
        """For how long somebody has been silent who was heard last at ``heard_at_s``, less the longest of our lags
        since then; of one that had begun before, the rest."""
        excuses = (min(look.late_s, look.at - heard_at_s) for look in self._late if look.at > heard_at_s)
        return now_s - heard_at_s - max(excuses, default=0.0)
