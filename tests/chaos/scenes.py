"""Brings one request into a given phase, so that a fault can be injected exactly there.

    Q  queued: every decode slot is taken, and the coordinator reports one waiting request
    P  prefilling: the second of five slow chunks is being computed
    X  transferring: the first frame of KV has reached the proxy, which holds it back
    D  decoding, not streaming: decode computes the fourth token or a later one; the client receives nothing until the
       answer is complete, REST_S later
    S  streaming: the client has five tokens or more

In an ``idle`` scene nothing runs: the fault itself sends the request after it has prepared the system. No scene relies
on sleeping: it is ready when a worker, a proxy, the coordinator or the client has reported the phase.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from tests.chaos.cluster import ChaosCluster, ChaosWorker, Stuck
from tests.chaos.proxy import is_frame
from tests.chaos.request import ChaosRequest
from tests.fakes.constraints import LONGEST_TOKEN, sentence

Phase = Literal["Q", "P", "X", "D", "S"]
Arranged = Phase | Literal["idle"]
PROMPT, OUTPUT, CHUNK = 320, 60, 64
TOKEN_S, STEP_S = 0.002, 0.03
"""Seconds per prompt token and per decode step: a chunk takes 0.13 s, a prompt 0.64 s, a decoded token 0.03 s."""
REST_S, TURN_S = OUTPUT * STEP_S, 2 * OUTPUT * STEP_S
"""The longest time for the rest of an answer in phase D, and for a neighbour of a request in phase Q to end."""
BLOCKERS = 4
ARRIVES_S = 20.0
TRIES = 3


@dataclass
class Scene:
    """A request in a phase, and its surroundings.

    ``ask`` is the request, ``prefill`` and ``decode`` are its workers (arbitrary ones while it is queued), and
    ``neighbours`` other requests that must not be affected. ``struck_at`` is when the fault began, ``back_s`` how long
    a restarted process took to be used, ``unqueued_s`` how long an abandoned request was still counted as queued."""

    cluster: ChaosCluster
    session: aiohttp.ClientSession
    ask: ChaosRequest
    prefill: ChaosWorker
    decode: ChaosWorker
    neighbours: list[ChaosRequest] = field(default_factory=list)
    struck_at: float = 0.0
    back_s: float = 0.0
    unqueued_s: float = 0.0
    tasks: dict[int, asyncio.Task[ChaosRequest]] = field(default_factory=dict)

    def send(self, ask: ChaosRequest) -> asyncio.Task[ChaosRequest]:
        task = self.tasks[id(ask)] = asyncio.ensure_future(ask.send(self.session))
        return task

    @property
    def task(self) -> asyncio.Task[ChaosRequest]:
        return self.tasks[id(self.ask)]

    async def over(self, within_s: float = 40.0) -> None:
        """Wait until every request has ended, in whatever way."""
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def other(self, worker: ChaosWorker) -> ChaosWorker:
        return next(each for each in self.cluster.by_role(worker.role) if each is not worker)

    def steps(self, worker: ChaosWorker) -> list[tuple[float, int, int]]:
        """Return (time, start, end) of every segment of the request that ``worker`` has computed."""
        request = self.cluster.id_of(self.ask)
        return [(at, start, end) for at, mine, _, start, end, _ in worker.steps() if mine == request]


async def arrange(
    cluster: ChaosCluster, phase: Arranged, session: aiohttp.ClientSession, output: int = OUTPUT, *, stream: bool = True
) -> Scene:
    """Bring a request for ``output`` tokens into ``phase``; in S, it is in the middle of a JSON string. Raises Stuck if
    it does not get there."""
    constraint = sentence(LONGEST_TOKEN * output) if phase == "S" else None
    ask = cluster.ask(PROMPT, output, stream=stream and phase != "D", constraint=constraint)
    scene = Scene(cluster, session, ask, cluster.by_role("prefill")[0], cluster.by_role("decode")[0])
    for worker in cluster.by_role("decode"):
        worker.command(step_s=STEP_S)
    if phase != "idle":
        await bring(scene, phase)
    return scene


async def bring(scene: Scene, phase: Phase) -> None:
    """Send the scene's request and wait until it is in ``phase``. Other requests may be running already."""
    await {"Q": _queued, "P": _prefilling, "X": _transferring, "D": _decoding, "S": _streaming}[phase](scene)


async def _queued(scene: Scene) -> None:
    cluster = scene.cluster
    scene.neighbours = [cluster.ask(PROMPT, 2 * scene.ask.max_tokens) for _ in range(BLOCKERS)]
    for ask in scene.neighbours:
        scene.send(ask)
    streams = scene.neighbours  # a first token comes from prefill
    await cluster.until(lambda: all(len(ask.ids) > 1 for ask in streams), ARRIVES_S, "the decode slots are taken")
    scene.send(scene.ask)

    async def waits() -> bool:
        return (await cluster.requests())["waiting"] == 1

    await cluster.poll(waits, ARRIVES_S, "the request is queued")


async def _find(scene: Scene, role: str, position: int) -> ChaosWorker:
    """Wait for a worker that computes a chunk of the request beginning at ``position`` or later, and return it."""
    workers = scene.cluster.by_role(role)

    def on() -> ChaosWorker | None:
        return next((each for each in workers if any(start >= position for _, start, _ in scene.steps(each))), None)

    found: ChaosWorker = await scene.cluster.until(on, ARRIVES_S, f"a {role} worker computes the request")
    return found


async def _prefilling(scene: Scene) -> None:
    """Bring the request into phase P. One that has left it before we saw it is replaced by another request."""
    for worker in scene.cluster.by_role("prefill"):
        worker.command(token_s=TOKEN_S)
    for _ in range(TRIES):
        await _reserved(scene)
        if max(start for _, start, _ in scene.steps(scene.prefill)) < PROMPT - CHUNK:
            return
        await scene.task
        assert scene.ask.verdict() == "exact"
        scene.ask = scene.cluster.ask(PROMPT, scene.ask.max_tokens, stream=scene.ask.stream)
    raise Stuck("prompts are over before they are seen")


async def _reserved(scene: Scene) -> None:
    """Send the request and wait until its second chunk is computed and a decode worker has reserved blocks for it."""
    scene.send(scene.ask)
    scene.prefill = await _find(scene, "prefill", CHUNK)
    decodes, request = scene.cluster.by_role("decode"), scene.cluster.id_of(scene.ask)
    scene.decode = await scene.cluster.until(
        lambda: next((each for each in decodes if request in each.holders), None), ARRIVES_S, "a reservation"
    )


async def _transferring(scene: Scene) -> None:
    decodes = scene.cluster.by_role("decode")
    held = {worker.name: worker.data.hold_at(is_frame) for worker in decodes}
    scene.send(scene.ask)
    await scene.cluster.until(lambda: any(event.is_set() for event in held.values()), ARRIVES_S, "a frame of KV")
    scene.decode = next(worker for worker in decodes if held[worker.name].is_set())
    scene.other(scene.decode).data.release()
    scene.prefill = await _find(scene, "prefill", PROMPT - CHUNK)


async def _decoding(scene: Scene) -> None:
    scene.send(scene.ask)
    scene.decode = await _find(scene, "decode", PROMPT + 3)
    scene.prefill = await _find(scene, "prefill", 0)


async def _streaming(scene: Scene) -> None:
    scene.send(scene.ask)
    await scene.cluster.until(lambda: len(scene.ask.ids) >= 5, ARRIVES_S, "five tokens at the client")
    scene.decode = await _find(scene, "decode", PROMPT)
    scene.prefill = await _find(scene, "prefill", 0)
