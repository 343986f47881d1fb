"""Long runs with many requests, clients that disconnect in every phase, and periodic faults; and the time in which an
abort frees blocks.

A soak consists of legs. After each leg, everything must be free, no answer may be wrong or failed, no stream may have
paused for long, and every fault must have happened. The totals go to a file, from which a later run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cluster import ChaosCluster, Stuck, state_of
from tests.chaos.leaving import COMPUTED, QUEUED, SHIPPED, STREAMED, Leaving
from tests.chaos.load import LOAD_FLAGS, LoadFigures, crowd, judge
from tests.chaos.proxy import Rule, is_frame
from tests.chaos.request import ChaosRequest, clock
from tests.chaos.scenes import CHUNK, TOKEN_S, Phase, arrange
from tests.chaos.scenes import STEP_S as SCENE_STEP_S

LEG = 2500
ABORTED = 0.1
FLAGS = (*LOAD_FLAGS, "--watched")
FREED_S = 0.1
HAPPENED_S = 20.0
"""The longest time until a fault has happened; a draining worker takes the longest."""
LASTS_S = 3.0
STEP_S = 0.12
"""Slow enough that ten thousand requests last until every kind of fault has happened."""
GAP_S = 10.0
"""The longest pause of a stream: silence is detected within 2 s, a hand-off that then fails within 2 s more; then the
stream waits for a slot on the other, full worker, up to the duration of the longest answer there."""
MOST_FAULTS_MISSED = 0.2
"""Fraction of the scheduled faults that may be missing: each waits until the system has recovered from the last."""
Proof = Callable[[], bool]
Hit = Callable[[ChaosCluster], Awaitable[Proof]]
"""Breaks something; returns the proof, to be evaluated while the fault lasts."""


def _killed(role: str) -> Hit:
    async def hit(cluster: ChaosCluster) -> Proof:
        process = cluster.rng.choice(cluster.by_role(role)).process
        assert process is not None
        process.kill()
        return lambda: process.returncode == -signal.SIGKILL

    return hit


def _stopped(role: str) -> Hit:
    async def hit(cluster: ChaosCluster) -> Proof:
        worker = cluster.rng.choice(cluster.by_role(role))
        assert worker.process is not None
        pid = worker.process.pid
        worker.signal(signal.SIGSTOP)
        return lambda: state_of(pid) == "T"

    return hit


def _drained(role: str) -> Hit:
    async def hit(cluster: ChaosCluster) -> Proof:
        worker = cluster.rng.choice(cluster.by_role(role))
        process = worker.process
        assert process is not None
        worker.signal(signal.SIGTERM)
        return lambda: process.returncode == 0

    return hit


async def _reset_links(cluster: ChaosCluster) -> Proof:
    struck = sum(worker.data.reset() for worker in cluster.by_role("decode"))
    return lambda: struck > 0


async def _reset_control(cluster: ChaosCluster) -> Proof:
    struck = cluster.rng.choice(list(cluster.workers.values())).control.reset()
    return lambda: struck > 0


async def _black_hole(cluster: ChaosCluster) -> Proof:
    proxy = cluster.rng.choice(cluster.by_role("decode")).data
    before = proxy.done["black_hole"]
    proxy.only = f"{cluster.rng.choice(cluster.by_role('prefill')).incarnation}|"
    proxy.black_hole = True
    return lambda: proxy.done["black_hole"] > before


async def _break_frames(cluster: ChaosCluster) -> Proof:
    rules = []
    for worker in cluster.by_role("decode"):
        for action in ("corrupt", "truncate", "drop", "duplicate", "reorder"):
            rules.append(Rule(action, is_frame, rate=0.05))  # type: ignore[arg-type]
            worker.data.rules.append(rules[-1])
    return lambda: any(rule.hits for rule in rules)


async def _stall(cluster: ChaosCluster) -> Proof:
    assert cluster.coordinator is not None
    cluster.coordinator.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.5)  # the length of the fault itself
    stalled = state_of(cluster.coordinator.pid) == "T"
    cluster.coordinator.send_signal(signal.SIGCONT)
    return lambda: stalled


HITS: dict[str, Hit] = {
    "decode killed": _killed("decode"),
    "prefill killed": _killed("prefill"),
    "decode stopped": _stopped("decode"),
    "prefill stopped": _stopped("prefill"),
    "decode drained": _drained("decode"),
    "prefill drained": _drained("prefill"),
    "links reset": _reset_links,
    "control reset": _reset_control,
    "pair black-holed": _black_hole,
    "frames broken": _break_frames,
    "coordinator stalled": _stall,
}


async def _break_things(
    cluster: ChaosCluster, faults: Counter[str], first: int, every_s: float, over: asyncio.Event
) -> None:
    """Inject the faults in turn, one every ``every_s`` seconds, until ``over`` is set.

    Each must be proved, and is repaired after ``LASTS_S`` (a process is restarted). Raises Stuck if one did not
    happen."""
    names, due = list(HITS), clock() + every_s / 2
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - clock())):
                await over.wait()
        if over.is_set():
            return
        due = max(due + every_s, clock())
        name = names[(first + faults.total()) % len(names)]
        proof = await HITS[name](cluster)
        await asyncio.sleep(LASTS_S)
        try:
            await cluster.until(proof, HAPPENED_S, f"{name}: it has happened")
            faults[name] += 1
        except Stuck:
            if not over.is_set():  # without traffic, nothing can be lost on the way
                raise
        await cluster.restore()
        await cluster.until_ready()


async def soak(
    directory: Path, *, requests: int, at_once: int, every_s: float, state: Path | None, seed: int
) -> LoadFigures:
    """Run up to ``requests`` requests in total with a fault every ``every_s`` seconds, continuing from the file
    ``state`` if it exists."""
    total = LoadFigures("soak", allowed_gap_s=GAP_S)
    if state is not None and state.exists():
        kept = json.loads(state.read_text())
        total.verdicts, total.faults = Counter(kept["verdicts"]), Counter(kept["faults"])
        total.seconds, total.gap_s, total.free_s = kept["seconds"], kept["gap_s"], kept["free_s"]
    done = total.verdicts.total()
    async with ChaosCluster.running(directory / "soak", flags=FLAGS, seed=seed + done) as cluster:
        leaving = Leaving(cluster)
        while done < requests and total.passed:
            await _leg(cluster, leaving, total, min(LEG, requests - done), at_once, every_s)
            _look(total, every_s)
            done = total.verdicts.total()
            print(total.row(), flush=True)
            if state is not None and total.passed:
                state.write_text(json.dumps({
                    "verdicts": total.verdicts, "faults": total.faults, "seconds": total.seconds,
                    "gap_s": total.gap_s, "free_s": total.free_s,
                }))  # fmt: skip
            await cluster.repair()
    return total


def _look(total: LoadFigures, every_s: float) -> None:
    """Judge the totals of all legs so far."""
    due = int(total.seconds / every_s)
    if total.faults.total() < (1 - MOST_FAULTS_MISSED) * due:
        total.wrong.append(f"{total.faults.total()} faults, {due} wanted")
    if due > len(HITS) / (1 - MOST_FAULTS_MISSED) and (missing := HITS.keys() - total.faults.keys()):
        total.wrong.append(f"never {', '.join(sorted(missing))}")
    phases = {f"left {phase}" for phase in (QUEUED, COMPUTED, SHIPPED, STREAMED)}
    if total.verdicts.total() >= LEG and (missing := phases - total.verdicts.keys()):
        total.wrong.append(f"no client {', '.join(sorted(missing))}")
    if total.gap_s > total.allowed_gap_s:
        total.wrong.append(f"a gap of {total.gap_s:.2f} s")


async def _leg(
    cluster: ChaosCluster, leaving: Leaving, total: LoadFigures, count: int, at_once: int, every_s: float
) -> None:
    asks = [cluster.any_ask(cluster.rng.randrange(20, 160), cluster.rng.randrange(8, 48)) for _ in range(count)]
    moments = leaving.moments()
    leave = {ask.seed: cluster.rng.choice(moments) for ask in asks if cluster.rng.random() < ABORTED}
    for worker in cluster.workers.values():
        worker.flags = (*FLAGS, "--step-s", str(STEP_S))  # for workers that are restarted
        worker.command(step_s=STEP_S)
    faults: Counter[str] = Counter()
    started = clock()
    over = asyncio.Event()
    breaking = asyncio.ensure_future(_break_things(cluster, faults, total.faults.total(), every_s, over))
    await crowd(cluster, asks, at_once, leave=leave)
    over.set()
    (broke,) = await asyncio.gather(breaking, return_exceptions=True)
    if isinstance(broke, Exception):
        total.wrong.append(str(broke))
    ended = clock()
    await cluster.restore()
    await cluster.until_ready()
    total.free_s = max(total.free_s, await cluster.until_free() - ended)
    total.seconds += ended - started
    total.faults += faults
    total.gap_s = max(total.gap_s, *(_gap(ask) for ask in asks))
    judge(total, asks)


def _gap(ask: ChaosRequest) -> float:
    """Return the largest gap between two tokens. The wait for the first token is not included: it is queueing."""
    return ask.largest_gap(ask.arrivals[0]) if ask.arrivals and not ask.left else 0.0


@dataclass
class HangUps:
    """Times from a client's disconnect to the last freed block: ``times``, ascending, in seconds, while a step takes
    ``step_s``."""

    phase: str
    step_s: float
    times: list[float]

    @property
    def p99_s(self) -> float:
        return self.times[math.ceil(0.99 * len(self.times)) - 1]

    @property
    def allowed_s(self) -> float:
        """The bound: the running step plus a tenth of a second."""
        return FREED_S + self.step_s

    @property
    def late(self) -> str:
        """A description of a missed bound; empty if none was missed."""
        if self.p99_s <= self.allowed_s:
            return ""
        return f"{self.p99_s:.3f} s (p99) when a client hangs up while {self.phase}"


async def aborts(directory: Path, *, count: int) -> list[HangUps]:
    """Let ``count`` clients disconnect while their prompt is computed, and as many while their answer streams."""
    prompt_step_s = CHUNK * TOKEN_S
    phases: dict[Phase, tuple[str, float]] = {
        "P": (f"its prompt is computed, {prompt_step_s:.2f} s a step", prompt_step_s),
        "S": (f"it streams, {SCENE_STEP_S:.2f} s a step", SCENE_STEP_S),
    }
    found = []
    async with ChaosCluster.running(
        directory / "aborts", flags=("--watched", "--max-num-batched-tokens", str(CHUNK))
    ) as cluster:
        for phase, (name, step_s) in phases.items():
            found.append(HangUps(name, step_s, sorted([await _abort(cluster, phase) for _ in range(count)])))
    return found


async def _abort(cluster: ChaosCluster, phase: Phase) -> float:
    async with cluster.session() as session:
        scene = await arrange(cluster, phase, session)
        at = clock()
        scene.task.cancel()
        await asyncio.gather(scene.task, return_exceptions=True)
        freed_at = await cluster.until_free()
        await cluster.repair()
    return freed_at - at
