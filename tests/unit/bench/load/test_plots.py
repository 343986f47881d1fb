"""Plots of small and of uneven runs: every axis has labels, and they do not overlap."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from bench.load import plots
from bench.load.client import Record
from bench.load.metrics import Objective
from bench.load.run import Run


def run(*ttfts_ms: float, gaps_ms: tuple[float, ...] = (6.0, 6.1)) -> Run:
    """Return a run of requests one after another, each with the given gaps."""
    records, now = [], 0.0
    for ttft in ttfts_ms:
        moments = [now + ttft / 1000]
        for gap in gaps_ms:
            moments.append(moments[-1] + gap / 1000)
        stages = {"prefill_ms": ttft / 2, "prefill": "prefill-0", "decode": "decode-0"}
        records.append(Record(now, 8, now, moments, [], len(moments), stages))
        now = moments[-1]
    return Run(records, now, 0.0)


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each drawn figure is added."""
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "_write", lambda figure, path: drawn.append(figure))
    return drawn


RUNS = {
    "one request": {"": run(45.0)},
    "one token": {"": run(45.0, gaps_ms=())},
    "narrow": {"": run(31.2, 31.3, 33.7)},
    "a factor of two": {"": run(145.0, 170.0, 212.0, 260.0)},
    "all but the same": {"": run(1000.01, 1000.02)},
    "three decades": {"": run(95.0, 90_000.0, gaps_ms=(8.0, 90.0))},
    "five decades": {"": run(3.0, 45_000.0, gaps_ms=(0.01, 900.0))},
    "two systems": {"1p1d": run(34.0, 35.0), "2c": run(41.0, 400.0)},
    "failed": {"": Run([Record(0.0, 8, error="HTTP 503")], 0.0, 0.0)},
}


PICTURES: dict[str, Callable[[dict[str, Run], list[Objective]], None]] = {
    "all": lambda runs, objectives: plots.draw_runs(runs, Path("run.png"), objectives),
    "distributions": lambda runs, objectives: plots.draw_distributions(runs, Path("run.png"), objectives),
    "timelines": lambda runs, objectives: plots.draw_timelines(runs, Path("run.png")),
}


SAMPLE = {(picture, bounds, name) for name in RUNS for picture, bounds in (("all", True), ("distributions", False))}
SAMPLE -= {("distributions", False, name) for name in ("one token", "narrow", "all but the same", "failed")}
SAMPLE |= {("timelines", True, "two systems"), ("timelines", False, "one request"), ("all", False, "two systems")}
"""Pictures, whether with bounds, and names of runs in ``make test``; "all" has the axes of both other pictures."""
BOUNDS = [Objective("ttft", 40.0), Objective("tpot", 8.0)]


@pytest.mark.parametrize(
    ("draw", "objectives", "runs"),
    [
        pytest.param(
            PICTURES[picture], BOUNDS if bounds else [], RUNS[name],
            marks=() if (picture, bounds, name) in SAMPLE else pytest.mark.whole,
            id=f"{picture}-{'bounds' if bounds else ''}-{name}",
        )
        for picture in PICTURES
        for bounds in (False, True)
        for name in RUNS
    ],
)  # fmt: skip
def test_labels_stay_apart(
    runs: dict[str, Run], objectives: list[Objective], draw: Callable[..., None], figure: list[Any]
) -> None:
    draw(runs, objectives)
    canvas = FigureCanvasAgg(figure[0])
    canvas.draw()
    for axes in figure[0].axes:
        for axis, side in ((axes.xaxis, 0), (axes.yaxis, 1)):
            low, high = sorted(axis.get_view_interval())
            labels = [
                label
                for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
                if low <= at <= high and label.get_text()
            ]
            boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels]
            spans = sorted(tuple(box.get_points()[:, side]) for box in boxes)
            assert labels or axes.texts, (axes.get_title(loc="left"), side)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), labels
            assert not any(label.get_text() for label in axis.get_ticklabels(minor=True))


def test_requests_are_counted_in_whole_numbers(figure: list[Any]) -> None:
    for count in (1, 3, 40):
        plots.draw_run(run(*[50.0] * count), Path("run.png"))
        (timeline,) = [axes for axes in figure[-1].axes if axes.get_ylabel() == "request"]
        low, high = sorted(timeline.get_ylim())
        shown = [at for at in timeline.get_yticks() if low <= at <= high]
        assert shown and all(at == int(at) and 0 <= at < count for at in shown)


def test_timeline_labels_unreported_stages_as_waiting_and_prefill(figure: list[Any]) -> None:
    reported, unreported = run(40.0), run(40.0)
    for record in unreported.records:
        record.stages = None
    plots.draw_timelines({"reported": reported, "unreported": unreported}, Path("run.png"))
    legends = [axes.get_legend() for axes in figure[0].axes]
    names = [[text.get_text() for text in legend.get_texts()] for legend in legends if legend]
    assert names == [["waiting", "prefill", "decode"], ["waiting and prefill", "decode"]]
