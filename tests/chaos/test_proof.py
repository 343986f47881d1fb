"""Tests that the harness can fail: on a wrong token, on a fault that did not happen, and on a coordinator or a worker
with a planted bug."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.chaos import faults, load, matrix, planted
from tests.chaos.cells import CELLS, HELD_S, Cell
from tests.chaos.cluster import ChaosCluster, Stuck
from tests.chaos.leaving import COMPUTED, QUEUED, SHIPPED, STREAMED, Leaving
from tests.chaos.scenes import PROMPT, Scene

pytestmark = [pytest.mark.e2e, pytest.mark.alone]
LATE_S = 8.0
KEPT_S, OUTLASTS = 2.0, 150
"""How long a worker keeps what it should drop, and the length in tokens of a stream that lasts longer (4.5 s)."""
STALLS, FAILS, LEAVES, HANGS_UP, PREFILL_DIES, CUT_OFF = (
    next(cell for cell in CELLS if cell.id == name)
    for name in (
        "coordinator stalls for 0.5 s / S",
        "exception in one request, once / P",
        "client disconnects / Q",
        "client disconnects / S",
        "prefill killed / X",
        "coordinator-decode partition / D",
    )
)


async def test_one_wrong_token_fails_a_cell_and_a_load(tmp_path: Path) -> None:
    async with ChaosCluster.running(tmp_path / "cluster", flags=matrix.FLAGS + STALLS.cluster.flags) as cluster:
        _lie(cluster)
        assert (await matrix.run_cell(cluster, STALLS)).wrong == "a wrong token"
        assert _lies(cluster) == 1
        await cluster.repair()

        _lie(cluster)
        figures = await load.scenario(cluster, "no fault", None, requests=24, at_once=4, allowed_gap_s=0.0)
        assert (lies := _lies(cluster)) in (1, 2)
        assert not figures.passed
        assert figures.verdicts == {"wrong": lies, "exact": 24 - lies}


async def test_a_cell_whose_fault_did_not_happen_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "HAPPENED_S", 0.5)
    harmless = replace(FAILS, fault=partial(faults.engine_fails, 5, 1))
    async with ChaosCluster.running(tmp_path / "cluster", flags=matrix.FLAGS + FAILS.cluster.flags) as cluster:
        result = await matrix.run_cell(cluster, harmless)
    assert "the fault has happened" in result.wrong


async def test_a_load_fails_if_a_silent_prefill_worker_is_noticed_late(tmp_path: Path) -> None:
    name = "SIGSTOP of one prefill worker"
    breaking, allowed_s = load.SCENARIOS[name]
    late = ("--failure-timeout", str(LATE_S))
    async with ChaosCluster.running(tmp_path / "cluster", flags=load.LOAD_FLAGS, coordinator_flags=late) as cluster:
        for worker in cluster.workers.values():
            worker.command(step_s=0.01)
        figures = await load.scenario(cluster, name, breaking, requests=200, at_once=16, allowed_gap_s=allowed_s)
    assert figures.verdicts == {"exact": 200}
    assert figures.first_s > LATE_S - 1.5, "less a heartbeat, and the time between two looks"
    assert f"{figures.first_s:.2f} s to a first token" in figures.late


async def test_cell_rejects_late_unstreamed_answer(tmp_path: Path) -> None:
    late = ("--failure-timeout", str(LATE_S))
    async with ChaosCluster.running(
        tmp_path / "cluster", flags=matrix.FLAGS + CUT_OFF.cluster.flags, coordinator_flags=late
    ) as cluster:
        result = await matrix.run_cell(cluster, CUT_OFF)
        assert result.value > LATE_S - 1.5 > CUT_OFF.bound_s
        assert result.wrong.startswith("gap of")


async def test_a_cell_fails_if_a_queued_request_has_its_turn_late(tmp_path: Path) -> None:
    early = replace(next(cell for cell in CELLS if cell.id == "prefill drains / Q"), bound_s=60.0, turn_s=1.0)
    async with ChaosCluster.running(tmp_path / "cluster", flags=matrix.FLAGS + early.cluster.flags) as cluster:
        result = await matrix.run_cell(cluster, early)
        assert result.turn_s > early.turn_s
        assert "to a token of the request itself" in result.wrong


async def test_cluster_detects_mapped_pool_of_dead_worker(tmp_path: Path) -> None:
    """A decode worker keeps the pool of a dead prefill worker mapped for a lease, since it may only be silent."""
    async with ChaosCluster.running(tmp_path / "cluster", flags=("--kv-transport", "shm"), decodes=1) as cluster:
        assert await cluster.links() == {"shm"}
        assert await cluster.until_unmapped(0.0) < 1.0
        prefill = cluster.workers["prefill-0"]
        prefill.wanted = False
        prefill.signal(signal.SIGKILL)
        await cluster.until(lambda: not prefill.alive, 5.0, "prefill-0 is dead, which maps its own pool until then")
        with pytest.raises(Stuck, match="no process maps"):
            await cluster.until_unmapped(1.0)
        await cluster.until_unmapped(HELD_S)


async def test_clients_hang_up_in_every_phase(tmp_path: Path) -> None:
    async with ChaosCluster.running(
        tmp_path / "cluster", flags=("--watched", "--max-num-seqs", "4", "--step-s", "0.1")
    ) as cluster:
        asks = [cluster.ask(80, 12) for _ in range(80)]
        moments = Leaving(cluster).moments()
        leave = {ask.seed: moments[index % 5] for index, ask in enumerate(asks) if index % 5 < len(moments)}
        await load.crowd(cluster, asks, 32, leave=leave)
        figures = load.LoadFigures("hang-ups")
        load.judge(figures, asks)
        assert figures.passed, figures.wrong
        phases = {f"left {phase}" for phase in (QUEUED, COMPUTED, SHIPPED, STREAMED)}
        assert set(figures.verdicts) == phases | {"exact"}
        assert all(count >= 4 for count in figures.verdicts.values()), figures.verdicts
        await cluster.until_free()


async def test_a_cell_fails_if_a_queued_request_outlives_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "HAPPENED_S", 0.5)
    async with ChaosCluster.running(
        tmp_path / "cluster", flags=matrix.FLAGS + LEAVES.cluster.flags, planted=planted.QUEUED
    ) as cluster:
        slow = replace(LEAVES, bound_s=60.0)
        assert "the fault has happened" in (await matrix.run_cell(cluster, slow)).wrong, "its tokens were computed"
        await cluster.repair()
        result = await matrix.run_cell(cluster, LEAVES)
        assert result.value > LEAVES.bound_s


@pytest.mark.parametrize("cell", [HANGS_UP, PREFILL_DIES], ids=lambda cell: cell.id)
async def test_cell_rejects_blocks_of_ended_attempt_beside_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    monkeypatch.setattr(matrix, "HELD_S", 1.0)
    beside = replace(cell, fault=partial(_beside_a_stream, cell.fault), bound_s=60.0, output=OUTLASTS)
    async with ChaosCluster.running(tmp_path / "cluster", flags=matrix.FLAGS + cell.cluster.flags) as cluster:
        for worker in cluster.workers.values():
            worker.command(keeps=True)
        await cluster.links()  # a trial of a link whose peer is gone would also be held, for 5 s
        result = await matrix.run_cell(cluster, beside)
        assert "held after its attempt was over" in result.wrong
        assert KEPT_S <= result.held_s < result.freed_s - 0.5, "and the streams went on for longer"

        await cluster.repair()
        await cluster.links()
        result = await matrix.run_cell(cluster, beside)
        assert result.passed, result.wrong


async def _beside_a_stream(fault: faults.Fault, scene: Scene) -> faults.Proof:
    """Inject ``fault`` while another stream runs, and let workers keep what they should drop for ``KEPT_S``."""
    stream = scene.cluster.ask(PROMPT, OUTLASTS)
    scene.neighbours = [stream]
    scene.send(stream)
    proof = await fault(scene)
    await asyncio.sleep(KEPT_S)  # the length of the bug itself
    for worker in scene.cluster.workers.values():
        if worker.alive:
            worker.command(keeps=False)
    return proof


def _lie(cluster: ChaosCluster) -> None:
    """Have each decode worker send one wrong token, the next time that a request is at its eleventh."""
    for worker in cluster.by_role("decode"):
        worker.command(lie_at=10)


def _lies(cluster: ChaosCluster) -> int:
    return sum(event["event"] == "lie" for worker in cluster.workers.values() for event in worker.events)
