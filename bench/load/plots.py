"""Plots of runs. The only module here that needs matplotlib, which the extra ``[bench]`` installs.

Draws without pyplot: no global state, no window. The file name's suffix selects the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.load.client import Record
from bench.load.metrics import Objective
from bench.load.run import Run
from common.core.errors import StartError, reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

LEAST_MS = 0.1
"""Shorter times are drawn at this value."""
DECADE = 10
"""A time axis whose largest value exceeds its smallest by more than this factor is logarithmic."""
WAIT, PREFILL, DECODE, UNREPORTED = "#c7c7c7", "#d1603d", "#3d6fb1", "#dfb3a3"
PHASES = {WAIT: "waiting", PREFILL: "prefill", UNREPORTED: "waiting and prefill", DECODE: "decode"}
"""Label per colour. ``UNREPORTED``: the server does not report waiting and prefill separately."""


def draw_run(run: Run, path: Path, objectives: Iterable[Objective] = ()) -> None:
    """Draw the TTFT and ITL distributions of one run, and its timeline."""
    draw_runs({"": run}, path, objectives)


def draw_runs(runs: Mapping[str, Run], path: Path, objectives: Iterable[Objective] = ()) -> None:
    """Draw the TTFT and ITL distributions of all runs in one pair of axes, and below them a timeline per run.

    A timeline shows the requests and, if the server reports them, its workers, prefill above decode."""
    figure = _figure(11, 4 + 4 * len(runs))
    grid = figure.add_gridspec(1 + 2 * len(runs), 2, height_ratios=[4, *(3, 1) * len(runs)])
    _distributions((figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])), runs, objectives)
    _timelines(figure, [(grid[1 + 2 * row, :], grid[2 + 2 * row, :]) for row in range(len(runs))], runs)
    _write(figure, path)


def draw_distributions(runs: Mapping[str, Run], path: Path, objectives: Iterable[Objective] = ()) -> None:
    """Draw the TTFT and ITL distributions of several runs, side by side."""
    figure = _figure(11, 4)
    _distributions(figure.subplots(1, 2), runs, objectives)
    _write(figure, path)


def draw_timelines(runs: Mapping[str, Run], path: Path) -> None:
    """Draw a timeline per run: its requests and its workers, prefill above decode."""
    figure = _figure(11, 4 * len(runs))
    grid = figure.add_gridspec(2 * len(runs), 1, height_ratios=[3, 1] * len(runs))
    _timelines(figure, [(grid[2 * row], grid[2 * row + 1]) for row in range(len(runs))], runs)
    _write(figure, path)


def draw_attainment(
    curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, wanted: float, objectives: str
) -> None:
    """Draw the fraction of requests that meet the objectives against the request rate.

    ``curves`` maps each system to points (requests per second, fraction); ``wanted`` is drawn as a horizontal line."""
    figure = _figure(7, 4)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        rates, shares = zip(*curve, strict=True)
        axes.plot(rates, [100 * share for share in shares], marker="o", markersize=4, label=name)
    axes.axhline(100 * wanted, color="black", linewidth=0.8, linestyle="--")
    axes.set_ylim(0, 103)
    axes.set_xlim(left=0)
    _label(axes, f"requests within {objectives}", "requests per second", "%")
    axes.legend(frameon=False)
    _write(figure, path)


def _distributions(pair: Sequence[Axes], runs: Mapping[str, Run], objectives: Iterable[Objective]) -> None:
    first, between = pair
    bounds = {each.metric: each.bound for each in objectives if not each.relative}
    for name, run in runs.items():
        good = [record for record in run.records if record.ok]
        _distribution(first, name, [record.ttft * 1000 for record in good])
        _distribution(between, name, [gap * 1000 for record in good for gap in record.itls])
    _label(first, "time to first token", "ms", "share of requests")
    _label(between, "time between tokens", "ms", "share of gaps")
    _times(first, bounds.get("ttft"))
    _times(between, bounds.get("tpot"))
    if any(runs):
        first.legend(loc="lower right", frameon=False)


def _distribution(axes: Axes, name: str, values: Sequence[float]) -> None:
    if values:
        axes.ecdf(np.maximum(values, LEAST_MS), label=name or None, linewidth=1.4)


def _times(axes: Axes, bound: float | None) -> None:
    """Format the time axis of a plot whose distributions are drawn: plain numbers, few enough not to overlap.

    ``bound`` is an objective in ms, drawn as a vertical line."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_ylim(0, 1.03)
    if not axes.lines:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
        axes.set_xticks([])
        return
    if bound is not None:
        axes.axvline(bound, color="black", linewidth=0.8, linestyle="--")
    if (factor := axes.dataLim.x1 / axes.dataLim.x0) > DECADE:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if factor < DECADE**2 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _timelines(figure: Figure, places: Sequence[tuple[SubplotSpec, SubplotSpec]], runs: Mapping[str, Run]) -> None:
    """Draw a timeline per run. ``places`` holds, per run, the grid cells of its requests and of its workers."""
    shared: Axes | None = None
    for (above, below), (name, run) in zip(places, runs.items(), strict=True):
        axes = figure.add_subplot(above, sharex=shared)
        shared = shared or axes
        _timeline(axes, run.records, run.began_at, f"{name}: " if name else "")
        if any(record.stages for record in run.records):
            _lanes(figure.add_subplot(below, sharex=shared), run)


def _timeline(axes: Axes, records: Sequence[Record], began_at: float, title: str) -> None:
    """Draw a row per request: waiting, prefill and decode; waiting and prefill are one span if the server does not
    report prefill."""
    from matplotlib.ticker import MaxNLocator

    seen: set[str] = set()
    for row, record in enumerate(records):
        if not record.moments:
            axes.plot(record.sent_at - began_at, row, "x", color="black", markersize=4)
            continue
        sent, first, last = (at - began_at for at in (record.sent_at, record.moments[0], record.moments[-1]))
        prefill_ms = (record.stages or {}).get("prefill_ms")
        began = first - min(first - sent, prefill_ms / 1000) if prefill_ms else first
        spans = ((WAIT if prefill_ms else UNREPORTED, sent, began), (PREFILL, began, first), (DECODE, first, last))
        for colour, start, end in spans:
            if end > start:
                axes.barh(row, end - start, left=start, height=0.8, color=colour)
                seen.add(colour)
    for colour, name in PHASES.items():
        if colour in seen:
            axes.barh(0, 0, color=colour, label=name)
    axes.set_ylim(len(records) - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _label(axes, f"{title}every request, from sending it to its last token", "s", "request")
    if seen:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(seen), frameon=False, borderaxespad=0)


def _lanes(axes: Axes, run: Run) -> None:
    """Draw a lane per worker. Spans are translucent: where several requests decode together, they overlap and look
    darker."""
    spans: dict[str, list[tuple[float, float, str]]] = {}
    for record in run.records:
        if not (record.moments and record.stages):
            continue
        first, last = (at - run.began_at for at in (record.moments[0], record.moments[-1]))
        prefill = float(record.stages.get("prefill_ms") or 0.0) / 1000
        spans.setdefault(str(record.stages.get("prefill")), []).append((first - prefill, prefill, PREFILL))
        if record.stages.get("decode"):
            spans.setdefault(str(record.stages["decode"]), []).append((first, last - first, DECODE))
    workers = sorted(spans, key=lambda name: (not any(colour == PREFILL for *_, colour in spans[name]), name))
    for lane, worker in enumerate(workers):
        for began, length, colour in spans[worker]:
            axes.barh(lane, length, left=began, height=0.8, color=colour, alpha=0.35, linewidth=0)
    axes.set_yticks(range(len(workers)), workers)
    axes.invert_yaxis()
    _label(axes, "activity of the workers", "s", "")


def _label(axes: Axes, title: str, horizontal: str, vertical: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _write(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise StartError(f"cannot draw {path}", reason(error), "name a PNG or SVG file with --plot") from error
