"""Workers that should be running but are not registered, and why.

Pure. A worker is listed from a Goodbye with an unusual reason, or from a report of the launcher that its process has
ended, until a worker of its name joins or the launcher gives it up. Owns what ``tandem status`` shows of them, and
decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.core.ids import WorkerName
from common.net.messages import DRAINED, STOPPED

MOST = 64
"""Most workers that are listed; the one listed first is dropped for another."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker that is not here. ``restart_at_s`` is when the launcher starts it again, None if that is unknown."""

    why: str
    since_s: float
    restart_at_s: float | None = None


class AbsentWorkers:
    """The absent workers by name."""

    def __init__(self) -> None:
        self._absences: dict[WorkerName, Absence] = {}

    def __iter__(self) -> Iterator[tuple[WorkerName, Absence]]:
        return iter(self._absences.items())

    def get(self, name: WorkerName) -> Absence | None:
        """Return the absence of the worker of that name; None if it is not listed."""
        return self._absences.get(name)

    def left(self, name: WorkerName, why: str, now_s: float) -> None:
        """Note that a worker said Goodbye for the reason ``why``."""
        if why not in (DRAINED, STOPPED):
            self._put(name, Absence(why, now_s))

    def ended(self, name: WorkerName, why: str, restart_in_s: float, now_s: float) -> None:
        """Note that the process of a worker has ended, and when the launcher starts the next one."""
        before = self._absences.get(name)
        self._put(name, Absence(why, before.since_s if before else now_s, now_s + restart_in_s))

    def reported(self, clock: Callable[[], float]) -> Callable[[WorkerName, str, float], None]:
        """Return a function that takes the launcher's reports: name, reason ("" if the worker is not to run any more),
        and seconds until the restart."""

        def report(name: WorkerName, why: str, restart_in_s: float) -> None:
            if why:
                self.ended(name, why, restart_in_s, clock())
            else:
                self.forget(name)

        return report

    def forget(self, name: WorkerName) -> None:
        """Remove a worker that has joined, or that is not to run any more."""
        self._absences.pop(name, None)

    def _put(self, name: WorkerName, absence: Absence) -> None:
        self._absences[name] = absence
        if len(self._absences) > MOST:
            del self._absences[next(iter(self._absences))]
