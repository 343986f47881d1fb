"""Which cores each worker of this machine gets, and how many threads.

Pure, but for the functions that ask the system. A worker whose threads share a core with another's waits for it at
the end of every layer, so cores are dealt out whole wherever there are enough.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from common.core.errors import StartError


class Share(NamedTuple):
    """What one worker gets; ``cores`` None when it is not pinned."""

    cores: tuple[int, ...] | None
    threads: int

    @property
    def cpus(self) -> str | None:
        """The cores the way ``--cpus`` takes them."""
        return None if self.cores is None else ",".join(map(str, self.cores))


def choose(wanted: Sequence[int] | None) -> list[int] | None:
    """Those of ``wanted`` that this process may use, None for all; StartError if there are none."""
    if wanted is None:
        return None
    allowed = usable_cores()
    if not (chosen := [core for core in wanted if core in allowed]):
        what = f"--cpus {','.join(map(str, wanted))} names no usable core"
        raise StartError(what, f"usable are {list(allowed)}", "correct --cpus")
    return chosen


def deal(cores: Sequence[int], workers: int, quota: int | None = None, threads: int | None = None) -> list[Share]:
    """Shares for ``workers`` workers, prefill workers first: they gain most from a core that is left over.

    Enough cores: contiguous equal shares; with more than two for each, one stays free for the coordinator. Too few:
    one core each, in turn. ``quota`` is a container's limit in cores: where it is the smaller number, the container's
    time is not tied to certain cores, so nobody is pinned. ``threads`` is what the user asked for.
    """
    if quota is not None and quota < len(cores):
        return [Share(None, threads or max(1, quota // workers))] * workers
    if len(cores) < workers:
        return [Share((cores[index % len(cores)],), threads or 1) for index in range(workers)]
    given = len(cores) - (1 if len(cores) > 2 * workers else 0)
    each, extra = divmod(given, workers)
    shares, at = [], 0
    for index in range(workers):
        width = each + (1 if index < extra else 0)
        shares.append(Share(tuple(cores[at : at + width]), threads or width))
        at += width
    return shares


def deal_more(
    cores: Sequence[int], taken: Sequence[Share], workers: int, quota: int | None = None, threads: int | None = None
) -> list[Share]:
    """Shares for ``workers`` more workers beside those that have ``taken`` theirs and keep them (a process cannot
    change its number of threads): the cores that nobody has, whole; where these are too few, one core each, of those
    that the fewest have."""
    if quota is not None and quota < len(cores):
        return [Share(None, threads or max(1, quota // (len(taken) + workers)))] * workers
    load = Counter(core for share in taken for core in share.cores or ())
    free = [core for core in cores if not load[core]]
    if len(free) >= workers:
        return deal(free, workers, threads=threads)
    shares = []
    for _ in range(workers):
        core = min(cores, key=lambda each: load[each])
        load[core] += 1
        shares.append(Share((core,), threads or 1))
    return shares


def beside(cores: Sequence[int], workers: Iterable[Share], undisturbed: Iterable[Share]) -> tuple[int, ...]:
    """Where whoever passes messages on should run, and interrupts all others there: on cores that no worker has; or,
    where there are none, not on those of who is to be ``undisturbed``, whose steps would take longer; or anywhere."""
    for avoided in (workers, undisturbed):
        busy = {core for share in avoided for core in share.cores or ()}
        if found := tuple(core for core in cores if core not in busy):
            return found
    return tuple(cores)


def pin(pid: int, cores: Sequence[int]) -> None:
    """The process, with all threads that it has and will have, runs on ``cores``. A thread that has ended, or may not,
    is left as it is."""
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))  # the first one first: it starts the others
    except OSError:  # the process has ended
        return
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)


def usable_cores() -> tuple[int, ...]:
    """The cores this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def core_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many cores' worth of time a container's limit gives, rounded up; None without a limit."""
    try:
        limit, _, period = (root / "cpu.max").read_text().partition(" ")
        return None if limit == "max" else max(1, -(-int(limit) // int(period)))
    except (OSError, ValueError):
        return None


def own_threads(chosen: Sequence[int] | None, workers: int) -> int:
    """Threads of a worker that is started by itself: one for each of the cores ``chosen`` for it; of all cores that
    this process may use, or as many as its container's limit gives, for one of ``workers`` that share them."""
    if chosen:
        return len(chosen)
    usable = len(usable_cores())
    return max(1, min(usable, core_quota() or usable) // workers)
