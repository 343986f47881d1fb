"""The threads of this process as the kernel knows them, those of compiled libraries among them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from tests.pace import scaled


def running_threads() -> set[int]:
    """Their numbers. One that has been joined may be among them a moment longer."""
    return set(map(int, os.listdir("/proc/self/task")))


def until_ended(ending: Iterable[int], seconds: float = 5.0) -> None:
    """Waits until this process has none of the threads ``ending`` any more."""
    deadline = time.monotonic() + scaled(seconds)
    while left := running_threads() & set(ending):
        assert time.monotonic() < deadline, f"threads {sorted(left)} have not ended"
        time.sleep(0.001)
