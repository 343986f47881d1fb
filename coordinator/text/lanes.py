"""Threads for work on texts, so that the event loop goes on: one for short texts, one for bodies of ordinary size, one
for everything long.

A lane is a thread that does one step at a time. The lanes for short texts and for bodies take the smallest that waits
and the one that has waited longest in turn, so that small work does not wait for a queue of larger work, and nothing
waits for ever; they count what waits by size, so that texts of one size do not fill the lane for those of another. The
lane for long texts takes steps in the order in which they were asked for. Work of several steps leaves the lane after
each of them, and for good when its client has left. The number of texts in a lane and their size are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from common.platform import threads
from coordinator.requests.admission import not_before
from coordinator.requests.errors import overloaded
from coordinator.text.slices import SLICE_CHARS

T = TypeVar("T")

_ASSUMED_S, _ASSUMED_CHARS = 0.1, 100_000
"""What a lane that has done nothing yet is taken to have done, and in which time."""
_FORGOTTEN = 0.05
"""The share of earlier steps that each step takes the place of, in what a lane is known to do in which time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A lane holds at most ``texts`` texts of ``chars`` characters together. A lane that is empty takes any text.
    ``by_size``: so much for each class of sizes, from one power of two to the next."""

    texts: int
    chars: int
    by_size: bool = False


SHORT = Bounds(texts=256, chars=4 << 20, by_size=True)
"""Of the lane for texts of up to :data:`~coordinator.text.slices.SLICE_CHARS` characters, which are one step each."""
BODIES = Bounds(texts=256, chars=16 << 20, by_size=True)
"""Of the lane that parses and templates bodies of up to LARGE_BYTES. Its characters are those of :func:`cost`."""
LONG = Bounds(texts=64, chars=16 << 20)
LARGE_BYTES = 256 << 10
"""Bodies up to here do not wait for larger ones."""
INLINE_BYTES = 16 << 10
INLINE_OBJECTS = 16
INLINE_VALUES = 1024
INLINE_LEVELS = 16 << 10
"""Bodies of up to so many bytes, objects, values, and levels by which all values together may be indented, are parsed,
checked and templated in the event loop: in about 1 ms at most."""
OBJECT_COST = 50
"""A message, tool, content part or array takes as long as so many characters."""
_HIDDEN = re.compile(rb"\\u00(?:2[cC]|[57][bB])")
"""A comma or bracket in a string of JSON that does not look like one: arguments of tool calls are JSON, too."""


def is_small(body: bytes) -> bool:
    """Whether ``body`` is little enough work for the event loop, even if the chat template prints each value on a line
    of its own, indented by its depth."""
    if len(body) > INLINE_BYTES or (objects := body.count(b"{")) > INLINE_OBJECTS or _HIDDEN.search(body):
        return False
    containers = objects + body.count(b"[")
    values = body.count(b",") + containers
    return values <= INLINE_VALUES and values * containers <= INLINE_LEVELS


def cost(body: bytes) -> int:
    """About how much work it is to parse, check and template ``body``, in characters. Of a large one its length: what
    that may be has bounds of its own."""
    return len(body) + (OBJECT_COST * (body.count(b"{") + body.count(b"[")) if len(body) <= LARGE_BYTES else 0)


class _Step(NamedTuple):
    """A step in the queue of a lane."""

    size: int
    work: Callable[[], object]
    result: Future[Any]


class Lane:
    """One thread and what waits for it."""

    def __init__(self, name: str, bounds: Bounds) -> None:
        self._bounds = bounds
        self._texts, self._chars = Counter[int](), Counter[int]()
        """By class of sizes."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"text-{name}", initializer=threads.compute)
        self._lock = Lock()
        self._waiting: dict[int, _Step] = {}
        """By number, the oldest first."""
        self._numbers = count()
        self._oldest_next = True
        self._busy_s, self._done_chars = _ASSUMED_S, float(_ASSUMED_CHARS)
        """Seconds and characters of the last steps, smoothed."""

    @property
    def texts(self) -> int:
        """How many texts there are in the lane."""
        return self._texts.total()

    @property
    def chars(self) -> int:
        """Characters of all texts in the lane together."""
        return self._chars.total()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for step in list(self._waiting.values()):
            step.result.cancel()

    @contextlib.contextmanager
    def admitted(self, chars: int) -> Iterator[None]:
        """Counts a text of ``chars`` characters, tokens or bytes; RequestError 429 if the lane has too many."""
        bounds, held = self._bounds, self._class(chars)
        texts, size = self._texts[held], self._chars[held]
        if texts >= bounds.texts or (texts and size + chars > bounds.chars):
            waiting = f"{texts} texts of {size} characters are being tokenized"
            raise overloaded(waiting, not_before(self.chars * self._busy_s / self._done_chars))
        self._texts[held] += 1
        self._chars[held] += chars
        try:
            yield
        finally:
            self._texts[held] -= 1
            self._chars[held] -= chars

    def _class(self, chars: int) -> int:
        return max(0, chars - 1).bit_length() if self._bounds.by_size else 0

    async def step(self, work: Callable[[], T], size: int) -> T:
        """``work`` of ``size`` in the thread, when its turn has come. Cancelled before its turn, it is not done; what
        runs is finished."""
        number, result = next(self._numbers), Future[T]()
        with self._lock:
            self._waiting[number] = _Step(size, work, result)
        self._executor.submit(self._next)
        try:
            return await asyncio.wrap_future(result)
        finally:
            with self._lock:
                self._waiting.pop(number, None)
            del result  # as of step in _next

    def _next(self) -> None:
        """One step, in the thread: called once for each that was asked for."""
        step = self._pop()
        if step is None or not step.result.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            made = step.work()
        except BaseException as error:
            step.result.set_exception(error)
        else:
            step.result.set_result(made)
        finally:
            self._busy_s += time.monotonic() - began - _FORGOTTEN * self._busy_s
            self._done_chars += step.size - _FORGOTTEN * self._done_chars
            del step  # an error's traceback has this frame: a cycle would keep the text until it is collected

    def _pop(self) -> _Step | None:
        """The step that has waited longest; by size, in turn with the smallest one. None if none waits."""
        with self._lock:
            if not self._waiting:
                return None
            self._oldest_next = not (self._bounds.by_size and self._oldest_next)
            oldest = next(iter(self._waiting))
            return self._waiting.pop(
                oldest if self._oldest_next else min(self._waiting, key=lambda number: self._waiting[number].size)
            )

    async def only_step(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` characters, tokens or bytes as its only step; RequestError 429 if the lane is full."""
        with self.admitted(size):
            return await self.step(work, size)


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
        """The lane for a JSON body of ``size`` bytes, to be parsed and templated, as a step of its :func:`cost`."""
        return self._bodies if size <= LARGE_BYTES else self._long
