"""The judgement of running streams during an overload: whether their inter-token latency stayed as before."""

from __future__ import annotations

import itertools

from tests.chaos.load import LoadFigures
from tests.chaos.overload import judge_gaps
from tests.chaos.request import ChaosRequest
from tests.fakes.oracle import oracle_stream


def served(*gaps_s: float) -> ChaosRequest:
    """An exact answer whose first token took a second."""
    count = len(gaps_s) + 1
    arrivals = list(itertools.accumulate(gaps_s, initial=11.0))
    return ChaosRequest(
        [1, 2], count, 7, ids=oracle_stream([1, 2], 7, 0, count), arrivals=arrivals, done=True, started_at=10.0
    )


def refused() -> ChaosRequest:
    return ChaosRequest(
        [1, 2], 4, 7, status=429, error="server_is_overloaded", arrivals=[], started_at=10.0, ended_at=40.0
    )


def test_overload_judges_gaps_of_served_requests_against_peak() -> None:
    for last_s, late in ((0.04, False), (0.2, True)):
        figures = LoadFigures("twice")
        p99_s = judge_gaps(figures, [served(0.03, 0.03), served(0.02, last_s), refused()], 0.03)
        assert abs(p99_s - last_s) < 1e-9 and abs(figures.gap_s - last_s) < 1e-9 and figures.first_s == 1.0
        assert bool(figures.late) is late and not figures.wrong
        assert f"{1000 * last_s:.0f} ms between tokens (p99)" in figures.row()


def test_a_stream_that_had_no_time_for_all_its_tokens_waited_for_the_next_to_its_end() -> None:
    cut, figures = served(0.03, 0.03), LoadFigures("twice")
    cut.done, cut.error, cut.ended_at = False, "request_timeout", cut.arrivals[-1] + 0.5
    judge_gaps(figures, [served(0.03), cut], 0.03)
    assert abs(figures.gap_s - 0.5) < 1e-9 and figures.late


def test_peak_load_gaps_are_reported_without_verdict() -> None:
    figures = LoadFigures("peak")
    judge_gaps(figures, [served(0.5)], 0.0)
    assert figures.passed and figures.gap_s == 0.5


def test_gaps_without_served_requests_are_zero() -> None:
    figures = LoadFigures("thrice")
    assert judge_gaps(figures, [refused()], 0.03) == 0.0 and figures.gap_s == 0.0
