"""Liveness of workers: silence corrected for this process's own lag, and workers that were given up and do not return.

Pure: time comes in as an argument. Messages sent while this process was stalled are read when it runs again, or, if the
whole process was stopped, as soon as its sockets' I/O threads have run. So the time of one stall does not count as
silence of a worker. Several stalls do count, because between them the messages were read.

A worker has one lease to send a Hello after it was silent for too long, hung in one turn of its loop, or, having run
before this coordinator started, was never heard. After that it holds nothing any more, so its process may be killed.
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
    """Records how late the sweeps were that are due every ``every_s`` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._looked_at: float | None = None
        self._late: deque[_Look] = deque(maxlen=REMEMBERED)
        """Late sweeps in order of time, with strictly decreasing lags: a lag before a longer one never is the longest
        since any moment, so it is dropped."""

    def look(self, now_s: float) -> None:
        """Record a sweep at ``now_s``; what had arrived before was read."""
        late_s = 0.0 if self._looked_at is None else now_s - self._looked_at - self._every_s
        self._looked_at = now_s
        if late_s <= 0:
            return
        while self._late and self._late[-1].late_s <= late_s:
            self._late.pop()
        self._late.append(_Look(now_s, late_s))

    def silence(self, heard_at_s: float, now_s: float) -> float:
        """Return for how many seconds a peer last heard at ``heard_at_s`` has been silent, minus the longest lag of
        this process since then. Of a lag that began before ``heard_at_s`` only the part after it is subtracted."""
        excuses = (min(look.late_s, look.at - heard_at_s) for look in self._late if look.at > heard_at_s)
        return now_s - heard_at_s - max(excuses, default=0.0)


@dataclass(frozen=True, slots=True)
class UnresponsiveWorker:
    """A worker process that was given up. ``how`` describes the failure and is followed by a duration in :meth:`why`;
    ``since_s`` is the time of its last sign of life, or the time when the wait for one began; ``given_up_s`` is when
    the worker was given up."""

    name: WorkerName
    host: str
    pid: int
    how: str
    since_s: float
    given_up_s: float

    @classmethod
    def of(cls, hello: Hello, how: str, since_s: float, given_up_s: float) -> Self:
        """Make the entry of a worker that had joined with ``hello``."""
        return cls(hello.name, hello.host, hello.pid, how, since_s, given_up_s)

    def why(self, now_s: float) -> str:
        """Return the reason for a log line, such as ``silent for 10 s``."""
        return f"{self.how} for {now_s - self.since_s:.3g} s"


class UnresponsiveWorkers:
    """The workers that were given up less than ``lease_s`` ago, not counting this process's own ``loop_lag``."""

    def __init__(self, lease_s: float, loop_lag: LoopLag) -> None:
        self._lease_s, self._loop_lag = lease_s, loop_lag
        self._hangs: list[UnresponsiveWorker] = []

    def add(self, hang: UnresponsiveWorker) -> None:
        """Add a worker that was given up."""
        self._hangs.append(hang)

    def came(self, hello: Hello) -> None:
        """Remove the worker that has sent ``hello``, or whose name a new process on the same host has taken."""
        self._hangs = [hang for hang in self._hangs if (hang.name, hang.host) != (hello.name, hello.host)]

    def busy(self, name: str, turn_s: float, now_s: float) -> None:
        """Restart the lease of a worker whose heartbeat reports that one turn of its loop, which may legitimately take
        long, has lasted ``turn_s`` seconds. Applies if that turn had begun when the worker was given up: it could not
        send a Hello yet."""
        self._hangs = [
            replace(hang, given_up_s=now_s) if hang.name == name and now_s - turn_s <= hang.given_up_s else hang
            for hang in self._hangs
        ]

    def overdue(self, now_s: float) -> list[UnresponsiveWorker]:
        """Remove and return the workers whose lease to send a Hello has expired."""
        late = [hang for hang in self._hangs if self._loop_lag.silence(hang.given_up_s, now_s) >= self._lease_s]
        self._hangs = [hang for hang in self._hangs if hang not in late]
        return late
