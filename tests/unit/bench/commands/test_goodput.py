"""The second definition of goodput: the search for rates, the interpolation, and the command against a mock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.commands.goodput import NEAR, Goodput, Point, highest, next_rate, remarks
from common.config.bench.goodput import BenchGoodputConfig
from deploy.cli import main as cli


@pytest.mark.parametrize(
    ("curve", "found"),
    [
        ([(1, 1.0), (2, 1.0), (4, 0.8)], Goodput(3.0)),
        ([(4, 0.8), (1, 1.0), (2, 1.0)], Goodput(3.0)),
        ([(1, 0.95), (2, 0.85), (4, 1.0)], Goodput(1.5)),
        ([(1, 0.9), (2, 0.0)], Goodput(1.0)),
        ([(1, 0.5), (2, 0.1)], Goodput(0.0)),
        ([(1, 1.0), (2, 0.9)], Goodput(2.0, at_least=True)),
        ([], Goodput(0.0, at_least=True)),
        ([(1, 1.0, 0.9), (2, 1.0, 1.2), (4, 1.0, 1.9)], Goodput(2.0, at_least=True)),
        ([(4, 1.0, 1.2)], Goodput(0.0, at_least=True)),
        ([(1, 1.0, 0.9), (2, 0.8, 0.1)], Goodput(1.5)),
    ],
)
def test_where_the_curve_falls_through(curve: list[tuple[float, ...]], found: Goodput) -> None:
    goodput = highest([Point(*each) for each in curve], 0.9)
    assert (goodput.rate, goodput.at_least) == (pytest.approx(found.rate), found.at_least)


@pytest.mark.parametrize("capacity", [0.04, 0.11, 3.0, 77.0])
@pytest.mark.parametrize("first", [0.1, 1.0])
def test_the_search_finds_a_capacity(capacity: float, first: float) -> None:
    """The server meets every objective up to a rate and none above it."""
    points: list[Point] = []
    while (rate := next_rate(points, 0.9, first)) is not None:
        points.append(Point(rate, 1.0 if rate <= capacity else 0.0))
    if capacity < first / 16:
        assert highest(points, 0.9).rate == 0
    else:
        assert capacity / NEAR <= highest(points, 0.9).rate <= capacity * NEAR
    assert len(points) <= 16


def test_the_search_ends_although_nothing_is_ever_good_or_bad() -> None:
    for attainment in (0.0, 1.0):
        points: list[Point] = []
        while (rate := next_rate(points, 0.9, 1.0)) is not None:
            points.append(Point(rate, attainment))
            assert len(points) <= 16


def test_the_search_ends_where_a_run_is_too_short_to_tell_anything() -> None:
    """The server answers 3 requests per second, and the objectives let all 20 requests wait for that."""
    points: list[Point] = []
    while (rate := next_rate(points, 0.9, 1.0)) is not None:
        points.append(Point(rate, 1.0, 20 / max(20 / rate, 20 / 3)))
    assert [point.rate for point in points] == [1.0, 2.0, 4.0, 8.0]
    assert highest(points, 0.9) == Goodput(4.0, at_least=True)


def test_goodput_remarks_name_interpolated_rates() -> None:
    config = replace(BenchGoodputConfig(), num_prompts=8)
    points = [Point(1.0, 1.0), Point(2.0, 0.8), Point(4.0, 0.9)]
    lines = remarks(highest(points, 0.9), points, config)
    assert lines[0] == "interpolated between 1.00 (100.0% inside) and 2.00 (80.0%)"
    assert lines[1].startswith("at 4.00 enough were inside again: 8 requests at each rate")
    assert len(remarks(highest(points[:2], 0.9), points[:2], config)) == 1
    assert highest(points, 0.9).between == (points[0], points[1])
    for reported in (points[:1], points[1:2]):  # no rate failed; every rate failed
        assert remarks(highest(reported, 0.9), reported, config) == []


def test_the_command(mock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mock sustains any rate, and a fifth of its answers begin later than 0.7 s."""
    saved, drawn = tmp_path / "goodput.json", tmp_path / "curve.svg"
    words = f"bench goodput --url {mock_url} --num-prompts 10 --random-input-len 8 --random-output-len 4 --rates 7,5"
    objectives = ["--goodput", "ttft:750,e2el:50x", "--attainment", "0.75"]
    assert cli.main([*words.split(), *objectives, "--save", str(saved), "--plot", str(drawn)]) == 0
    shown = capsys.readouterr().out
    assert "goodput: at least 7.00 requests/s with 75% inside ttft:750 e2el:" in shown and "send more" not in shown
    figures = json.loads(saved.read_text())
    assert figures["goodput"] == 7 and figures["goodput_is_a_lower_bound"] is True
    assert [run["slo_attainment"] for run in figures["runs"]] == pytest.approx([0.8, 0.8])
    assert figures["objectives_ms"]["e2el"] == pytest.approx(50 * figures["unloaded"]["median_e2el_ms"])
    assert drawn.read_text().startswith("<?xml")
    assert figures["interpolated_between"] == []
    assert cli.main(["bench", "goodput", "--rates", "0"]) == 1
    assert "finite numbers greater than 0" in capsys.readouterr().err
    assert cli.main(["bench", "goodput", "--max-concurrency", "1"]) == 1
    assert "the objectives do not count the time that requests wait" in capsys.readouterr().err


def test_a_burst_is_not_taken_for_a_rate(mock_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"bench goodput --url {mock_url} --num-prompts 4 --random-input-len 8 --random-output-len 4 --rates 100"
    assert cli.main([*words.split(), "--goodput", "ttft:5000"]) == 1
    shown = capsys.readouterr().out
    assert "goodput: at least 0.00 requests/s" in shown
    assert "at 100.00 requests/s most of the time passed after the last request had been sent" in shown
