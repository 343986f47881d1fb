"""The last changes of workers: joins, drains, losses, deaths and returns.

Owns a bounded ring of them. Decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.core.ids import Incarnation, WorkerName
from common.net.messages import Hello, Role
from coordinator.cluster.registry import WorkerHandle

KEPT = 64
"""Changes, and lost workers, that are remembered."""

Change = Literal["joined", "back", "draining", "lost", "dead", "left"]


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """What happened to a worker, why ("" if there is nothing to explain), and when, in seconds since the epoch."""

    name: WorkerName
    role: Role
    state: Change
    why: str
    t: float


class WorkerLog:
    """Remembers changes, and passes each to ``listener`` if it is set."""

    def __init__(self) -> None:
        self.listener: Callable[[WorkerChange], None] | None = None
        self._changes: deque[WorkerChange] = deque(maxlen=KEPT)
        self._gone: dict[Incarnation, Hello] = {}
        """The last workers that were lost or have left."""

    def changes(self) -> list[WorkerChange]:
        """Return the last changes, the latest last."""
        return list(self._changes)

    def joined(self, worker: WorkerHandle) -> None:
        """Note that a worker has joined; ``back`` if one of its name was here before."""
        back = any(hello.name == worker.hello.name for hello in self._gone.values())
        self._note(worker.hello, "back" if back else "joined")

    def draining(self, worker: WorkerHandle) -> None:
        """Note that a worker accepts no new requests."""
        self._note(worker.hello, "draining")

    def lost(self, worker: WorkerHandle, why: str) -> None:
        """Note that a worker is lost without a Goodbye."""
        self._remember(worker.hello)
        self._note(worker.hello, "lost", why)

    def died(self, incarnation: Incarnation) -> None:
        """Note that a lost worker is taken to be dead."""
        if (hello := self._gone.get(incarnation)) is not None:
            self._note(hello, "dead", "nothing has arrived from it since its connection closed")

    def left(self, worker: WorkerHandle, why: str) -> None:
        """Note that a worker has left with a Goodbye."""
        self._remember(worker.hello)
        self._note(worker.hello, "left", why)

    def _remember(self, hello: Hello) -> None:
        self._gone.pop(hello.incarnation, None)
        self._gone[hello.incarnation] = hello
        if len(self._gone) > KEPT:
            del self._gone[next(iter(self._gone))]

    def _note(self, hello: Hello, state: Change, why: str = "") -> None:
        change = WorkerChange(hello.name, hello.role, state, why, round(time.time(), 3))
        self._changes.append(change)
        if self.listener is not None:
            self.listener(change)
