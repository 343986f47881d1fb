"""``python -m tests.chaos``: the failure matrix, and faults under load.

    python -m tests.chaos all                                                 what ``make chaos`` runs
    python -m tests.chaos matrix [--only TEXT] [--clusters 3]                 every fault in every phase
    python -m tests.chaos load [--only TEXT] [--requests 800] [--at-once 64]  one fault under load, over each link
    python -m tests.chaos frames [--requests 2000] [--rate 0.01]              one KV frame in twenty is broken
    python -m tests.chaos soak [--requests 10000] [--every 20] [--state FILE] a fault every 20 s, 10 % of clients leave
    python -m tests.chaos model [DIRECTORY] [--dtype bfloat16] [--only TEXT]  one fault under load, with a real model
    python -m tests.chaos overload                                            two and three times the peak load
    python -m tests.chaos aborts [--count 100]                                time from a disconnect to free blocks

With ``--report FILE`` the tables are also written to a file. Logs are kept if something fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path

from tests.chaos import load, matrix, overload, soak
from tests.chaos.cells import CELLS
from tests.chaos.host import undisturbed
from tests.chaos.load import HEADER, LoadFigures
from tests.chaos.request import clock


def _matrix(options: argparse.Namespace) -> tuple[bool, str]:
    cells = [cell for cell in CELLS if options.only in cell.id]
    started = clock()
    results = asyncio.run(matrix.run(cells, options.directory, options.clusters))
    return all(result.passed for result in results), matrix.markdown(results, clock() - started)


def _verdict(figures: Sequence[LoadFigures]) -> tuple[bool, str]:
    return all(each.passed for each in figures), "\n".join([HEADER, *(each.row() for each in figures)]) + "\n"


def _load(options: argparse.Namespace) -> tuple[bool, str]:
    where, knobs = options.directory, {"requests": options.requests, "at_once": options.at_once}
    return _verdict(asyncio.run(load.load(where, only=options.only, **knobs)))


def _frames(options: argparse.Namespace) -> tuple[bool, str]:
    where, knobs = options.directory, {"requests": options.requests, "at_once": options.at_once}
    return _verdict(asyncio.run(load.tampered(where, rate=options.rate, **knobs)))


def _soak(options: argparse.Namespace) -> tuple[bool, str]:
    run = soak.soak(
        options.directory, requests=options.requests, at_once=options.at_once, every_s=options.every,
        state=options.state, seed=options.seed,
    )  # fmt: skip
    return _verdict([asyncio.run(run)])


def _aborts(options: argparse.Namespace) -> tuple[bool, str]:
    rows = ["| a client hangs up while | times | p50 (s) | p99 (s) | longest (s) |", "|---|---|---|---|---|"]
    play = partial(soak.aborts, options.directory, count=options.count)
    found = asyncio.run(undisturbed(play, lambda each: "; ".join(hang_ups.late for hang_ups in each if hang_ups.late)))
    for each in found:
        times, p99 = each.times, f"{each.p99_s:.3f} of {each.allowed_s:.2f}"
        rows.append(f"| {each.phase} | {len(times)} | {times[len(times) // 2]:.3f} | {p99} | {times[-1]:.3f} |")
    return not any(each.late for each in found), "\n".join(rows) + "\n"


def _overload(options: argparse.Namespace) -> tuple[bool, str]:
    play = partial(overload.overload, options.directory)
    return _verdict(asyncio.run(undisturbed(play, lambda figures: load.only_late(*figures))))


def _model(options: argparse.Namespace) -> tuple[bool, str]:
    from tests.chaos import model  # imports torch

    knobs = {"requests": options.requests, "at_once": options.at_once, "dtype": options.dtype, "only": options.only}
    return _verdict(asyncio.run(model.load(options.directory, options.model or model.BUILTIN, **knobs)))


def _all(options: argparse.Namespace) -> tuple[bool, str]:
    parts = {
        "The matrix": _matrix,
        "One fault under load": _load,
        "Broken frames": _frames,
        "Hang-ups": _aborts,
        "Overload": _overload,
    }
    good, text = True, ""
    for title, part in parts.items():
        options.requests = 2000 if part is _frames else 800
        passed, table = part(options)
        good, text = good and passed, f"{text}\n## {title}\n\n{table}"
    return good, text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    cells = commands.add_parser("matrix", help="every fault in every phase of a request's life")
    cells.add_argument("--only", default="", help="cells whose name has this text")
    cells.add_argument("--clusters", type=int, default=3, help="systems side by side")
    cells.set_defaults(run=_matrix)
    loads = commands.add_parser("load", help="one fault under load, scenario by scenario")
    loads.add_argument("--only", default="", help="scenarios whose name has this text")
    frames = commands.add_parser("frames", help="frames of KV broken in every way")
    frames.add_argument("--rate", type=float, default=0.01, help="of each kind")
    soaks = commands.add_parser("soak", help="many requests, faults all along, a tenth of the clients hangs up")
    soaks.add_argument("--every", type=float, default=20.0, help="seconds from fault to fault")
    soaks.add_argument("--state", type=Path, help="file with the totals so far: a run goes on from there")
    soaks.add_argument("--seed", type=int, default=0)
    for command, requests, run in ((loads, 800, _load), (frames, 2000, _frames), (soaks, 10_000, _soak)):
        command.add_argument("--requests", type=int, default=requests)
        command.add_argument("--at-once", type=int, default=256 if run is _soak else 64, help="clients")
        command.set_defaults(run=run)
    too_much = commands.add_parser("overload", help="goodput at multiples of the peak")
    too_much.set_defaults(run=_overload)
    models = commands.add_parser("model", help="one fault under load, with a model")
    models.add_argument("model", type=Path, nargs="?", help="checkpoint; without it the built-in model")
    models.add_argument("--requests", type=int, default=64)
    models.add_argument("--at-once", type=int, default=16, help="clients")
    models.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    models.add_argument("--only", default="", help="faults whose name has this text")
    models.set_defaults(run=_model)
    hang_ups = commands.add_parser("aborts", help="how soon a client's hanging up frees blocks")
    hang_ups.add_argument("--count", type=int, default=100)
    hang_ups.set_defaults(run=_aborts)
    everything = commands.add_parser("all", help="matrix, load, frames, aborts and overload")
    everything.set_defaults(run=_all, only="", clusters=3, at_once=64, rate=0.01, count=100)
    for command in commands.choices.values():
        command.add_argument("--report", type=Path, help="file for the tables")
    options = parser.parse_args()
    options.directory = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    good, text = options.run(options)
    print(text)
    if options.report:
        head = f"`python -m tests.chaos {' '.join(sys.argv[1:])}`, {date.today()}, {os.cpu_count()} cores"
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(f"# Faults\n\n{head}\n\n{text}")
    if good:
        shutil.rmtree(options.directory)
    else:
        print(f"logs are in {options.directory}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
