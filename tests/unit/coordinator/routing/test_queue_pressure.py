"""The report that prompts queue up: when it is sent, and what it changes in the coordinator."""

from __future__ import annotations

import pytest

from common.config.up import UpConfig
from coordinator.routing.queue_pressure import DEEP_STEPS, SHALLOW_STEPS, QueuePressure
from deploy.launcher import fleet as planning
from deploy.launcher import supervisor as up
from deploy.launcher.screen import Lines
from tests.unit.coordinator.routing.test_router import cluster


def test_queue_pressure_reports_changes_once_with_hysteresis() -> None:
    reported: list[bool] = []
    queue_pressure = QueuePressure(reported.append)
    for steps in (0, DEEP_STEPS - 1, DEEP_STEPS, DEEP_STEPS - 1, SHALLOW_STEPS, DEEP_STEPS, SHALLOW_STEPS - 1, 0):
        queue_pressure.look(steps)
    assert reported == [True, False]
    queue_pressure.look(100)
    assert reported == [True, False, True]


def test_the_longest_queue_of_prefill_counts() -> None:
    router, (first, second, decode) = cluster(prefills=2)
    assert router.backlog_steps() == 0
    router.account(first).prefill_tokens += 512
    router.account(second).prefill_tokens += 16 * 512
    router.account(decode).prefill_tokens += 64 * 512  # not counted: it would gain no core
    assert router.backlog_steps() == 16
    assert cluster(prefills=0)[0].backlog_steps() == 0


async def test_the_coordinator_runs_beside_streams_while_prompts_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "machine", lambda config: ([0, 1], None))
    config = UpConfig(model="m", lend_cores=False)
    fleet = planning.plan(config)
    supervisor = up.Supervisor(config, fleet, Lines())
    where: list[tuple[str | int, ...]] = []
    monkeypatch.setattr(up.ChildProcess, "bind", lambda child, to, at_once: where.append((child.label, at_once, *to)))
    supervisor._prepare()
    for deep in (True, False):
        supervisor.place_coordinator(deep)
    assert where == [("coordinator", True, core) for core in (0, 1, 0)]
