"""For each known bug of ``tests/simulation/mutations.py``, the seed of a simulated history that catches it.

``python -m tests.golden.mutations`` prints the names of the bugs that are caught, as JSON, after it has checked that
each of these histories passes without the bug. With a number, those of smaller seeds are not checked: they are played
elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.golden import adapter
from tests.golden.store import HERE, Lines, read_whole, write_whole

FILE = HERE / "mutations.txt"
MOST_SEEDS = 900
"""The most seeds to search per bug; the rarest bugs need some hundred."""


def kept() -> dict[str, Lines]:
    return read_whole(FILE)


def seed_of(name: str) -> int:
    """Return the seed of the history that catches the bug ``name``."""
    return int(kept()[name][0].removeprefix("seed "))


def record(keys: Iterable[str] | None = None) -> Iterator[tuple[str, Lines]]:
    for name in adapter.mutations():
        if keys is None or name in keys:
            seed = seed_of(name)
            yield name, [f"seed {seed}" if adapter.catches(name, seed) else f"seed {seed} notices nothing"]


def _search(name: str, first: int) -> Lines:
    """Return the seed ``first`` if it still catches the bug and is below MOST_SEEDS, otherwise another one, preferably
    of the same kind."""
    kinds = adapter.kinds()
    others = sorted(range(MOST_SEEDS), key=lambda seed: (seed % kinds != first % kinds, seed))
    for seed in (*filter(MOST_SEEDS.__gt__, [first]), *others):
        if adapter.catches(name, seed):
            return [f"seed {seed}"]
    raise AssertionError(f"{name}: {MOST_SEEDS} histories notice nothing")


def caught(first: int) -> list[str]:
    """Return the names of the bugs that their histories catch. Raises if one of these fails without the bug, of those
    whose seed is ``first`` or larger."""
    seeds = {name: seed_of(name) for name in adapter.mutations()}
    for seed in sorted(set(seeds.values())):
        if seed >= first:
            adapter.play(seed)
    return [name for name, seed in seeds.items() if adapter.catches(name, seed)]


def freeze() -> str:
    known = kept() if FILE.exists() else {}
    names = adapter.mutations()
    firsts = [seed_of(name) if name in known else 0 for name in names]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        found = list(pool.map(_search, names, firsts))
    write_whole(FILE, zip(names, found, strict=True))
    moved = sum(lines != known.get(name) for name, lines in zip(names, found, strict=True))
    return f"{len(names)} bugs; {moved} noticed by another history than before"


if __name__ == "__main__":
    print(json.dumps(caught(int(sys.argv[1]) if sys.argv[1:] else 0)))
