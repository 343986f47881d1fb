"""Virtual time: events run in the order of their times, and nothing happens between them.

Also provides the part of an event loop that the coordinator uses, so that its real code runs here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Event:
    """A scheduled action, which can be cancelled."""

    __slots__ = ("action", "arguments")

    def __init__(self, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.action: Callable[..., object] | None = action
        self.arguments = arguments

    def cancel(self) -> None:
        self.action = None
        self.arguments = ()


class VirtualClock:
    """The event queue of one simulated world. ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Event]] = []
        self._orders = itertools.count()

    def at(self, time: float, action: Callable[..., object], *arguments: Any) -> Event:
        event = Event(action, arguments)
        if time < self.now:
            time = self.now
        heapq.heappush(self.events, (time, next(self._orders), event))
        return event

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> Event:
        event = Event(action, arguments)
        heapq.heappush(self.events, (self.now + seconds, next(self._orders), event))
        return event

    def step(self) -> bool:
        """Run the next event; return False if there is none."""
        while self.events:
            time, _, event = heapq.heappop(self.events)
            if event.action is not None:
                self.now = time
                event.action(*event.arguments)
                return True
        return False


class SimulatedProcess:
    """A simulated process, which can be stopped (it keeps its sockets), continued, or killed.

    ``spent`` is how many seconds it is ahead of the clock: an action in the middle of a long step happens later than
    now.
    """

    def __init__(self, clock: VirtualClock, name: str) -> None:
        self.clock, self.name = clock, name
        self.alive, self.stopped = True, False
        self.spent = 0.0
        self._held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def run(self, action: Callable[..., object], *arguments: Any) -> None:
        """Run ``action`` now, or when the process continues if it is stopped, or never if it is dead."""
        if not self.alive:
            return
        if self.stopped:
            self._held.append((action, arguments))
        else:
            action(*arguments)

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        held, self._held = self._held, []
        for action, arguments in held:
            self.clock.after(0.0, self.run, action, *arguments)

    def die(self) -> None:
        self.alive = False
        self._held.clear()


class Loop:
    """The part of an asyncio event loop that the coordinator uses, for one process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def call_soon(self, action: Callable[..., object], *arguments: Any) -> Event:
        return self.call_later(0.0, action, *arguments)

    def call_later(self, seconds: float, action: Callable[..., object], *arguments: Any) -> Event:
        event = Event(action, arguments)
        self._process.clock.after(seconds, self._process.run, self._fire, event)
        return event

    @staticmethod
    def _fire(event: Event) -> None:
        if event.action is not None:
            event.action(*event.arguments)
