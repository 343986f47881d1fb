"""A harness that cannot fail proves nothing: a wrong token fails a cell and a load, a fault that never came a cell, a
coordinator that does not do its part whatever is about that part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.chaos import faults, load, matrix, planted
from tests.chaos.cells import CELLS
from tests.chaos.house import House
from tests.chaos.scenes import PROMPT, Scene

pytestmark = pytest.mark.e2e
LATE_S = 6.0
STALLS, FAILS, LEAVES, HANGS_UP = (
    next(cell for cell in CELLS if cell.id == name)
    for name in (
        "coordinator stalls for 0.5 s / S",
        "exception in one request, once / P",
        "client disconnects / Q",
        "client disconnects / S",
    )
)


async def test_one_wrong_token_fails_a_cell_and_a_load(tmp_path: Path) -> None:
    async with House.running(tmp_path / "house", flags=matrix.FLAGS + STALLS.house.flags) as house:
        _lie(house)
        assert (await matrix.run_cell(house, STALLS)).wrong == "a wrong token"
        assert _lies(house) == 1
        await house.repair()

        _lie(house)
        figures = await load.scenario(house, "no fault", None, requests=24, at_once=4, allowed_gap_s=0.0)
        assert (lies := _lies(house)) in (1, 2)
        assert not figures.passed
        assert figures.verdicts == {"wrong": lies, "exact": 24 - lies}


async def test_a_cell_whose_fault_did_not_happen_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "HAPPENED_S", 0.5)
    harmless = replace(FAILS, fault=partial(faults.engine_fails, 5, 1))
    async with House.running(tmp_path / "house", flags=matrix.FLAGS + FAILS.house.flags) as house:
        result = await matrix.run_cell(house, harmless)
    assert "the fault has happened" in result.wrong


async def test_a_load_fails_if_a_silent_prefill_worker_is_noticed_late(tmp_path: Path) -> None:
    name = "SIGSTOP of one prefill worker"
    breaking, allowed_s = load.SCENARIOS[name]
    late = ("--failure-timeout", str(LATE_S))
    async with House.running(tmp_path / "house", flags=load.LOAD_FLAGS, door=late) as house:
        for worker in house.workers.values():
            worker.command(step_s=0.01)
        figures = await load.scenario(house, name, breaking, requests=200, at_once=16, allowed_gap_s=allowed_s)
    assert figures.verdicts == {"exact": 200}
    assert figures.first_s > LATE_S - 1.5, "less a heartbeat, and the time between two looks"
    assert f"{figures.first_s:.2f} s to a first token" in figures.wrong


async def test_a_cell_fails_if_a_queued_request_outlives_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "HAPPENED_S", 0.5)
    async with House.running(
        tmp_path / "house", flags=matrix.FLAGS + LEAVES.house.flags, planted=planted.QUEUED
    ) as house:
        slow = replace(LEAVES, bound_s=60.0)
        assert "the fault has happened" in (await matrix.run_cell(house, slow)).wrong, "its tokens were computed"
        await house.repair()
        result = await matrix.run_cell(house, LEAVES)
        assert result.value > LEAVES.bound_s


async def _leaves_beside_a_stream(scene: Scene) -> faults.Proof:
    stream = scene.house.ask(PROMPT, 2 * scene.ask.max_tokens)
    scene.neighbours = [stream]
    scene.send(stream)
    return await faults.client_leaves(scene)


async def test_a_cell_fails_if_something_is_kept_for_a_client_that_has_gone_while_others_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "HELD_S", 1.0)
    beside = replace(HANGS_UP, fault=_leaves_beside_a_stream, bound_s=60.0, output=80)
    async with House.running(tmp_path / "house", flags=matrix.FLAGS + HANGS_UP.house.flags) as house:
        for worker in house.workers.values():
            worker.command(keeps=True)
        result = await matrix.run_cell(house, beside)
        assert "held for nobody" in result.wrong
        assert 1.0 < result.held_s < result.freed_s - 0.5, "and the stream went on for longer"

        for worker in house.workers.values():
            worker.command(keeps=False)
        await house.repair()
        result = await matrix.run_cell(house, beside)
        assert result.passed, result.wrong


def _lie(house: House) -> None:
    """Each decode worker tells one wrong token, the next time that a request is at its eleventh."""
    for worker in house.by_role("decode"):
        worker.command(lie_at=10)


def _lies(house: House) -> int:
    return sum(event["event"] == "lie" for worker in house.workers.values() for event in worker.events)
