"""Every part that ``bench.micro.handoff_cost`` measures still runs with the current code."""

from __future__ import annotations

import math

import pytest

from bench.micro import handoff_parts
from bench.micro.handoff_parts import RequestShape
from common.kv.layout import KvLayout, LayerLayout


def test_every_part_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = handoff_parts.microseconds
    monkeypatch.setattr(handoff_parts, "microseconds", lambda action: measured(action, rounds=1, seconds=0.001))
    shape = RequestShape(40, 8, 2, KvLayout((LayerLayout(2, 16, 16),) * 3, "bfloat16", 16))
    costs = dict(handoff_parts.parts(shape, 0.5))
    assert len(costs) == 11
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs.values())
    assert sum(costs.values()) > 0
