"""``tandem bench goodput``: the highest rate at which enough requests meet their objectives.

This is DistServe's definition of goodput: runs at several rates give a curve of attainment, and the rate at which it
falls below the wanted share (90 %) is interpolated. Failed and rejected requests miss. Objectives are in ms, or
multiples of what the same server does without load. Without ``--rates`` the rates are searched for: doubled until one
fails, then halved in between on a logarithmic scale. A run that spends more time draining than
sending does not show that its rate is sustained: at that rate the queue would keep growing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.commands.serve import show_remarks
from bench.load import results
from bench.load.arrivals import arrivals
from bench.load.metrics import METRICS, Objective, Summary, as_json, parse_objectives, summarise
from bench.load.run import UNSERVED, Run, run_now
from bench.load.setup import Prepared, as_load, prepare
from common.config.bench.goodput import BenchGoodputConfig
from common.config.bench.shared import LoadOptions
from common.core.errors import StartError

UNLOADED_REQUESTS = 8
FIRST_SHARE = 0.5
"""First rate of the search, as a share of the rate at which requests are served one after another."""
MOST_RUNS = 16
NEAR = 1.08
"""Two rates with a smaller ratio are close enough to interpolate between."""
MIN_ANSWERED_SHARE = 0.5
"""Requests answered per second of the whole run, as a share of the rate, that a run needs to show that the rate is
sustained. Below it, answers took longer than all requests took to arrive."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run: its rate, the share of its requests inside the objectives, and the requests ``answered`` per second of
    the whole run."""

    rate: float
    attainment: float
    answered: float = math.inf

    @property
    def conclusive(self) -> bool:
        """Whether the run lasted long enough to show that the rate is sustained."""
        return self.answered >= MIN_ANSWERED_SHARE * self.rate


@dataclass(frozen=True, slots=True)
class Goodput:
    """A rate in requests per second: that of the fastest good run if none failed (``at_least``), else interpolated
    ``between`` two runs."""

    rate: float
    at_least: bool = False
    between: tuple[Point, Point] | None = None

    def __str__(self) -> str:
        return f"{'at least ' if self.at_least else ''}{self.rate:.2f} requests/s"


def highest(curve: Sequence[Point], wanted: float) -> Goodput:
    """Return where the curve first falls below ``wanted``; 0 if even its lowest rate is below. Good results of runs
    that were too short do not count."""
    before: Point | None = None
    for point in sorted(_conclusive(curve, wanted), key=lambda each: each.rate):
        if point.attainment < wanted:
            if before is None:
                return Goodput(0.0)
            share = (before.attainment - wanted) / (before.attainment - point.attainment)
            return Goodput(before.rate + share * (point.rate - before.rate), between=(before, point))
        before = point
    return Goodput(before.rate if before else 0.0, at_least=True)


def _conclusive(curve: Sequence[Point], wanted: float) -> list[Point]:
    """Return the curve without the good results of runs that were too short."""
    return [point for point in curve if point.conclusive or point.attainment < wanted]


def next_rate(curve: Sequence[Point], wanted: float, first: float, near: float = NEAR) -> float | None:
    """Return the rate to try next, or None if the answer is known well enough: between two rates with a ratio of at
    most ``near``."""
    conclusive = _conclusive(curve, wanted)
    good = [point.rate for point in conclusive if point.attainment >= wanted]
    bad = [point.rate for point in conclusive if point.attainment < wanted]
    if not curve:
        return first
    if len(curve) >= MOST_RUNS or len(conclusive) < len(curve):
        return None
    if not bad:
        return 2 * max(good)
    below = [rate for rate in good if rate < min(bad)]
    if not below:
        return min(bad) / 2 if min(bad) > first / 16 else None
    return math.sqrt(max(below) * min(bad)) if min(bad) / max(below) > near else None


def unloaded(prepared: Prepared, console: Console | None = None) -> Summary:
    """Send a few requests one after another, to measure the server without load. Raises StartError if none succeeds."""
    asks = prepared.asks()[:UNLOADED_REQUESTS]
    run = run_now(
        prepared.target,
        asks,
        [0.0] * len(asks),
        max_concurrency=1,
        warm=prepared.warm(1),
        console=console,
        title="unloaded",
    )
    if console:
        show_remarks(console, run.records)
    summary = summarise(run)
    if not summary.completed:
        raise StartError(f"{prepared.target.url} serves no request", run.records[0].error, UNSERVED)
    return summary


def wanted_objectives(text: str) -> tuple[Objective, ...]:
    """Parse ``--goodput``, in ms or in multiples of the unloaded median. Raises StartError if it is neither."""
    try:
        return parse_objectives(text)
    except ValueError as error:
        raise StartError(f"--goodput cannot be {text!r}", str(error), "give ttft:1000,tpot:40 or ttft:5x") from None


def measured_objectives(wanted: Sequence[Objective], alone: Summary) -> tuple[Objective, ...]:
    """Return the objectives in ms; multiples refer to the medians of ``alone``."""
    medians = {metric: alone.spreads[metric].median for metric in ("ttft", "tpot", "e2el")}
    return tuple(each.absolute(medians) for each in wanted)


def sweep(
    attempt: Callable[[float], Summary], wanted: float, first: float, rates: Sequence[float] = ()
) -> dict[float, Summary]:
    """Run at ``rates``, or at those that the search chooses; return the summaries by rate."""
    found: dict[float, Summary] = {}
    if rates:
        return {rate: attempt(rate) for rate in rates}
    while (rate := next_rate(curve(found), wanted, first)) is not None:
        found[rate] = attempt(rate)
    return found


def curve(found: dict[float, Summary]) -> list[Point]:
    """Return the attainment of each run, in the order of rates."""
    return [Point(rate, each.attainment or 0.0, each.request_rate) for rate, each in sorted(found.items())]


def load_at(options: LoadOptions, prepared: Prepared, rate: float, run: int, console: Console | None) -> Run:
    """Send the load at ``rate``; ``run`` numbers the runs."""
    asks = prepared.asks(run)
    return run_now(
        prepared.target,
        asks,
        arrivals(len(asks), rate, burstiness=options.burstiness, seed=options.seed),
        console=console,
        title=f"{rate:.2f} requests/s",
    )


def remarks(goodput: Goodput, points: Sequence[Point], config: BenchGoodputConfig) -> list[str]:
    """Describe what the goodput rests on: the two rates it is interpolated between, whether chance has a part in it,
    and which runs were too short."""
    lines = []
    if goodput.between is not None:
        good, bad = goodput.between
        lines.append(
            f"interpolated between {good.rate:.2f} ({good.attainment:.1%} inside) and {bad.rate:.2f} "
            f"({bad.attainment:.1%})"
        )
        later = [each for each in points if each.rate > bad.rate and each.attainment >= config.attainment]
        if again := ", ".join(f"{each.rate:.2f}" for each in later):
            lines.append(
                f"at {again} enough were inside again: {config.num_prompts} requests at each rate leave it to "
                "chance (--num-prompts)"
            )
    conclusive = _conclusive(points, config.attainment)
    if short := ", ".join(f"{point.rate:.2f}" for point in points if point not in conclusive):
        lines.append(
            f"at {short} requests/s most of the time passed after the last request had been sent, which shows nothing "
            "about such a rate: send more (--num-prompts)"
        )
    return lines


def run(config: BenchGoodputConfig) -> int:
    """Print the curve and the goodput; exit code 1 if no rate was good enough."""
    console = Console(stderr=True, highlight=False)
    wanted = wanted_objectives(config.goodput)
    prepared = prepare(config, config.url, config.api_key, config.served_model_name, config.header)
    for note in prepared.notes:
        console.print(f"note: {note}", markup=False)
    alone = unloaded(prepared, console)
    objectives = measured_objectives(wanted, alone)
    shown = " ".join(map(str, objectives))
    spreads = alone.spreads
    print(f"unloaded: TTFT {spreads['ttft'].median:.0f} ms, TPOT {spreads['tpot'].median:.1f} ms (medians)")
    print(f"objectives: {shown} (ms)")
    print(f"{'rate':>8} {'inside':>8} {'inside/s':>9} {'P99 TTFT':>10} {'P99 ITL':>9} {'failed':>7}")
    attempt = partial(_attempt, config, prepared, objectives, itertools.count(1), console)
    first = FIRST_SHARE * 1000 / max(spreads["e2el"].mean, 1e-3)
    found = sweep(attempt, config.attainment, first, config.rates or ())
    points = curve(found)
    goodput = highest(points, config.attainment)
    print(f"goodput: {goodput} with {config.attainment:.0%} inside {shown}")
    for line in remarks(goodput, points, config):
        print(line)
    if config.save:
        about = {
            "model_id": prepared.target.model,
            "dataset_name": config.dataset_name,
            "load": as_load(config, prepared.target.model),
            "objectives_ms": {each.metric: each.bound for each in objectives},
            "attainment": config.attainment,
        }
        results.save(Path(config.save), about | _as_json(goodput, alone, found))
    if config.plot:
        from bench.load import plots

        attained = [(point.rate, point.attainment) for point in points]
        plots.draw_attainment({prepared.target.model: attained}, Path(config.plot), config.attainment, shown)
    return 0 if goodput.rate else 1


def _attempt(
    config: BenchGoodputConfig,
    prepared: Prepared,
    objectives: Sequence[Objective],
    numbers: Iterator[int],
    console: Console,
    rate: float,
) -> Summary:
    """Run the load at ``rate`` and print its line."""
    run = load_at(config, prepared, rate, next(numbers), console)
    show_remarks(console, run.records)
    summary = summarise(run, objectives=objectives)
    print(
        f"{rate:>8.2f} {summary.attainment:>8.1%} {summary.goodput:>9.2f}"
        f" {summary.spreads['ttft'].percentiles[99]:>10.0f} {summary.spreads['itl'].percentiles[99]:>9.1f}"
        f" {summary.failed:>7}",
        flush=True,
    )
    return summary


def _as_json(goodput: Goodput, alone: Summary, found: dict[float, Summary]) -> dict[str, Any]:
    return {
        "goodput": goodput.rate,
        "goodput_is_a_lower_bound": goodput.at_least,
        "interpolated_between": [point.rate for point in goodput.between or ()],
        "unloaded": as_json(alone, metrics=METRICS),
        "runs": [{"rate": rate, **as_json(each, metrics=METRICS)} for rate, each in sorted(found.items())],
    }
