"""Workers that were given up although their processes may still run, and whether they come back.

Pure: time comes in as an argument. Whoever was silent too long, or hangs in a turn of its loop, has a lease to say
Hello again. After it the worker holds nothing any more and nobody counts on it: its process may be ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.messages import Hello
from coordinator.lags import Lags


@dataclass(frozen=True, slots=True)
class Hang:
    """``how`` goes before a duration; ``since_s`` is the last sign of life, ``given_up_s`` when it was given up."""

    hello: Hello
    how: str
    since_s: float
    given_up_s: float

    def why(self, now_s: float) -> str:
        """For people: ``silent for 10 s``."""
        return f"{self.how} for {now_s - self.since_s:.3g} s"


class Hung:
    """Those that have been given up for less than ``lease_s``; our own ``lags`` do not count."""

    def __init__(self, lease_s: float, lags: Lags) -> None:
        self._lease_s, self._lags = lease_s, lags
        self._hangs: list[Hang] = []

    def add(self, hang: Hang) -> None:
        """The worker was given up."""
        self._hangs.append(hang)

    def came(self, hello: Hello) -> None:
        """It is back, or another process has taken its place."""
        place = (hello.name, hello.host)
        self._hangs = [hang for hang in self._hangs if (hang.hello.name, hang.hello.host) != place]

    def overdue(self, now_s: float) -> list[Hang]:
        """Those that do not come back, each once."""
        late = [hang for hang in self._hangs if self._lags.silence(hang.given_up_s, now_s) >= self._lease_s]
        self._hangs = [hang for hang in self._hangs if hang not in late]
        return late
