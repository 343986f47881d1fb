"""Bounds of real time grow on a slow machine, and never shrink."""

from __future__ import annotations

import time

import pytest

from tests import pace


@pytest.mark.parametrize(("took_s", "expected"), [(0.0, 1.0), (0.5, 1.0), (3.0, 3.0), (1000.0, pace.MOST)])
def test_bounds_are_as_many_times_as_long(took_s: float, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def work() -> None:
        now[0] += took_s * pace.REFERENCE_S

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pace, "work", work)
    assert pace.slowness.__wrapped__() == pytest.approx(expected)


def test_all_bounds_of_a_process_grow_alike() -> None:
    assert pace.scaled(2.0) == 2 * pace.scaled(1.0) >= 2.0
