"""Repeats measurements during which the hypervisor took CPU time from this machine (steal time).

A time bound missed meanwhile says nothing about the code under test; a wrong answer always does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil

TAKEN, TRIES = 0.1, 3
"""The fraction of CPU time taken by the host from which a missed bound is blamed on it, and the most tries."""
CALM_S, CALM_WITHIN_S = 1.0, 60.0
"""The host counts as calm after ``CALM_S`` below that fraction; wait for that at most ``CALM_WITHIN_S``."""
Found = TypeVar("Found")


class Taken:
    """Measures the CPU time that the host takes, from construction on."""

    def __init__(self) -> None:
        self._began = psutil.cpu_times()

    def share(self) -> float:
        """Return the steal time as a fraction of the CPU time that processes here wanted."""
        now, began = psutil.cpu_times(), self._began
        ours, stolen = (
            sum(getattr(now, name, 0.0) - getattr(began, name, 0.0) for name in names)
            for names in (("user", "nice", "system"), ("steal",))
        )
        return stolen / (ours + stolen) if stolen else 0.0


async def undisturbed(play: Callable[[], Awaitable[Found]], late: Callable[[Found], str]) -> Found:
    """Return the result of ``play``, repeated if it is only late and the host took CPU time meanwhile.

    ``late`` returns what was late in words, or "" if nothing was or something else is wrong. A repetition waits until
    the host is calm."""
    for _ in range(TRIES - 1):
        taken = Taken()
        found = await play()
        if not (what := late(found)) or (share := taken.share()) < TAKEN:
            return found
        print(f"again: {what}, but the host took {share:.0%} of the cores meanwhile", flush=True)
        await _calm()
    return await play()


async def _calm() -> None:
    for _ in range(round(CALM_WITHIN_S / CALM_S)):
        taken = Taken()
        await asyncio.sleep(CALM_S)
        if taken.share() < TAKEN:
            return
