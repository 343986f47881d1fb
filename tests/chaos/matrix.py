"""Runs the cells in several clusters side by side; a cluster takes the next cell after it has been repaired."""

from __future__ import annotations

import asyncio
import itertools
import math
import traceback
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import aiohttp

from tests.chaos import held
from tests.chaos.cells import HELD_S, Cell, Kind
from tests.chaos.cluster import ChaosCluster, Stuck
from tests.chaos.host import TAKEN, undisturbed
from tests.chaos.request import clock
from tests.chaos.scenes import CHUNK, Phase, Scene, arrange

FLAGS = ("--watched", "--kv-transport", "zmq", "--max-num-batched-tokens", str(CHUNK))

PHASES: tuple[Phase, ...] = get_args(Phase)
HAPPENED_S = 12.0
"""The longest time for a draining process to exit after its last request."""


@dataclass
class CellResult:
    """The outcome of a cell. Times are in seconds.

    ``value`` is what the cell measures, ``turn_s`` the largest gap of a queued request, ``freed_s`` the time from the
    fault to the last freed block, ``held_s`` the longest time for which anything was held without a use (see
    :func:`tests.chaos.held.orphaned_s`)."""

    cell: Cell
    value: float = float("nan")
    turn_s: float = float("nan")
    freed_s: float = float("nan")
    held_s: float = float("nan")
    wrong: str = ""
    late: bool = False
    """Whether the only failure is a missed bound of time."""
    times: int = 1
    """How often the cell was played: more than once if it was late while the host took CPU time."""

    @property
    def passed(self) -> bool:
        return not self.wrong


async def run_cell(cluster: ChaosCluster, cell: Cell) -> CellResult:
    """Play one cell in a cluster without faults; it may need repair afterwards."""
    result = CellResult(cell)
    try:
        async with cluster.session() as session:
            await _play(cluster, cell, session, result)
    except Stuck as error:
        result.wrong, result.late = f"Stuck: {error}", True
    except (AssertionError, TimeoutError, StopIteration) as error:
        result.wrong = f"{type(error).__name__}: {error}"
    except Exception:
        result.wrong = traceback.format_exc()
    return result


async def _play(cluster: ChaosCluster, cell: Cell, session: aiohttp.ClientSession, result: CellResult) -> None:
    scene = await arrange(cluster, cell.arranged or cell.phase, session, cell.output, stream=cell.stream)
    proof = await cell.fault(scene)
    await scene.over()
    freed_at = await cluster.until_free(HELD_S + 2)
    result.freed_s = max(0.0, freed_at - scene.struck_at)
    result.value = _measured(scene, cell, result)
    result.turn_s = scene.ask.largest_gap(scene.struck_at)
    await cluster.until(proof, HAPPENED_S, "the fault has happened")
    if cluster.wake():
        await cluster.until_ready()
        await cluster.until_free(HELD_S + 2)
    result.held_s = _orphaned_s(scene)
    if verdict := _objection(scene, cell):
        result.wrong = verdict
        return
    if result.value > cell.bound_s:
        result.wrong = f"{cell.measure} of {result.value:.2f} s, {cell.bound_s:g} s allowed"
    elif cell.turns and result.turn_s > cell.turn_s:
        result.wrong = f"{result.turn_s:.2f} s to a token of the request itself, {cell.turn_s:g} s allowed"
    elif result.held_s > HELD_S:
        result.wrong = f"a block was held after its attempt was over for {result.held_s:.2f} s, {HELD_S:g} s allowed"
    result.late = bool(result.wrong)


def _measured(scene: Scene, cell: Cell, result: CellResult) -> float:
    if cell.measure == "freed":
        return result.freed_s
    if cell.measure == "answer":
        return scene.ask.ended_at - scene.struck_at
    if cell.measure == "back":
        return scene.back_s
    if cell.measure == "unqueued":
        return scene.unqueued_s
    if cell.turns:
        return max(ask.largest_gap(scene.struck_at) for ask in scene.neighbours)
    return scene.ask.largest_gap(scene.struck_at)


def _orphaned_s(scene: Scene) -> float:
    asks = [scene.ask, *scene.neighbours]
    answered = {ask.seed: ask.ended_at for ask in asks if ask.verdict() == "exact"}
    return held.orphaned_s(scene.cluster.workers.values(), scene.struck_at, answered, clock())


def _objection(scene: Scene, cell: Cell) -> str:
    asks = [scene.ask, *scene.neighbours]
    if any(ask.verdict() == "wrong" for ask in asks):
        return "a wrong token"
    if cell.expect == "gone":
        asks = scene.neighbours
    for ask in asks:
        wanted = cell.expect if ask is scene.ask else cell.neighbours
        if ask.verdict() != wanted:
            who = "the request" if ask is scene.ask else "a neighbour"
            return f"{who}: {ask.verdict()} (status {ask.status}, {len(ask.ids)} tokens), {wanted} wanted"
    return ""


async def _play_in_peace(cluster: ChaosCluster, cell: Cell) -> CellResult:
    times = itertools.count(1)

    async def once() -> CellResult:
        result = await _play_and_repair(cluster, cell)
        result.times = next(times)
        return result

    def late(result: CellResult) -> str:
        return f"{cell.id}: {result.wrong}" if result.late and not cluster.beyond_repair else ""

    return await undisturbed(once, late)


async def _play_and_repair(cluster: ChaosCluster, cell: Cell) -> CellResult:
    result = await run_cell(cluster, cell)
    try:
        await cluster.repair()
    except (Stuck, AssertionError) as error:
        result.wrong = result.wrong or f"afterwards {error}"
        cluster.beyond_repair = True
        await cluster.kill()
    return result


async def play(cells: Sequence[Cell], directory: Path, clusters: int) -> AsyncIterator[CellResult]:
    """Play all cells in ``clusters`` clusters at a time, and yield the results as they complete. A cluster that cannot
    be repaired is replaced."""
    shares = _shares(cells, clusters)
    results: asyncio.Queue[CellResult | BaseException] = asyncio.Queue()
    lanes = iter(enumerate(shares))
    all_begin = asyncio.Barrier(min(clusters, len(shares)))

    async def keep_houses() -> None:
        begun = False
        try:
            for number, share in lanes:
                while share:
                    where = directory / f"cluster-{number}-{len(share)}"
                    kind = share[0].cluster
                    pools = {"prefills": kind.each, "decodes": kind.each}
                    flags = FLAGS + kind.flags
                    async with ChaosCluster.running(
                        where, flags=flags, coordinator_flags=kind.coordinator_flags, seed=number, **pools
                    ) as cluster:
                        await cluster.links()  # trials of links hold blocks; wait until they are over
                        if not begun:  # starting a cluster takes the cores for seconds
                            await all_begin.wait()
                            begun = True
                        while share and not cluster.beyond_repair:
                            results.put_nowait(await _play_in_peace(cluster, share.popleft()))
        except BaseException as error:
            results.put_nowait(error)
            raise

    keepers = [asyncio.ensure_future(keep_houses()) for _ in range(clusters)]
    try:
        for _ in cells:
            result = await results.get()
            if isinstance(result, BaseException):
                raise result
            yield result
        await asyncio.gather(*keepers)
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


def _shares(cells: Sequence[Cell], clusters: int) -> list[deque[Cell]]:
    """Return the cells of each cluster: all need the same kind of cluster, and the load is balanced."""
    kinds: dict[Kind, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault(cell.cluster, []).append(cell)
    parts = [deque(same[at::clusters]) for same in kinds.values() for at in range(min(clusters, len(same)))]
    return sorted(parts, key=len, reverse=True)


def _longest(results: Iterable[CellResult]) -> float:
    """Return the largest ``held_s`` of the cells that measured it; NaN if none did."""
    return max((result.held_s for result in results if not math.isnan(result.held_s)), default=math.nan)


def markdown(results: Sequence[CellResult], seconds: float) -> str:
    """Return the matrix as a Markdown table: faults in the order of the cells, by phases of a request."""
    held_s, again = _longest(results), sum(result.times > 1 for result in results)
    noise = f" {again} were played again, as the host took {TAKEN:.0%} of the cores or more when they were late."
    lines = [
        f"{sum(result.passed for result in results)} of {len(results)} cells pass, in {seconds:.0f} s; no block was "
        f"held after its attempt was over for longer than {held_s:.2f} s.{noise if again else ''}",
        "",
        f"| fault | outcome | measured (s) | {' | '.join(PHASES)} | held after its attempt was over (s) |",
        f"|---|---|---|{'---|' * len(PHASES)}---|",
    ]
    rows: dict[tuple[str, str, str], dict[Phase, CellResult]] = {}
    for result in results:
        cell = result.cell
        rows.setdefault((cell.name, cell.expect, cell.measure), {})[cell.phase] = result
    for names, by_phase in rows.items():
        entries = [_entry(by_phase.get(phase)) for phase in PHASES]
        held_s = _longest(by_phase.values())
        lines.append(f"| {' | '.join(names)} | {' | '.join(entries)} | {held_s:.2f} |")
    failures = [f"- {each.cell.id}: {each.wrong.splitlines()[-1]}" for each in results if not each.passed]
    return "\n".join([*lines, *([""] if failures else []), *failures]) + "\n"


def _entry(result: CellResult | None) -> str:
    """Return the measured value and its bound."""
    if result is None:
        return ""
    entry = f"{result.value:.2f} of {result.cell.bound_s:g}"
    if result.cell.turns:
        entry += f", turn {result.turn_s:.2f} of {result.cell.turn_s:g}"
    return entry if result.passed else f"**{entry}**"


async def run(cells: Sequence[Cell], directory: Path, clusters: int) -> list[CellResult]:
    """Play all cells, print each result as it completes, and return the results in the order of ``cells``."""
    done: dict[str, CellResult] = {}
    started = clock()
    async for result in play(cells, directory, clusters):
        done[result.cell.id] = result
        mark = "ok" if result.passed else "FAILED"
        head = f"[{len(done):3}/{len(cells)} {clock() - started:4.0f} s] {mark:7}"
        print(f"{head} {result.cell.id}: {result.cell.measure} {_entry(result)} s, held {result.held_s:.2f} s "
              f"{result.wrong}", flush=True)  # fmt: skip
    return [done[cell.id] for cell in cells]
