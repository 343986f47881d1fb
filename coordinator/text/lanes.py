"""Lanes: single threads that do text work off the event loop. One for short texts, one for bodies of ordinary size, one
for everything long.

A lane does one step at a time. The lanes for short texts and for bodies alternate between the smallest waiting step and
the oldest, so that small work does not wait for a queue of larger work and nothing starves. Their capacity is counted
per size class, so that texts of one size cannot fill the lane for those of another. The lane for long texts is
first-in, first-out. Work of several steps queues again after each step, and its remaining steps are dropped when its
client disconnects. The number of texts in a lane and their total size are bounded.
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
"""Initial throughput estimate of a lane: so many characters in so many seconds."""
_FORGOTTEN = 0.05
"""Decay per step of the throughput estimate (exponential smoothing)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The capacity of a lane: at most ``texts`` texts of ``chars`` characters together. An empty lane accepts a text of
    any size. ``by_size``: the capacity applies to each size class separately; classes are powers of two."""

    texts: int
    chars: int
    by_size: bool = False


SHORT = Bounds(texts=256, chars=4 << 20, by_size=True)
"""Capacity of the lane for texts of up to :data:`~coordinator.text.slices.SLICE_CHARS` characters, one step each."""
BODIES = Bounds(texts=256, chars=16 << 20, by_size=True)
"""Capacity of the lane that parses and templates bodies of up to LARGE_BYTES. Its characters are in units of
:func:`cost`."""
LONG = Bounds(texts=64, chars=16 << 20)
LARGE_BYTES = 256 << 10
"""Maximum bytes of a body for the lane for bodies. Larger ones go to the lane for long texts."""
INLINE_BYTES = 16 << 10
INLINE_OBJECTS = 16
INLINE_VALUES = 1024
INLINE_LEVELS = 16 << 10
"""Bodies within all four limits are parsed, checked and templated in the event loop, which takes about 1 ms at most.
INLINE_LEVELS limits the sum over all values of their indentation depth, as a template may indent each by its depth. A
body that is not templated may have more numbers and strings than INLINE_VALUES, but not more arrays and objects."""
OBJECT_COST = 50
"""Cost of a message, tool, content part or array, in characters."""
_HIDDEN = re.compile(rb"\\u00(?:2[cC]|[57][bB])")
"""An escaped comma or bracket in a JSON string. Tool-call arguments are JSON inside a string, so these would escape the
counts of :func:`is_small`."""


def is_small(body: bytes, *, templated: bool = True) -> bool:
    """Return whether ``body`` is little enough work for the event loop. ``templated``: even if the chat template prints
    each value on its own line, indented by its depth."""
    if len(body) > INLINE_BYTES or (objects := body.count(b"{")) > INLINE_OBJECTS:
        return False
    containers = objects + body.count(b"[")
    if not templated:
        return containers <= INLINE_VALUES
    if _HIDDEN.search(body):
        return False
    values = body.count(b",") + containers
    return values <= INLINE_VALUES and values * containers <= INLINE_LEVELS


def cost(body: bytes) -> int:
    """Estimate the work to parse, check and template ``body``, in characters. For bodies above LARGE_BYTES this is
    their length alone, because the lane for long texts has limits of its own."""
    return len(body) + (OBJECT_COST * (body.count(b"{") + body.count(b"[")) if len(body) <= LARGE_BYTES else 0)


class _LaneStep(NamedTuple):
    """A step that waits in a lane. ``size``: characters, tokens or bytes."""

    size: int
    work: Callable[[], object]
    result: Future[Any]


class Lane:
    """One thread and its queue of steps."""

    def __init__(self, name: str, bounds: Bounds) -> None:
        self._bounds = bounds
        self._texts, self._chars = Counter[int](), Counter[int]()
        """Texts in the lane and their characters, by size class."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"text-{name}", initializer=threads.compute)
        self._lock = Lock()
        self._waiting: dict[int, _LaneStep] = {}
        """Waiting steps by number, oldest first."""
        self._numbers = count()
        self._oldest_next = True
        self._busy_s, self._done_chars = _ASSUMED_S, float(_ASSUMED_CHARS)
        """Smoothed seconds and characters of the last steps. Their ratio predicts the wait for ``Retry-After``."""

    @property
    def texts(self) -> int:
        """Number of texts in the lane."""
        return self._texts.total()

    @property
    def chars(self) -> int:
        """Total characters of the texts in the lane."""
        return self._chars.total()

    def close(self) -> None:
        """Drop the steps that wait, and end the thread after the running one. Does not wait for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for step in list(self._waiting.values()):
            step.result.cancel()

    @contextlib.contextmanager
    def admitted(self, chars: int) -> Iterator[None]:
        """Count a text of ``chars`` characters, tokens or bytes until exit. Raises RequestError 429 if the lane is
        full."""
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
        """Run ``work`` of ``size`` in the lane's thread and return its result. If cancelled while it waits, it does not
        run; once it runs, it runs to its end."""
        number, result = next(self._numbers), Future[T]()
        with self._lock:
            self._waiting[number] = _LaneStep(size, work, result)
        self._executor.submit(self._next)
        try:
            return await asyncio.wrap_future(result)
        finally:
            with self._lock:
                self._waiting.pop(number, None)
            del result  # breaks a reference cycle, as in _next

    def _next(self) -> None:
        """Run one waiting step, in the thread. Called once for each submitted step."""
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
            del step  # the traceback of an error refers to this frame; the cycle would keep the text until a collection

    def _pop(self) -> _LaneStep | None:
        """Remove and return the next step: the oldest, or with ``by_size`` alternately the smallest and the oldest.
        None if no step waits."""
        with self._lock:
            if not self._waiting:
                return None
            self._oldest_next = not (self._bounds.by_size and self._oldest_next)
            oldest = next(iter(self._waiting))
            return self._waiting.pop(
                oldest if self._oldest_next else min(self._waiting, key=lambda number: self._waiting[number].size)
            )

    async def only_step(self, size: int, work: Callable[[], T]) -> T:
        """Run ``work`` on ``size`` characters, tokens or bytes as a single step. Raises RequestError 429 if the lane is
        full."""
        with self.admitted(size):
            return await self.step(work, size)


class Lanes:
    """The three lanes of a coordinator."""

    def __init__(self) -> None:
        self._short, self._bodies, self._long = Lane("short", SHORT), Lane("bodies", BODIES), Lane("long", LONG)

    def close(self) -> None:
        """Close all lanes, as :meth:`Lane.close` does."""
        for lane in (self._short, self._bodies, self._long):
            lane.close()

    def of(self, chars: int) -> Lane:
        """Return the lane for a text of ``chars`` characters or tokens."""
        return self._short if chars <= SLICE_CHARS else self._long

    def of_body(self, size: int) -> Lane:
        """Return the lane that parses and templates a JSON body of ``size`` bytes, as a step of size :func:`cost`."""
        return self._bodies if size <= LARGE_BYTES else self._long
