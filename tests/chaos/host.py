"""What the host takes from this machine. A bound of time that was missed meanwhile says nothing about who was measured;
a wrong answer always does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil

TAKEN, TRIES = 0.1, 3
"""A share of the cores' time that makes a lateness the host's, and how often at most something is tried for that."""
CALM_S, CALM_WITHIN_S = 1.0, 60.0
"""After so long without that the host is calm again, which is waited for so long at most."""
Found = TypeVar("Found")


class Taken:
    """From when it is made on."""

    def __init__(self) -> None:
        self._began = psutil.cpu_times()

    def share(self) -> float:
        """Of the time for which somebody wanted a core, that in which the host gave it to another machine."""
        now, began = psutil.cpu_times(), self._began
        ours, stolen = (
            sum(getattr(now, name, 0.0) - getattr(began, name, 0.0) for name in names)
            for names in (("user", "nice", "system"), ("steal",))
        )
        return stolen / (ours + stolen) if stolen else 0.0


async def undisturbed(play: Callable[[], Awaitable[Found]], late: Callable[[Found], str]) -> Found:
    """What ``play`` finds. It plays again if that is only ``late`` (what was, in words, else "") and the host took the
    cores meanwhile, when that has ended."""
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
