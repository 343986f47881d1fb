"""``python -m tests.chaos``: the failure matrix, and faults under load.

    python -m tests.chaos matrix [--only TEXT] [--houses 3] [--report FILE]   every fault in every phase
    python -m tests.chaos load [--only TEXT] [--requests 800] [--at-once 64]  one fault under load
    python -m tests.chaos frames [--requests 2000] [--rate 0.01]              one frame in twenty is broken
    python -m tests.chaos soak [--requests 10000] [--state FILE]              a fault every 20 s, a tenth hangs up
    python -m tests.chaos aborts [--count 100]                                how soon a hang-up frees blocks
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import load, matrix, soak
from tests.chaos.cells import CELLS
from tests.chaos.house import clock
from tests.chaos.load import HEADER, Figures


def _matrix(options: argparse.Namespace) -> bool:
    cells = [cell for cell in CELLS if options.only in cell.id]
    started = clock()
    results = asyncio.run(matrix.run(cells, options.directory, options.houses))
    table = matrix.markdown(results, clock() - started)
    print(table)
    if options.report:
        options.report.write_text(table)
    return all(result.mark in ("ok", "missing") for result in results)


def _told(figures: Sequence[Figures]) -> bool:
    print("\n".join(["", HEADER, *(each.row() for each in figures)]))
    return all(each.passed for each in figures)


def _load(options: argparse.Namespace) -> bool:
    where, knobs = options.directory, {"requests": options.requests, "at_once": options.at_once}
    return _told(asyncio.run(load.load(where, only=options.only, **knobs)))


def _frames(options: argparse.Namespace) -> bool:
    where, knobs = options.directory, {"requests": options.requests, "at_once": options.at_once}
    return _told(asyncio.run(load.tampered(where, rate=options.rate, **knobs)))


def _soak(options: argparse.Namespace) -> bool:
    knobs = {"requests": options.requests, "state": options.state, "seed": options.seed}
    return _told([asyncio.run(soak.soak(options.directory, **knobs))])


def _aborts(options: argparse.Namespace) -> bool:
    times = asyncio.run(soak.aborts(options.directory, count=options.count))
    p50, p99 = times[len(times) // 2], times[min(len(times) - 1, math.ceil(0.99 * len(times)) - 1)]
    print(f"blocks free after a hang-up, {len(times)} times: p50 {p50:.3f} s, p99 {p99:.3f} s, max {times[-1]:.3f} s")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    cells = commands.add_parser("matrix", help="every fault in every phase of a request's life")
    cells.add_argument("--only", default="", help="cells whose name has this text")
    cells.add_argument("--houses", type=int, default=3, help="systems side by side")
    cells.add_argument("--report", type=Path, help="file for the table")
    cells.set_defaults(run=_matrix)
    loads = commands.add_parser("load", help="one fault under load, scenario by scenario")
    loads.add_argument("--only", default="", help="scenarios whose name has this text")
    frames = commands.add_parser("frames", help="frames of KV broken in every way")
    frames.add_argument("--rate", type=float, default=0.01, help="of each kind")
    soaks = commands.add_parser("soak", help="many requests, a fault every 20 s, a tenth of the clients hangs up")
    soaks.add_argument("--state", type=Path, help="file with the totals so far: a run goes on from there")
    soaks.add_argument("--seed", type=int, default=0)
    for command, requests, run in ((loads, 800, _load), (frames, 2000, _frames), (soaks, 10_000, _soak)):
        command.add_argument("--requests", type=int, default=requests)
        command.add_argument("--at-once", type=int, default=64, help="clients (a soak has 256)")
        command.set_defaults(run=run)
    hang_ups = commands.add_parser("aborts", help="how soon a client's hanging up frees blocks")
    hang_ups.add_argument("--count", type=int, default=100)
    hang_ups.set_defaults(run=_aborts)
    options = parser.parse_args()
    options.directory = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    good = bool(options.run(options))
    if good:
        shutil.rmtree(options.directory)
    else:
        print(f"logs are in {options.directory}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
