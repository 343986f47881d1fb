"""Rates and percentiles of the last minutes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.live.history import ROW_S, ROWS, WINDOW_S, Buckets, History, _quantile


class Counted:
    """A history over counters that the test sets."""

    def __init__(self) -> None:
        self.tokens = 0
        self.buckets: list[tuple[float, float]] = [(0.01, 0.0), (0.1, 0.0), (math.inf, 0.0)]
        self.history = History(lambda: self.tokens, lambda: list(self.buckets))

    def request(self, arrived_s: float, first_s: float, prompt: int = 100) -> None:
        attempt = SimpleNamespace(first_token_at=first_s)
        timeline: Any = SimpleNamespace(
            attempts=[attempt], arrived_at=arrived_s, facts=lambda: SimpleNamespace(prompt_tokens=prompt)
        )
        for event in ("start", "placed", "first_token", "end"):
            self.history.saw(timeline, event)  # type: ignore[arg-type]

    def intervals(self, short: int, long: int) -> None:
        (low, a), (high, b), (most, c) = self.buckets
        self.buckets = [(low, a + short), (high, b + short + long), (most, c + short + long)]


def test_a_row_has_the_rates_since_the_one_before() -> None:
    counted = Counted()
    assert counted.history.sample(100.0, 1000.0, 0, 0) is None
    counted.request(101.0, 101.2)
    counted.request(101.0, 101.4)
    counted.tokens = 50
    counted.intervals(40, 10)
    counted.history.refused()
    row = counted.history.sample(105.0, 1005.0, 3, 4)
    assert row == {
        "t": 1005.0, "requests_s": 0.4, "refused_s": 0.2, "prompt_tokens_s": 40.0, "output_tokens_s": 10.0,
        "running": 3, "waiting": 4,
        "ttft_ms": {"p50": 400.0, "p90": 400.0, "p99": 400.0},
        "itl_ms": {"p50": 6.25, "p90": 55.0, "p99": 95.5},
    }  # fmt: skip
    row = counted.history.sample(110.0, 1010.0, 0, 0)
    assert row is not None and row["ttft_ms"] is row["itl_ms"] is None
    assert row["output_tokens_s"] == row["refused_s"] == 0.0
    assert list(counted.history.rows)[-1] is row


def test_a_snapshot_covers_the_last_minute_and_its_rates_the_last_seconds() -> None:
    counted = Counted()
    for second in range(0, 200, int(ROW_S)):
        counted.history.sample(float(second), 0.0, 0, 0)
        counted.request(float(second), second + (5.0 if second < 100 else 0.5))
        counted.intervals(10, 10 if second < 100 else 0)
        counted.tokens += 10
    found = counted.history.snapshot(200.0)
    assert found["ttft_ms"] == {"p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert found["itl_ms"]["p99"] == pytest.approx(9.9)  # type: ignore[index]
    counted.tokens += 90
    for second in range(201, 206):
        found = counted.history.snapshot(float(second))
    assert found["rates"]["output_tokens_s"] == 18.0, "90 in the five seconds since the first snapshot"  # type: ignore[index]
    found = counted.history.snapshot(206.0)
    assert found["rates"]["output_tokens_s"] == 0.0  # type: ignore[index]


def test_percentiles_are_kept_for_some_seconds_once_all_are_known() -> None:
    counted = Counted()
    counted.history.sample(0.0, 0.0, 0, 0)
    counted.request(0.0, 0.5)
    assert counted.history.snapshot(1.0)["itl_ms"] is None
    counted.intervals(10, 0)
    found = counted.history.snapshot(2.0)
    assert found["ttft_ms"]["p99"] == 500.0 and found["itl_ms"]["p99"] == pytest.approx(9.9)  # type: ignore[index]
    counted.request(2.0, 4.0)
    counted.intervals(0, 90)
    counted.tokens = 60
    kept = counted.history.snapshot(2.0 + ROW_S - 1)
    assert (kept["ttft_ms"], kept["itl_ms"]) == (found["ttft_ms"], found["itl_ms"])
    assert kept["rates"]["output_tokens_s"] == 12.0, "rates are those of now"  # type: ignore[index]
    later = counted.history.snapshot(2.0 + ROW_S)
    assert later["ttft_ms"]["p99"] == 2000.0 and later["itl_ms"]["p99"] > 90  # type: ignore[index]


def test_after_a_pause_rates_are_those_since_the_last_sample() -> None:
    counted = Counted()
    counted.history.sample(0.0, 0.0, 0, 0)
    counted.history.snapshot(1.0)
    counted.history.sample(90.0, 0.0, 0, 0)
    counted.tokens = 30
    assert counted.history.snapshot(93.0)["rates"]["output_tokens_s"] == 10.0  # type: ignore[index]


def test_rows_are_bounded() -> None:
    counted = Counted()
    for number in range(3 * ROWS):
        counted.history.sample(ROW_S * number, 0.0, 0, 0)
    assert len(counted.history.rows) == ROWS and len(counted.history._samples) == WINDOW_S / ROW_S + 1


@pytest.mark.parametrize(
    ("counts", "rank", "value"),
    [
        ([(1.0, 4), (2.0, 4), (math.inf, 4)], 2, 0.5),
        ([(1.0, 0), (2.0, 4), (math.inf, 4)], 4, 2.0),
        ([(1.0, 0), (2.0, 0), (math.inf, 4)], 4, 2.0),
        ([(1.0, 1), (2.0, 2), (math.inf, 2)], 1.5, 1.5),
    ],
)
def test_a_quantile_lies_inside_its_bucket(counts: Buckets, rank: float, value: float) -> None:
    assert _quantile(counts, rank) == value
