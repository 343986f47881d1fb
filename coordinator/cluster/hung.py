"""Workers whose processes run and that nobody can count on, and whether they come back.

Pure: time comes in as an argument. Whoever was silent too long, hangs in a turn of its loop, or served before this
coordinator did and has not been heard of, has a lease to say Hello. After it the worker holds nothing any more: its
process may be ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from common.core.ids import WorkerName
from common.net.messages import Hello
from coordinator.cluster.lags import Lags


@dataclass(frozen=True, slots=True)
class Hang:
    """The process ``pid`` of a worker. ``how`` goes before a duration; ``since_s`` is the last sign of life, or when we
    began to wait for one; ``given_up_s`` when it was given up."""

    name: WorkerName
    host: str
    pid: int
    how: str
    since_s: float
    given_up_s: float

    @classmethod
    def of(cls, hello: Hello, how: str, since_s: float, given_up_s: float) -> Self:
        """One that had joined."""
        return cls(hello.name, hello.host, hello.pid, how, since_s, given_up_s)

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
        self._hangs = [hang for hang in self._hangs if (hang.name, hang.host) != (hello.name, hello.host)]

    def busy(self, name: str, turn_s: float, now_s: float) -> None:
        """Its heart says that it has been in one turn, which may well take long, for ``turn_s``. If it was in that turn
        when it was given up, it could not say Hello yet."""
        self._hangs = [
            replace(hang, given_up_s=now_s) if hang.name == name and now_s - turn_s <= hang.given_up_s else hang
            for hang in self._hangs
        ]

    def overdue(self, now_s: float) -> list[Hang]:
        """Those that do not come back, each once."""
        late = [hang for hang in self._hangs if self._lags.silence(hang.given_up_s, now_s) >= self._lease_s]
        self._hangs = [hang for hang in self._hangs if hang not in late]
        return late
