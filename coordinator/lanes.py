"""Threads for work on texts, so that the event loop goes on: one for short texts, one for bodies of ordinary size, one
for everything long.

A lane is a thread that does one step at a time, for its texts in turn. Work of several steps leaves the lane after each
of them, and for good when its client has left. The number of texts in a lane and their size are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from common import threads
from coordinator.limits import MAX_RETRY_S, MIN_RETRY_S
from coordinator.refusals import overloaded
from coordinator.slices import SLICE_CHARS

T = TypeVar("T")

_CHARS_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one lane: at most ``texts`` texts of ``chars`` characters together. A lane that is empty takes any text."""

    texts: int
    chars: int


SHORT = Bounds(texts=256, chars=4 << 20)
"""Of the lane for texts of up to :data:`~coordinator.slices.SLICE_CHARS` characters, which are one step each."""
BODIES = Bounds(texts=256, chars=16 << 20)
"""Of the lane that parses and templates bodies of up to LARGE_BYTES."""
LONG = Bounds(texts=64, chars=16 << 20)
LARGE_BYTES = 256 << 10
"""Bodies up to here do not wait for larger ones."""


class Lane:
    """One thread and what waits for it."""

    def __init__(self, name: str, bounds: Bounds) -> None:
        self._bounds = bounds
        self._texts = self._chars = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"text-{name}", initializer=threads.compute)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def admitted(self, chars: int) -> Iterator[None]:
        """Counts a text of ``chars`` characters, tokens or bytes; RequestError 429 if the lane has too many."""
        bounds = self._bounds
        if self._texts >= bounds.texts or (self._texts and self._chars + chars > bounds.chars):
            waiting = f"{self._texts} texts of {self._chars} characters are being tokenized"
            raise overloaded(waiting, min(MAX_RETRY_S, max(MIN_RETRY_S, self._chars / _CHARS_PER_S)))
        self._texts, self._chars = self._texts + 1, self._chars + chars
        try:
            yield
        finally:
            self._texts, self._chars = self._texts - 1, self._chars - chars

    async def step(self, work: Callable[[], T]) -> T:
        """``work`` in the thread, behind the steps that others have asked for. Cancelled before its turn, it is not
        done; what runs is finished."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def only_step(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` characters, tokens or bytes as its only step; RequestError 429 if the lane is full."""
        with self.admitted(size):
            return await self.step(work)


class Lanes:
    """The lanes of one coordinator."""

    def __init__(self) -> None:
        self._short, self._bodies, self._long = Lane("short", SHORT), Lane("bodies", BODIES), Lane("long", LONG)

    def close(self) -> None:
        for lane in (self._short, self._bodies, self._long):
            lane.close()

    def of(self, chars: int) -> Lane:
        """The lane for a text of ``chars`` characters or tokens."""
        return self._short if chars <= SLICE_CHARS else self._long

    def of_body(self, size: int) -> Lane:
        """The lane for a JSON body of ``size`` bytes, to be parsed and templated."""
        return self._bodies if size <= LARGE_BYTES else self._long
