"""Detects other processes that compute on the cores to be measured, since they distort the results."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from rich.console import Console

LOOK_S = 0.5
NOTICED = 0.1
_STAT = Path("/proc/stat")
_IDLE, _WAITS, _GUEST = 3, 4, 8
"""Columns of a core's line in ``/proc/stat`` (proc(5)): idle, iowait, and the first of the guest times, which user and
nice time already include."""


def note(console: Console, cores: Collection[int] | None = None) -> None:
    """Print a note if other processes are using ``cores`` (by default all cores that this process may run on).

    Call it before the measured processes are started. It takes ``LOOK_S`` seconds."""
    if (share := busy_share(cores or os.sched_getaffinity(0))) > NOTICED:
        console.print(
            f"note: other processes take {share:.0%} of these cores, which distorts everything that is measured now,"
            " ratios too",
            markup=False,
            soft_wrap=True,
        )


def busy_share(cores: Collection[int], seconds: float = LOOK_S) -> float:
    """Return the fraction of these cores' time that is used while this process sleeps for ``seconds``; 0 on systems
    without ``/proc/stat``."""
    if not _STAT.exists():
        return 0.0
    before = _STAT.read_text()
    time.sleep(seconds)
    return used(before, _STAT.read_text(), cores)


def used(before: str, after: str, cores: Collection[int]) -> float:
    """Return the used fraction of these cores' time between two readings of ``/proc/stat``."""
    earlier, later = _times(before), _times(after)
    busy = total = 0
    for name in {f"cpu{core}" for core in cores} & earlier.keys() & later.keys():
        spent = [new - old for new, old in zip(later[name], earlier[name], strict=True)]
        total += sum(spent[:_GUEST])
        busy += sum(spent[:_GUEST]) - spent[_IDLE] - spent[_WAITS]
    return busy / total if total else 0.0


def _times(stat: str) -> dict[str, list[int]]:
    lines = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    return {name: [int(each) for each in rest] for name, *rest in lines}
