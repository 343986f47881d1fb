"""The threads of this process as the kernel lists them, including those of compiled libraries."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from tests.pace import scaled


def running_threads() -> set[int]:
    """Return the kernel ids of this process's threads. A joined thread may stay listed for a moment.

    The kernel may leave threads out of a list while others end, so it is read until it is the same twice."""
    before, found = set[int](), _listed()
    while found != before:
        before, found = found, _listed()
    return found


def _listed() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def until_ended(ending: Iterable[int], seconds: float = 5.0) -> None:
    """Wait until none of the threads ``ending`` exists any more."""
    deadline = time.monotonic() + scaled(seconds)
    while left := running_threads() & set(ending):
        assert time.monotonic() < deadline, f"threads {sorted(left)} have not ended"
        time.sleep(0.001)
