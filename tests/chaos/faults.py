"""What can happen. Each fault strikes a scene and returns its proof: a check, made at the end, that it did happen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tests.chaos.house import Worker, clock
from tests.chaos.proxy import Action, Parts, Proxy, Rule, is_a, is_frame
from tests.chaos.scenes import PROMPT, STEP_S, Scene

Proof = Callable[[], bool]
Fault = Callable[[Scene], Awaitable[Proof]]
STALL_S = 0.5
REFUSED_S = 0.25
"""A refusal takes 50 ms at most; the rest is for a machine that runs three houses at once."""


def _struck(scene: Scene) -> None:
    scene.struck_at = clock()


def _let_go(scene: Scene) -> None:
    """Ends the pause in which a scene in phase X was arranged."""
    for worker in scene.house.by_role("decode"):
        worker.data.release()


def _coordinator(scene: Scene) -> Any:
    assert scene.house.coordinator is not None
    return scene.house.coordinator


# -- clients ----------------------------------------------------------------------------------------------------------


async def client_leaves(scene: Scene) -> Proof:
    _struck(scene)
    scene.task.cancel()
    _let_go(scene)
    return scene.task.cancelled


# -- processes --------------------------------------------------------------------------------------------------------


async def kill(role: str, scene: Scene) -> Proof:
    worker: Worker = getattr(scene, role)
    process = worker.process
    assert process is not None
    worker.wanted = False
    _struck(scene)
    worker.signal(signal.SIGKILL)
    _let_go(scene)
    return lambda: process.returncode == -signal.SIGKILL


async def stop(role: str, scene: Scene) -> Proof:
    worker: Worker = getattr(scene, role)
    worker.wanted = False
    _struck(scene)
    worker.signal(signal.SIGSTOP)
    _let_go(scene)
    assert worker.process is not None
    pid = worker.process.pid
    return lambda: worker.stopped and _state_of(pid) == "T"


def _state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


async def pause(role: str, scene: Scene) -> Proof:
    """Stopped for three seconds, then on again: what it still says must not count."""
    proof = await stop(role, scene)
    await asyncio.sleep(3.0)  # the length of the fault itself
    was = proof()
    worker: Worker = getattr(scene, role)
    worker.signal(signal.SIGCONT)
    worker.wanted = True
    return lambda: was


async def terminate(role: str, scene: Scene) -> Proof:
    worker: Worker = getattr(scene, role)
    process = worker.process
    assert process is not None
    worker.wanted = False
    _struck(scene)
    worker.signal(signal.SIGTERM)
    _let_go(scene)
    return lambda: process.returncode == 0


async def kill_coordinator(scene: Scene) -> Proof:
    process = _coordinator(scene)
    _struck(scene)
    process.kill()
    _let_go(scene)
    return lambda: bool(process.returncode == -signal.SIGKILL)


async def terminate_coordinator(scene: Scene) -> Proof:
    process = _coordinator(scene)
    _struck(scene)
    process.terminate()
    _let_go(scene)
    return lambda: bool(process.returncode == 0)


async def stall_coordinator(scene: Scene) -> Proof:
    process = _coordinator(scene)
    _struck(scene)
    process.send_signal(signal.SIGSTOP)
    _let_go(scene)
    await asyncio.sleep(STALL_S)  # the length of the fault itself
    stalled = _state_of(process.pid) == "T"
    process.send_signal(signal.SIGCONT)
    return lambda: stalled


async def kill_pool(role: str, scene: Scene) -> Proof:
    """Every worker of a role."""
    workers = scene.house.by_role(role)
    processes = [worker.process for worker in workers]
    _struck(scene)
    for worker in workers:
        worker.wanted = False
        worker.signal(signal.SIGKILL)
    _let_go(scene)
    return lambda: all(process is not None and process.returncode == -signal.SIGKILL for process in processes)


async def replace_pool(role: str, scene: Scene) -> Proof:
    """Every worker of a role is killed; new ones are started as soon as they are gone."""
    proof = await kill_pool(role, scene)
    await scene.house.until(proof, 5.0, "the pool is dead")
    for worker in scene.house.by_role(role):
        assert worker.reading is not None
        await worker.reading
        await scene.house.start_worker(worker, "--step-s", str(STEP_S))
        worker.wanted = True
    return lambda: True


async def refuse_stranger(scene: Scene) -> Proof:
    """A worker of another model wants to join."""
    log = scene.house.directory / "stranger.log"
    _struck(scene)
    stranger = await scene.house.start_stranger(log)
    _let_go(scene)
    return lambda: bool(stranger.returncode) and "the coordinator refuses this worker" in log.read_text()


# -- requests ---------------------------------------------------------------------------------------------------------


async def nothing(scene: Scene) -> Proof:
    """The fault is in the request itself; its verdict, or the other worker that had to serve it, is the proof."""
    _struck(scene)
    return lambda: True


async def deadline(scene: Scene) -> Proof:
    """It passes by itself; a hand-off that was held back goes on only after it."""
    scene.struck_at = scene.ask.started_at
    await asyncio.wait([scene.task])
    _let_go(scene)
    return lambda: scene.ask.ended_at > scene.struck_at + 1.0


async def overload(scene: Scene) -> Proof:
    """One more than may wait."""
    _struck(scene)
    ask = scene.house.ask(64, 8)
    await ask.send(scene.session)
    told = "Retry-After" in ask.headers and "retry-after-ms" in ask.headers
    return lambda: ask.status == 429 and ask.error == "server_is_overloaded" and told and ask.largest_gap(0) < REFUSED_S


async def fill_pool(scene: Scene) -> Proof:
    """Streams that fit when they were placed and no longer when they have grown: some must be parked and resumed."""
    _struck(scene)
    for worker in scene.house.by_role("decode"):
        worker.command(step_s=0.002)
    scene.neighbours = [scene.house.ask(PROMPT, scene.ask.max_tokens) for _ in range(3)]
    for ask in scene.neighbours:
        scene.send(ask)
    await scene.over()
    shown = await scene.house.admin()
    parked = sum(worker["counters"].get("num_preemptions", 0) for worker in shown.values())
    return lambda: parked > 0


# -- connections ------------------------------------------------------------------------------------------------------


def _line(scene: Scene, which: str) -> Proxy:
    return {"data": scene.decode.data, "prefill": scene.prefill.control, "decode": scene.decode.control}[which]


def _counted(proxy: Proxy, name: str) -> Proof:
    before = proxy.done[name]
    return lambda: proxy.done[name] > before


async def reset(which: str, scene: Scene) -> Proof:
    proxy = _line(scene, which)
    proof = _counted(proxy, "reset")
    _struck(scene)
    proxy.reset()
    _let_go(scene)
    return proof


async def half_close(which: str, scene: Scene) -> Proof:
    proxy = _line(scene, which)
    proof = _counted(proxy, "half_close")
    _struck(scene)
    proxy.half_close()
    _let_go(scene)
    return proof


async def black_hole(which: str, scene: Scene) -> Proof:
    """Between this pair (or worker and coordinator) everything vanishes, connections stay."""
    proxy = _line(scene, which)
    proof = _counted(proxy, "black_hole")
    if which == "data":
        proxy.only = f"{scene.prefill.incarnation}|"
    _struck(scene)
    proxy.black_hole = True
    _let_go(scene)
    return proof


async def slow(which: str, knob: str, value: float, counter: str, scene: Scene) -> Proof:
    proxy = _line(scene, which)
    proof = _counted(proxy, counter)
    _struck(scene)
    setattr(proxy, knob, value)
    _let_go(scene)
    return proof


# -- messages ---------------------------------------------------------------------------------------------------------


async def tamper(action: Action, match: Callable[[Parts], bool], direction: Any, limit: int, scene: Scene) -> Proof:
    rule = Rule(action, match, direction, limit=limit)
    for worker in scene.house.by_role("decode"):
        worker.data.rules.append(rule)
    _struck(scene)
    _let_go(scene)
    return lambda: rule.hits > 0


def frame(action: Action) -> Fault:
    return partial(tamper, action, is_frame, "up", 1)


def lost(tag: str, direction: str, times: int = 1) -> Fault:
    return partial(tamper, "drop", is_a(tag), direction, times)
