"""Workers whose connection was closed and that may come back.

Pure. A worker is first *losing*, until everything that it had sent is read, then *missing*, until it sends a new Hello
or is declared dead. Owns both lists. Does not know sockets or requests, or which components react.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.core.ids import Incarnation, WorkerName
from common.net.messages import Role
from coordinator.cluster.registry import WorkerHandle

REJOIN_LOOKS = 4
"""A worker whose connection was closed is taken to be dead if nothing arrives from it for this many sweeps, which is
the time of two heartbeats. A heartbeat thread reconnects within a tenth of a second."""


@dataclass(slots=True)
class Missing:
    """A worker whose connection was closed. ``looks`` counts the sweeps since then, or since its last heartbeat.
    ``alive``: it has sent something since, so it will send a Hello when its step is over."""

    worker: WorkerHandle
    looks: int = 0
    alive: bool = False

    def speaks(self) -> bool:
        """Note that the worker has sent something; return whether that shows for the first time that it is alive."""
        self.looks = 0
        first, self.alive = not self.alive, True
        return first


class LostWorkers:
    """The workers whose connection was closed: losing while their last messages may be unread, missing until they have
    sent a new Hello."""

    def __init__(self) -> None:
        self._losing: dict[Incarnation, WorkerHandle] = {}
        self._missing: dict[Incarnation, Missing] = {}

    def lose(self, worker: WorkerHandle) -> None:
        """Note that the connection of a worker was closed and that its last messages may be unread."""
        self._losing[worker.id] = worker

    def losing_worker(self, incarnation: Incarnation) -> WorkerHandle | None:
        """Return the losing worker of that incarnation, if any."""
        return self._losing.get(incarnation)

    def not_losing(self, incarnation: Incarnation) -> WorkerHandle | None:
        """Remove a worker from the losing ones and return it; None if it is none of them."""
        return self._losing.pop(incarnation, None)

    def miss(self, worker: WorkerHandle) -> None:
        """Note that a worker is missing."""
        self._missing[worker.id] = Missing(worker)

    def missing_worker(self, incarnation: Incarnation) -> Missing | None:
        """Return the missing worker of that incarnation, if any."""
        return self._missing.get(incarnation)

    def not_missing(self, incarnation: Incarnation) -> Missing | None:
        """Remove a worker from the missing ones and return it; None if it is none of them."""
        return self._missing.pop(incarnation, None)

    def look(self) -> list[Incarnation]:
        """Count a sweep and return the missing workers that are dead, after REJOIN_LOOKS sweeps. Sweeps are counted
        rather than time, because no worker can reconnect while this process is stalled. A worker that is alive but has
        not come back is forgotten too."""
        dead = []
        for missing in list(self._missing.values()):
            missing.looks += 1
            if missing.looks >= REJOIN_LOOKS:
                del self._missing[missing.worker.id]
                if not missing.alive:
                    dead.append(missing.worker.id)
        return dead

    def may_return(self, role: Role) -> bool:
        """Return whether a worker that does the work of ``role`` is among them."""
        lost = [*self._losing.values(), *(missing.worker for missing in self._missing.values())]
        return any(worker.role in (role, "colocated") for worker in lost)

    def get(self, incarnation: Incarnation) -> WorkerHandle | None:
        """Return the lost worker of that incarnation, if any."""
        if (missing := self._missing.get(incarnation)) is not None:
            return missing.worker
        return self._losing.get(incarnation)

    def away(self, name: WorkerName) -> WorkerHandle | None:
        """Return the worker of that name that has lost its connection but has sent heartbeats since, if any."""
        held = (missing.worker for missing in self._missing.values() if missing.alive)
        return next((worker for worker in held if worker.hello.name == name), None)
