"""The threads of this process as the kernel lists them, including those of compiled libraries."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from tests.pace import scaled


def running_threads(seconds: float = 5.0) -> set[int]:
    """Return the kernel ids of this process's threads. A joined thread may stay listed for a moment.

    While one ends the kernel may leave out those that were started after it: so a list counts if it has as many as the
    kernel counts, before and behind it."""
    deadline = time.monotonic() + scaled(seconds)
    while True:
        before, found, behind = _count(), os.listdir("/proc/self/task"), _count()
        if before == len(found) == behind:
            return set(map(int, found))
        assert time.monotonic() < deadline, f"{len(found)} threads are listed, {behind} counted"
        time.sleep(0.001)


def _count() -> int:
    """Return the number of threads of this process."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[17])


def started_by_libzmq(before: set[int], count: int, seconds: float = 5.0) -> set[int]:
    """Wait until there are ``count`` threads of libzmq that are not in ``before``, and return them. A context has two:
    one for I/O, and the reaper."""
    deadline = time.monotonic() + scaled(seconds)
    while len(found := {each for each in running_threads() - before if _name(each).startswith("ZMQbg/")}) < count:
        assert time.monotonic() < deadline, f"{len(found)} threads of {count} are running"
        time.sleep(0.001)
    return found


def _name(thread: int) -> str:
    """Return the name of a thread, "" if it has ended."""
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def until_ended(ending: Iterable[int], seconds: float = 5.0) -> None:
    """Wait until none of the threads ``ending`` exists any more."""
    deadline = time.monotonic() + scaled(seconds)
    while left := running_threads() & set(ending):
        assert time.monotonic() < deadline, f"threads {sorted(left)} have not ended"
        time.sleep(0.001)
