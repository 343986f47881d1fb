"""Long runs: many requests, clients that hang up, and a fault every so often. And how soon an abort frees blocks.

A soak goes in legs. After each one everything must be free, no answer wrong, none failed; its totals go to a file, from
which a later run goes on.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.chaos.house import Ask, House, clock
from tests.chaos.load import LOAD_FLAGS, Figures, crowd, judge
from tests.chaos.proxy import Rule, is_frame
from tests.chaos.scenes import CHUNK, Phase, arrange

LEG = 2500
ABORTED = 0.1
EVERY_S, LASTS_S = 20.0, 3.0
Hit = Callable[[House], Awaitable[None]]


def _signalled(role: str, number: int) -> Hit:
    async def hit(house: House) -> None:
        worker = house.rng.choice(house.by_role(role))
        worker.signal(number)

    return hit


async def _reset_links(house: House) -> None:
    for worker in house.by_role("decode"):
        worker.data.reset()


async def _reset_control(house: House) -> None:
    house.rng.choice(list(house.workers.values())).control.reset()


async def _black_hole(house: House) -> None:
    proxy = house.rng.choice(house.by_role("decode")).data
    proxy.only = f"{house.rng.choice(house.by_role('prefill')).incarnation}|"
    proxy.black_hole = True


async def _break_frames(house: House) -> None:
    for worker in house.by_role("decode"):
        for action in ("corrupt", "truncate", "drop", "duplicate", "reorder"):
            worker.data.rules.append(Rule(action, is_frame, rate=0.01))  # type: ignore[arg-type]


async def _stall(house: House) -> None:
    assert house.coordinator is not None
    house.coordinator.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.5)  # the length of the fault itself
    house.coordinator.send_signal(signal.SIGCONT)


HITS: dict[str, Hit] = {
    "decode killed": _signalled("decode", signal.SIGKILL),
    "prefill killed": _signalled("prefill", signal.SIGKILL),
    "decode stopped": _signalled("decode", signal.SIGSTOP),
    "prefill stopped": _signalled("prefill", signal.SIGSTOP),
    "decode drained": _signalled("decode", signal.SIGTERM),
    "prefill drained": _signalled("prefill", signal.SIGTERM),
    "links reset": _reset_links,
    "control reset": _reset_control,
    "pair black-holed": _black_hole,
    "frames broken": _break_frames,
    "coordinator stalled": _stall,
}


async def _break_things(house: House, faults: Counter[str], first: int) -> None:
    """One fault after another, each healed (or its process started again) after LASTS_S."""
    names = list(HITS)
    while True:
        await asyncio.sleep(EVERY_S / 2)
        name = names[(first + faults.total()) % len(names)]
        await HITS[name](house)
        faults[name] += 1
        await asyncio.sleep(LASTS_S)
        await house.restore()
        await asyncio.sleep(EVERY_S / 2 - LASTS_S)


async def soak(directory: Path, *, requests: int, at_once: int, state: Path | None, seed: int) -> Figures:
    """Goes on from ``state`` (if it exists) up to ``requests`` in all."""
    total = Figures("soak")
    if state is not None and state.exists():
        kept = json.loads(state.read_text())
        total.verdicts, total.faults = Counter(kept["verdicts"]), Counter(kept["faults"])
        total.seconds, total.gap_s, total.free_s = kept["seconds"], kept["gap_s"], kept["free_s"]
    done = total.verdicts.total()
    async with House.running(directory / "soak", flags=LOAD_FLAGS, seed=seed + done) as house:
        while done < requests and total.passed:
            await _leg(house, total, min(LEG, requests - done), at_once)
            done = total.verdicts.total()
            print(total.row(), flush=True)
            if state is not None and total.passed:
                state.write_text(json.dumps({
                    "verdicts": total.verdicts, "faults": total.faults, "seconds": total.seconds,
                    "gap_s": total.gap_s, "free_s": total.free_s,
                }))  # fmt: skip
            await house.repair()
    return total


async def _leg(house: House, total: Figures, count: int, at_once: int) -> None:
    asks = [house.ask(house.rng.randrange(20, 160), house.rng.randrange(8, 48)) for _ in range(count)]
    leaving = {id(ask): house.rng.randrange(1, 8) for ask in asks if house.rng.random() < ABORTED}
    for worker in house.workers.values():
        worker.command(step_s=0.01)
    faults: Counter[str] = Counter()
    started = clock()
    breaking = asyncio.ensure_future(_break_things(house, faults, total.faults.total()))
    await crowd(house, asks, at_once, leave=lambda ask: leaving.get(id(ask), 0))
    breaking.cancel()
    await asyncio.gather(breaking, return_exceptions=True)
    ended = clock()
    await house.restore()
    await house.until_ready()
    total.free_s = max(total.free_s, await house.until_free() - ended)
    total.seconds += ended - started
    total.faults += faults
    total.gap_s = max(total.gap_s, *(_gap(ask) for ask in asks))
    judge(total, asks)


def _gap(ask: Ask) -> float:
    """The largest time between two tokens; waiting for the first is the queue's."""
    return ask.largest_gap(ask.arrivals[0]) if ask.arrivals and not ask.left else 0.0


async def aborts(directory: Path, *, count: int) -> dict[str, list[float]]:
    """Seconds from a client's hanging up to the last block given back, in rising order: ``count`` times while its
    prompt is computed (0.13 s a step), and as often while it streams (0.03 s a step)."""
    phases: dict[str, Phase] = {"its prompt is computed, 0.13 s a step": "P", "it streams, 0.03 s a step": "S"}
    times: dict[str, list[float]] = {}
    async with House.running(
        directory / "aborts", flags=("--watched", "--max-num-batched-tokens", str(CHUNK))
    ) as house:
        for name, phase in phases.items():
            times[name] = sorted([await _abort(house, phase) for _ in range(count)])
    return times


async def _abort(house: House, phase: Phase) -> float:
    async with house.session() as session:
        scene = await arrange(house, phase, session)
        at = clock()
        scene.task.cancel()
        await asyncio.gather(scene.task, return_exceptions=True)
        freed_at = await house.until_free()
        await house.repair()
    return freed_at - at
