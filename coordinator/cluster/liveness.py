"""Whether workers are alive: what our own lags excuse, and who was given up and does not come back.

Pure: time comes in as an argument. What was sent while this process stood still is read when it goes on, or, if all
of it was stopped, as soon as its sockets' own threads have run: so one lag is no silence. Several are, since between
them we did listen.

Whoever was silent too long, hangs in a turn of its loop, or served before this coordinator did and has not been heard
of, has a lease to say Hello. After it the worker holds nothing any more: its process may be ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from common.core.ids import WorkerName
from common.net.messages import Hello

REMEMBERED = 64


class _Look(NamedTuple):
    at: float
    late_s: float


class LoopLag:
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


@dataclass(frozen=True, slots=True)
class UnresponsiveWorker:
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


class UnresponsiveWorkers:
    """Those that have been given up for less than ``lease_s``; our own ``loop_lag`` does not count."""

    def __init__(self, lease_s: float, loop_lag: LoopLag) -> None:
        self._lease_s, self._loop_lag = lease_s, loop_lag
        self._hangs: list[UnresponsiveWorker] = []

    def add(self, hang: UnresponsiveWorker) -> None:
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

    def overdue(self, now_s: float) -> list[UnresponsiveWorker]:
        """Those that do not come back, each once."""
        late = [hang for hang in self._hangs if self._loop_lag.silence(hang.given_up_s, now_s) >= self._lease_s]
        self._hangs = [hang for hang in self._hangs if hang not in late]
        return late
