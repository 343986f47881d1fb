"""``python -m tests.simulation [--seeds 0:2000] [--jobs N] [--log FILE]``: many histories, and the seeds that failed.

A failing seed replays with ``--seeds N``. With ``--log`` finished seeds are kept, and the same command goes on later.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.history import Outcome, run

CHUNK = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="FIRST:END, or one seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--log", action="store_true", help="show what the parts say")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of the history
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    logging.basicConfig(level=logging.DEBUG if options.log else logging.CRITICAL, format="%(name)s: %(message)s")
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    total, failures, began = Outcome(), [], time.monotonic()
    with contextlib.ExitStack() as stack:
        for outcome, failed in _results(seeds, options.jobs, stack):
            total.add(outcome)
            failures += failed
    for seed, text in failures[:20]:
        print(f"seed {seed}: {text}")
    print(f"{len(seeds)} seeds in {time.monotonic() - began:.1f} s; failed: {[seed for seed, _ in failures] or 'none'}")
    print(f"requests {dict(total.ends.most_common())}, {total.tokens} tokens")
    print(f"longest pause of a stream {total.longest_gap:.2f} s (seed {total.widest})")
    print(f"faults {dict(total.faults.most_common())}, {total.seconds:.0f} virtual seconds")
    return 1 if failures else 0


def _results(seeds: range, jobs: int, stack: contextlib.ExitStack) -> Iterable[tuple[Outcome, list[tuple[int, str]]]]:
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    return map(_chunk, chunks) if jobs == 1 else stack.enter_context(ProcessPoolExecutor(jobs)).map(_chunk, chunks)


def _chunk(seeds: range) -> tuple[Outcome, list[tuple[int, str]]]:
    total, failures = Outcome(), []
    for seed in seeds:
        try:
            total.add(run(seed))
        except Exception as error:
            lines = traceback.format_exception(error)
            failures.append((seed, "".join(lines[-4:]) if len(seeds) > 1 else "".join(lines)))
    return total, failures


if __name__ == "__main__":
    sys.exit(main())
