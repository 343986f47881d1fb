"""One request brought into one phase of its life, so that a fault can strike exactly there.

    Q  queued: every decode slot is taken, and the coordinator says that one request waits
    P  prefilling: the second of five slow chunks is being computed
    X  transferring: the first frame of KV has reached the proxy, which holds it back
    D  decoding, nothing told yet (not streaming): decode computes the fourth token or a later one
    S  streaming: the client has five tokens or more

In an ``idle`` scene nothing runs: the fault itself sends the request when it has made what the request is to meet.
Nothing sleeps and hopes: a scene is ready when a worker, a proxy, the coordinator or the client has said so.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from tests.chaos.house import Ask, House, Worker, clock
from tests.chaos.proxy import is_frame

Phase = Literal["Q", "P", "X", "D", "S"]
PHASES: tuple[Phase, ...] = ("Q", "P", "X", "D", "S")
Arranged = Phase | Literal["idle"]
PROMPT, OUTPUT, CHUNK = 320, 60, 64
TOKEN_S, STEP_S = 0.002, 0.03
"""A chunk of a prompt then takes 0.13 s, a prompt 0.64 s, a decoded token 0.03 s."""
BLOCKERS = 4
ARRIVES_S = 20.0


@dataclass
class Scene:
    """``ask`` is the request in its phase, ``prefill`` and ``decode`` its workers (those it would get, if queued),
    ``neighbours`` others that must not notice. ``struck_at`` is when the fault began, ``back_s`` how long a process
    that came again took to be of use, ``unqueued_s`` how long a queued request was still counted."""

    house: House
    session: aiohttp.ClientSession
    ask: Ask
    prefill: Worker
    decode: Worker
    neighbours: list[Ask] = field(default_factory=list)
    struck_at: float = 0.0
    back_s: float = 0.0
    unqueued_s: float = 0.0
    tasks: dict[int, asyncio.Task[Ask]] = field(default_factory=dict)

    def send(self, ask: Ask) -> asyncio.Task[Ask]:
        task = self.tasks[id(ask)] = asyncio.ensure_future(ask.send(self.session))
        return task

    @property
    def task(self) -> asyncio.Task[Ask]:
        return self.tasks[id(self.ask)]

    async def over(self, within_s: float = 40.0) -> None:
        """Until every request has ended, one way or another."""
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def other(self, worker: Worker) -> Worker:
        return next(each for each in self.house.by_role(worker.role) if each is not worker)


async def arrange(house: House, phase: Arranged, session: aiohttp.ClientSession, output: int = OUTPUT) -> Scene:
    """Brings a request for ``output`` tokens into ``phase``; Stuck if it does not get there."""
    ask = house.ask(PROMPT, output, stream=phase != "D")
    scene = Scene(house, session, ask, house.by_role("prefill")[0], house.by_role("decode")[0])
    for worker in house.by_role("decode"):
        worker.command(step_s=STEP_S)
    if phase == "idle":
        return scene
    await {"Q": _queued, "P": _prefilling, "X": _transferring, "D": _decoding, "S": _streaming}[phase](scene)
    return scene


async def _queued(scene: Scene) -> None:
    house = scene.house
    scene.neighbours = [house.ask(PROMPT, 2 * scene.ask.max_tokens) for _ in range(BLOCKERS)]
    for ask in scene.neighbours:
        scene.send(ask)
    await house.until(lambda: all(ask.ids for ask in scene.neighbours), ARRIVES_S, "the decode slots are taken")
    scene.send(scene.ask)

    async def waits() -> bool:
        return (await house.requests())["waiting"] == 1

    await house.poll(waits, ARRIVES_S, "the request is queued")


async def _find_prefill(scene: Scene, position: int) -> None:
    """Until a chunk that begins at ``position`` or later is computed; it is on ``scene.prefill``."""

    def on() -> Worker | None:
        prefills = scene.house.by_role("prefill")
        return next((each for each in prefills if any(step[3] >= position for step in each.steps())), None)

    scene.prefill = await scene.house.until(on, ARRIVES_S, "a prefill worker computes the prompt")


async def _find_decode(scene: Scene, position: int) -> None:
    def on() -> Worker | None:
        decodes = scene.house.by_role("decode")
        return next((each for each in decodes if any(step[3] >= position for step in each.steps())), None)

    scene.decode = await scene.house.until(on, ARRIVES_S, "a decode worker computes the request")


async def _prefilling(scene: Scene) -> None:
    for worker in scene.house.by_role("prefill"):
        worker.command(token_s=TOKEN_S)
    scene.send(scene.ask)
    await _find_prefill(scene, CHUNK)
    decodes = scene.house.by_role("decode")
    scene.decode = await scene.house.until(
        lambda: next((worker for worker in decodes if worker.holds[1]), None), ARRIVES_S, "a reservation"
    )


async def _transferring(scene: Scene) -> None:
    decodes = scene.house.by_role("decode")
    held = {worker.name: worker.data.hold_at(is_frame) for worker in decodes}
    scene.send(scene.ask)
    await scene.house.until(lambda: any(event.is_set() for event in held.values()), ARRIVES_S, "a frame of KV")
    scene.decode = next(worker for worker in decodes if held[worker.name].is_set())
    scene.other(scene.decode).data.release()
    await _find_prefill(scene, PROMPT - CHUNK)


async def _decoding(scene: Scene) -> None:
    scene.send(scene.ask)
    await _find_decode(scene, PROMPT + 3)
    await _find_prefill(scene, 0)


async def _streaming(scene: Scene) -> None:
    scene.send(scene.ask)
    await scene.house.until(lambda: len(scene.ask.ids) >= 5, ARRIVES_S, "five tokens at the client")
    await _find_decode(scene, PROMPT)
    await _find_prefill(scene, 0)


def progress(scene: Scene) -> float:
    """The longest time since the fault without a computed token, for an answer that comes in one piece."""
    steps = sorted(step[0] for worker in scene.house.workers.values() for step in worker.steps() if step[5])
    marks = [scene.struck_at, *(at for at in steps if scene.struck_at < at < scene.ask.ended_at), scene.ask.ended_at]
    return max((after - before for before, after in itertools.pairwise(marks)), default=0.0)


__all__ = ["PHASES", "Arranged", "Phase", "Scene", "arrange", "clock", "progress"]
