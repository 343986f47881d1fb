"""Assignment of cores and threads to the workers of this machine.

Pure, except for the functions that query the system. A worker whose threads share a core with those of another waits
for it at the end of every layer, so each core is assigned to one worker where there are enough.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from common.core.errors import StartError


class CoreShare(NamedTuple):
    """The cores of one worker, and the number of threads of it or of each of its ranks. ``cores`` is None if it is not
    pinned."""

    cores: tuple[int, ...] | None
    threads: int

    @property
    def cpus(self) -> str | None:
        """The cores in the syntax of ``--cpus``."""
        return None if self.cores is None else ",".join(map(str, self.cores))


def choose(wanted: Sequence[int] | None) -> list[int] | None:
    """Return the cores of ``wanted`` that this process may use; None (all cores) stays None. Raises StartError if there
    are none."""
    if wanted is None:
        return None
    allowed = usable_cores()
    if not (chosen := [core for core in wanted if core in allowed]):
        what = f"--cpus {','.join(map(str, wanted))} names no usable core"
        raise StartError(what, f"usable are {list(allowed)}", "correct --cpus")
    return chosen


def deal(cores: Sequence[int], workers: int, quota: int | None = None, threads: int | None = None) -> list[CoreShare]:
    """Return the shares of ``workers`` workers. The first workers get the spare cores; callers list prefill workers
    first, which gain most from them.

    With enough cores: contiguous, equal shares; if there are more than two per worker, one core stays free for the
    coordinator. With fewer cores than workers: one core each, in turn. ``quota``: a container's CPU limit in cores. If
    it is below the number of cores, no worker is pinned, because the limit is not tied to particular cores.
    ``threads``: threads per worker if configured.
    """
    if quota is not None and quota < len(cores):
        return [CoreShare(None, threads or max(1, quota // workers))] * workers
    if len(cores) < workers:
        return [CoreShare((cores[index % len(cores)],), threads or 1) for index in range(workers)]
    given = len(cores) - (1 if len(cores) > 2 * workers else 0)
    each, extra = divmod(given, workers)
    shares, at = [], 0
    for index in range(workers):
        width = each + (1 if index < extra else 0)
        shares.append(CoreShare(tuple(cores[at : at + width]), threads or width))
        at += width
    return shares


def deal_more(
    cores: Sequence[int], taken: Sequence[CoreShare], workers: int, quota: int | None = None, threads: int | None = None
) -> list[CoreShare]:
    """Return the shares of ``workers`` additional workers. Existing workers keep their shares ``taken``, because a
    process cannot change its number of threads.

    The new workers share the unassigned cores as in :func:`deal`. If there are too few, each gets one core, the one
    with the fewest workers."""
    if quota is not None and quota < len(cores):
        return [CoreShare(None, threads or max(1, quota // (len(taken) + workers)))] * workers
    load = Counter(core for share in taken for core in share.cores or ())
    free = [core for core in cores if not load[core]]
    if len(free) >= workers:
        return deal(free, workers, threads=threads)
    shares = []
    for _ in range(workers):
        core = min(cores, key=lambda each: load[each])
        load[core] += 1
        shares.append(CoreShare((core,), threads or 1))
    return shares


def beside(cores: Sequence[int], workers: Iterable[CoreShare], undisturbed: Iterable[CoreShare]) -> tuple[int, ...]:
    """Return the cores for the coordinator, whose threads preempt others: those that no worker has; if there are none,
    those that no ``undisturbed`` worker has, whose steps it would prolong; else all cores."""
    for avoided in (workers, undisturbed):
        busy = {core for share in avoided for core in share.cores or ()}
        if found := tuple(core for core in cores if core not in busy):
            return found
    return tuple(cores)


def pin(pid: int, cores: Sequence[int]) -> None:
    """Pin the process ``pid`` to ``cores``: all its threads, and those that they will start. Threads that have ended,
    or that may not be moved, are skipped."""
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))  # the main thread first: it starts others
    except OSError:  # the process has ended
        return
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)


def usable_cores() -> tuple[int, ...]:
    """Return the cores on which this process may run."""
    return tuple(sorted(os.sched_getaffinity(0)))


def core_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return a container's CPU limit (cgroup v2) in cores, rounded up; None without a limit."""
    try:
        limit, _, period = (root / "cpu.max").read_text().partition(" ")
        return None if limit == "max" else max(1, -(-int(limit) // int(period)))
    except (OSError, ValueError):
        return None


def own_threads(chosen: Sequence[int] | None, workers: int) -> int:
    """Return the number of threads of a worker started without a launcher: one per ``chosen`` core if any are chosen,
    else its part of the usable cores or of the container's CPU limit, which ``workers`` workers share."""
    if chosen:
        return len(chosen)
    usable = len(usable_cores())
    return max(1, min(usable, core_quota() or usable) // workers)


def among_ranks(chosen: Sequence[int] | None, ranks: int, threads: int | None, workers: int) -> list[CoreShare]:
    """Return the shares of the ``ranks`` ranks of one worker: contiguous parts of its ``chosen`` cores, or one core
    each, in turn, if they are fewer. ``threads``: threads of each rank if configured; else one per core, or an equal
    part of those of an unpinned worker on a machine of ``workers``."""
    if chosen is None:
        return [CoreShare(None, threads or max(1, own_threads(None, workers) // ranks))] * ranks
    if len(chosen) < ranks:
        return [CoreShare((chosen[rank % len(chosen)],), threads or 1) for rank in range(ranks)]
    bounds = [len(chosen) * rank // ranks for rank in range(ranks + 1)]
    return [CoreShare(tuple(chosen[first:last]), threads or last - first) for first, last in pairwise(bounds)]


def joined(shares: Sequence[CoreShare]) -> CoreShare:
    """Return the share of a worker with these shares for its ranks: all their cores, and the threads of one rank."""
    held = [share.cores for share in shares if share.cores is not None]
    cores = tuple(sorted({core for each in held for core in each})) if len(held) == len(shares) else None
    return CoreShare(cores, min(share.threads for share in shares))
