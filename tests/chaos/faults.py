"""The faults. Each is injected into a scene and returns its proof: a check, made at the end, that it happened."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from common.core.timeouts import FailureTimes
from common.net.wire import DIGEST_BYTES
from coordinator.routing.router import FAILED_PAIRS
from tests.chaos.cluster import ChaosWorker, state_of
from tests.chaos.proxy import Action, Direction, FaultProxy, Parts, Rule, is_a, is_frame
from tests.chaos.request import clock
from tests.chaos.scenes import ARRIVES_S, CHUNK, OUTPUT, PROMPT, STEP_S, Scene, bring
from tests.chaos.worker import KILLS_LATE

Proof = Callable[[], bool]
Fault = Callable[[Scene], Awaitable[Proof]]
LONG, CHOICES, FAST_S, NARROW_BYTES = 1500, 4, 0.005, 2048
"""For a client that stops reading: tokens and choices requested, seconds per token, and the socket's buffer size."""
STUCK_S = 8.0
"""How long a hung worker hangs: longer than anything may wait for it."""
SERVED_S = 4.5
"""The longest wait of a request whose only pair has a failed hand-off behind it: a cool-down, and four prompts."""
UNDISTURBED_S = 0.5
"""The longest pause of a stream that a fault must not affect."""
DEADLINE_S = 1.5
"""Request timeout of the coordinator in the cells about deadlines."""
RESET_EVERY_S = 0.04
"""Seconds between the resets of successive connections."""
POOL_BLOCKS, FILLS, ALMOST = 130, 700, 102
"""For a pool that two streams fill: its blocks, the tokens of each stream, and the number of blocks that both hold when
the request arrives."""
FILLING_S, WAITING_S, LASTS_S = 0.002, 0.2, 0.01
"""Seconds per token of these streams while they fill the pool, and while they wait for the other pool's streams and for
the request; and seconds per token of a prompt that must last until the pool is full."""
COMERS = 4
"""Number of requests sent at once, equal to the number of slots, so that every worker gets some."""
REFUSED_S = 0.05
"""The longest time until a request is rejected."""


def _struck(scene: Scene) -> None:
    scene.struck_at = clock()


def _let_go(scene: Scene) -> None:
    """Release the data connections that a scene in phase X holds back."""
    for worker in scene.cluster.by_role("decode"):
        worker.data.release()


def _coordinator(scene: Scene) -> Any:
    assert scene.cluster.coordinator is not None
    return scene.cluster.coordinator


# -- clients ----------------------------------------------------------------------------------------------------------


async def client_leaves(scene: Scene) -> Proof:
    _struck(scene)
    scene.task.cancel()
    _let_go(scene)
    return scene.task.cancelled


async def queued_client_leaves(scene: Scene) -> Proof:
    """The client of a queued request leaves. Proof: no worker ever computes a token of the request; only its
    neighbours, which decode already, appear in steps."""
    known = _stepped(scene)
    assert len(known) == len(scene.neighbours)
    proof = await client_leaves(scene)

    async def forgotten() -> bool:
        return (await scene.cluster.requests())["waiting"] == 0

    await scene.cluster.poll(forgotten, ARRIVES_S, "the request waits no more")
    scene.unqueued_s = clock() - scene.struck_at
    return lambda: proof() and _stepped(scene) == known


def _stepped(scene: Scene) -> set[str]:
    """Return the ids of all requests that appear in any worker's steps."""
    return {step[1] for worker in scene.cluster.workers.values() for step in worker.steps()}


async def client_stops_reading(scene: Scene) -> Proof:
    """Another client reads five tokens of a long answer and then stops reading, without closing the connection."""
    ask = scene.cluster.ask(64, LONG, extra={"n": CHOICES})
    for worker in scene.cluster.by_role("decode"):
        worker.command(step_s=FAST_S)
    reader, writer = await asyncio.open_connection(sock=await _narrow(scene.cluster.url), limit=NARROW_BYTES)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(ask.body())}\r\n\r\n".encode() + ask.body())
        for _ in range(5):
            await reader.readuntil(b"data: ")
        _struck(scene)
        await scene.over()

        async def cut() -> bool:
            return bool(
                re.search(r'^tandem_clients_cut_off_total\{while="reading"\} 1\.0', await _metrics(scene), re.M)
            )

        await scene.cluster.poll(cut, 10.0, "the client is cut off")
    finally:
        writer.transport.abort()
    return lambda: scene.ask.largest_gap(scene.struck_at) < UNDISTURBED_S


async def _narrow(url: str) -> socket.socket:
    """Open a connection with small buffers, so that little data is in flight when its reader stops."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    end = socket.socket()
    end.setblocking(False)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, NARROW_BYTES)
    await asyncio.get_running_loop().sock_connect(end, (host, int(port)))
    return end


async def _metrics(scene: Scene) -> str:
    return (await scene.cluster.get("/metrics"))[1]


# -- processes --------------------------------------------------------------------------------------------------------


async def kill(role: str, scene: Scene) -> Proof:
    worker: ChaosWorker = getattr(scene, role)
    _struck(scene)
    proof = _kill(scene, worker)
    _let_go(scene)
    return proof


def _kill(scene: Scene, worker: ChaosWorker) -> Proof:
    """Kill a worker and discard what it has sent but its peers have not received, as when its host dies.

    Otherwise a hand-off that is held back in phase X might complete as if the worker had not died."""
    process = worker.process
    assert process is not None
    worker.wanted = False
    worker.signal(signal.SIGKILL)
    for decode in scene.cluster.by_role("decode"):
        decode.data.reset(f"{worker.incarnation}|")
    return lambda: process.returncode == -signal.SIGKILL


async def stop(role: str, scene: Scene) -> Proof:
    worker: ChaosWorker = getattr(scene, role)
    worker.wanted = False
    _struck(scene)
    worker.signal(signal.SIGSTOP)
    _let_go(scene)
    assert worker.process is not None
    pid = worker.process.pid
    return lambda: worker.stopped and state_of(pid) == "T"


async def pause(role: str, scene: Scene) -> Proof:
    """Stop a worker for three seconds, then continue it: its late messages must be ignored."""
    proof = await stop(role, scene)
    await asyncio.sleep(3.0)  # the length of the fault itself
    was = proof()
    worker: ChaosWorker = getattr(scene, role)
    worker.signal(signal.SIGCONT)
    worker.wanted = True
    return lambda: was


async def terminate(role: str, scene: Scene) -> Proof:
    worker: ChaosWorker = getattr(scene, role)
    process = worker.process
    assert process is not None
    worker.wanted = False
    _struck(scene)
    worker.signal(signal.SIGTERM)
    _let_go(scene)
    return lambda: process.returncode == 0


async def kill_pair(scene: Scene) -> Proof:
    """Kill both workers of the request at once."""
    _struck(scene)
    proofs = [_kill(scene, worker) for worker in (scene.prefill, scene.decode)]
    _let_go(scene)
    return lambda: all(proof() for proof in proofs)


async def outstay(role: str, scene: Scene) -> Proof:
    """Send SIGTERM to a worker with more work than --drain-timeout allows; the rest is placed again without errors."""
    proof = await terminate(role, scene)
    return lambda: proof() and "that are retried" in _coordinators_log(scene)


def _coordinators_log(scene: Scene) -> str:
    return (scene.cluster.directory / "coordinator.log").read_text()


async def stick(role: str, knob: Literal["stuck_s", "jammed_s"], scene: Scene) -> Proof:
    """Make the engine hang in a step (``stuck_s``) or the worker loop between steps (``jammed_s``), while heartbeats
    continue."""
    worker: ChaosWorker = getattr(scene, role)
    worker.wanted = False
    _struck(scene)
    worker.command(**{knob: STUCK_S})
    _let_go(scene)
    stuck_at = await scene.cluster.until(
        lambda: next((event["at"] for event in worker.events if event["event"] == "stuck"), None),
        ARRIVES_S,
        "the worker is stuck",
    )
    return lambda: 0 < scene.ask.ended_at < stuck_at + STUCK_S


async def mute(scene: Scene) -> Proof:
    """Lose all tokens of a decode worker, while its heartbeats, on another connection, still list the stream."""
    rule = Rule("drop", is_a("tokens"), "up")
    scene.decode.control.rules.append(rule)
    _struck(scene)
    _let_go(scene)
    return lambda: rule.hits > 1


async def cut_off(role: str, direction: Direction, scene: Scene) -> Proof:
    """Lose everything to a worker (down) or from it (up), except heartbeats, which have another connection."""
    worker: ChaosWorker = getattr(scene, role)
    return await _sever(worker, direction, "no answer over its control connection", scene)


async def cut_off_idle(role: str, direction: Direction, scene: Scene) -> Proof:
    """As :func:`cut_off`, for a worker without work: only unanswered leases can reveal it.

    Several requests arrive at once; the one with the largest gap, which becomes ``scene.ask``, was placed on this
    worker. A prefill worker whose messages are lost need not delay a request: decode sends the first token too."""
    worker: ChaosWorker = getattr(scene, role)
    proof = await _sever(worker, direction, "no answer over its control connection", scene)
    asks = [scene.ask, *(scene.cluster.ask(PROMPT, OUTPUT) for _ in range(COMERS - 1))]
    for ask in asks:
        scene.send(ask)
    await scene.over()
    scene.ask = max(asks, key=lambda ask: ask.largest_gap(scene.struck_at))
    scene.neighbours = [ask for ask in asks if ask is not scene.ask]
    met = scene.ask.largest_gap(scene.struck_at) > FailureTimes().silence_s
    return lambda: proof() and (met or (role, direction) == ("prefill", "up"))


async def stop_heartbeats(role: str, scene: Scene) -> Proof:
    """Lose a worker's heartbeats, while all its other messages arrive."""
    return await _sever(getattr(scene, role), "up", "silent", scene, beats=True)


async def _sever(
    worker: ChaosWorker, direction: Direction, noticed: str, scene: Scene, *, beats: bool = False
) -> Proof:
    """Make one connection between worker and coordinator lose everything in ``direction`` without breaking.

    Proof: the coordinator logs the reason ``noticed``, and the same process joins again over a new connection."""
    control, incarnation, known = worker.control, worker.incarnation, len(_coordinators_log(scene))
    _struck(scene)
    severed = control.sever(direction, beats=beats)
    _let_go(scene)

    def back() -> bool:
        _, gone, after = _coordinators_log(scene)[known:].partition(f"worker {worker.name} is gone: {noticed}")
        return bool(gone) and f"worker {worker.name} joins" in after

    return lambda: severed == 1 and control.done["severed"] > 1 and back() and worker.incarnation == incarnation


async def kill_coordinator(scene: Scene) -> Proof:
    process = _coordinator(scene)
    _struck(scene)
    process.kill()
    _let_go(scene)
    return lambda: bool(process.returncode == -signal.SIGKILL)


async def replace_coordinator(scene: Scene) -> Proof:
    """Kill the coordinator, and start a new one at its addresses as soon as it is gone."""
    process, proof = _coordinator(scene), await kill_coordinator(scene)
    await process.wait()
    await scene.cluster.start_coordinator()
    listens_at = clock()
    await scene.cluster.until_ready()
    scene.back_s = clock() - listens_at
    return proof


async def terminate_coordinator(scene: Scene) -> Proof:
    """Send SIGTERM to the coordinator. Proof: it finishes running requests and rejects new ones."""
    process, refused = _coordinator(scene), scene.cluster.ask(64, 8)
    _struck(scene)
    process.terminate()
    _let_go(scene)

    async def drains() -> bool:
        return "shutting down" in (await scene.cluster.get("/ready"))[1]

    await scene.cluster.poll(drains, 1.0, "the coordinator drains")
    await refused.send(scene.session)
    return lambda: bool(process.returncode == 0) and (refused.status, refused.error) == (503, "server_shutting_down")


async def stall_coordinator(seconds: float, scene: Scene) -> Proof:
    """Stop the coordinator for ``seconds``. Proof: it declares no worker silent and moves no request, since it was
    absent itself."""
    process, lost_attempts = _coordinator(scene), await scene.cluster.lost_attempts()
    _struck(scene)
    process.send_signal(signal.SIGSTOP)
    _let_go(scene)
    await asyncio.sleep(seconds)  # the length of the fault itself
    stalled = state_of(process.pid) == "T"
    process.send_signal(signal.SIGCONT)
    await scene.over()
    unmoved = await scene.cluster.lost_attempts() == lost_attempts
    return lambda: stalled and unmoved


async def stop_everybody(seconds: float, scene: Scene) -> Proof:
    """Stop all processes for ``seconds``, as when a container is paused. Proof: afterwards no worker counts as silent
    and no step as too long."""
    process, lost_attempts, workers = (
        _coordinator(scene),
        await scene.cluster.lost_attempts(),
        scene.cluster.workers.values(),
    )
    _struck(scene)
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    process.send_signal(signal.SIGSTOP)
    _let_go(scene)
    await asyncio.sleep(seconds)  # the length of the fault itself
    pids = [process.pid, *(worker.process.pid for worker in workers if worker.process is not None)]
    stopped = all(state_of(pid) == "T" for pid in pids)
    for worker in workers:
        worker.signal(signal.SIGCONT)
    process.send_signal(signal.SIGCONT)
    await scene.over()
    unmoved = await scene.cluster.lost_attempts() == lost_attempts
    return lambda: stopped and unmoved


async def kill_pool(role: str, scene: Scene) -> Proof:
    """Kill every worker of a role."""
    _struck(scene)
    proofs = [_kill(scene, worker) for worker in scene.cluster.by_role(role)]
    _let_go(scene)
    return lambda: all(proof() for proof in proofs)


async def replace_pool(role: str, scene: Scene) -> Proof:
    """Kill every worker of a role, and start new ones as soon as they are gone."""
    proof = await kill_pool(role, scene)
    await scene.cluster.until(proof, 5.0, "the pool is dead")
    await _start_again(scene, scene.cluster.by_role(role))
    return proof


async def _start_again(scene: Scene, workers: Sequence[ChaosWorker], *flags: str) -> None:
    for worker in workers:
        assert worker.reading is not None
        await worker.reading
        await scene.cluster.start_worker(worker, "--step-s", str(STEP_S), *flags)
        worker.wanted = True


async def outgrow(scene: Scene) -> Proof:
    """Kill and restart the request's decode worker beside one that accepts only shorter requests.

    The request must wait rather than be truncated on that worker; a shorter request, sent later, shows that the worker
    does serve."""
    cluster, short = scene.cluster, scene.other(scene.decode)
    await _restart_with(scene, short, "--max-model-len", str(PROMPT + scene.ask.max_tokens // 2))
    proof = await kill("decode", scene)
    await cluster.until(proof, 5.0, "the worker is dead")
    shorter = cluster.ask(PROMPT, 8)
    scene.neighbours = [shorter]
    scene.send(shorter)
    await _start_again(scene, [scene.decode])
    await scene.over()
    kept_out = cluster.id_of(scene.ask) not in short.holders
    await _restart_with(scene, short)
    return lambda: proof() and kept_out and shorter.headers.get("x-tandem-decode") == short.name


async def _restart_with(scene: Scene, worker: ChaosWorker, *flags: str) -> None:
    """Replace a worker by a new process with these flags."""
    await scene.cluster.until(_kill(scene, worker), 5.0, f"{worker.name} is dead")
    await _start_again(scene, [worker], *flags)
    await scene.cluster.until_ready()


async def restart(role: str, scene: Scene) -> Proof:
    """Kill one worker and start it again at its old address. ``back_s``: from its being ready to its first token."""
    worker: ChaosWorker = getattr(scene, role)
    proof = await kill(role, scene)
    await scene.cluster.until(proof, 5.0, "the worker is dead")
    await _start_again(scene, [worker])
    await scene.cluster.until_ready()
    scene.back_s = await _of_use(scene, worker)
    return proof


async def _of_use(scene: Scene, worker: ChaosWorker) -> float:
    """Return the seconds from now, when ``worker`` is ready, until it produces a token; sends requests to see that."""
    ready_at, used_at = clock(), float("inf")
    while used_at == float("inf") and clock() < ready_at + ARRIVES_S:
        asks = [scene.cluster.ask(64, 4) for _ in range(2)]
        scene.neighbours += asks
        await asyncio.gather(*(scene.send(ask) for ask in asks))
        served = [ask.arrivals[-1] for ask in asks if ask.headers.get(f"x-tandem-{worker.role}") == worker.name]
        used_at = min(served, default=used_at)
    return used_at - ready_at


async def no_prefill(then: Literal["local", "wait", "reject"], scene: Scene) -> Proof:
    """Send a request when the coordinator knows that every prefill worker is dead. A running stream must not be
    affected."""
    stream = scene.cluster.ask(PROMPT, 4 * OUTPUT)
    scene.neighbours = [stream]
    scene.send(stream)
    await scene.cluster.until(lambda: len(stream.ids) >= 5, ARRIVES_S, "a stream runs")
    proof = await _without(scene, "prefill")
    _struck(scene)
    scene.send(scene.ask)
    if then == "wait":
        await _served_again(scene, "prefill")
    await asyncio.wait([scene.task])
    path = {"local": "local", "wait": "disagg"}.get(then)
    return lambda: (
        proof()
        and scene.ask.headers.get("x-tandem-path") == path
        and scene.ask.status == (503 if then == "reject" else 200)
        and stream.largest_gap(scene.struck_at) < UNDISTURBED_S
    )


async def no_decode(scene: Scene) -> Proof:
    """Send a request when the coordinator knows that every decode worker is dead."""
    proof = await _without(scene, "decode")
    _struck(scene)
    scene.send(scene.ask)
    return lambda: proof() and scene.ask.status == 503


async def _without(scene: Scene, role: str) -> Proof:
    proof = await kill_pool(role, scene)

    async def known() -> bool:
        shown = await scene.cluster.admin()
        return not any(
            shown[worker.name]["state"] == "ready" for worker in scene.cluster.by_role(role) if worker.name in shown
        )

    await scene.cluster.poll(known, 5.0, f"the coordinator knows that no {role} worker is left")
    return proof


async def _served_again(scene: Scene, role: str) -> None:
    """Start workers of ``role`` again for a request that waits for one. ``back_s``: from their being ready to its first
    token."""

    async def waits() -> bool:
        return (await scene.cluster.requests())["waiting"] == 1

    await scene.cluster.poll(waits, ARRIVES_S, "the request is held")
    assert not scene.ask.ids
    await _start_again(scene, scene.cluster.by_role(role))
    await scene.cluster.until_ready()
    ready_at = clock()
    await scene.cluster.until(lambda: scene.ask.ids or scene.task.done(), ARRIVES_S, "the request is served")
    scene.back_s = max(0.0, clock() - ready_at)


async def refuse_stranger(scene: Scene) -> Proof:
    """Start a worker of another model, which must be rejected."""
    _struck(scene)
    stranger, log = await scene.cluster.start_stranger()
    _let_go(scene)
    return lambda: bool(stranger.returncode) and "the coordinator refuses this worker" in log.read_text()


# -- requests ---------------------------------------------------------------------------------------------------------


async def engine_fails(token: int, times: int, scene: Scene) -> Proof:
    """Send a request whose prompt contains ``token``, on which engines fail, and a neighbour that must not be affected.

    Proof: ``times`` attempts failed, each a different one."""
    scene.ask.prompt[CHUNK // 2] = token
    scene.neighbours = [scene.cluster.ask(PROMPT, OUTPUT)]
    _struck(scene)
    for ask in (*scene.neighbours, scene.ask):
        scene.send(ask)

    def failed() -> bool:
        events = [event for worker in scene.cluster.workers.values() for event in worker.events]
        attempts = {event["attempt"] for event in events if event["event"] == "fault" and event["token"] == token}
        return attempts == set(range(times))

    return failed


async def poison(phase: Literal["D", "S"], scene: Scene) -> Proof:
    """Send a request that kills any worker that computes its seventh output token: both decode workers die."""
    scene.ask.prompt[0], scene.ask.stream = KILLS_LATE, phase == "S"
    _struck(scene)
    scene.send(scene.ask)
    decodes = scene.cluster.by_role("decode")
    processes = [worker.process for worker in decodes]
    for worker in decodes:
        worker.wanted = False
    return lambda: all(process is not None and process.returncode == -signal.SIGKILL for process in processes)


async def deadline(scene: Scene) -> Proof:
    """Let the request's deadline pass; a hand-off that is held back continues only after it."""
    scene.struck_at = scene.ask.started_at + DEADLINE_S
    await asyncio.wait([scene.task])
    _let_go(scene)
    return lambda: scene.ask.ended_at >= scene.struck_at


async def overload(scene: Scene) -> Proof:
    """Send one request more than may be queued."""
    _struck(scene)
    ask = scene.cluster.ask(64, 8)
    await ask.send(scene.session)
    reported = "Retry-After" in ask.headers and "retry-after-ms" in ask.headers
    return lambda: (
        ask.status == 429 and ask.error == "server_is_overloaded" and reported and ask.largest_gap(0) < REFUSED_S
    )


def _decode_every(scene: Scene, step_s: float) -> None:
    for worker in scene.cluster.by_role("decode"):
        worker.command(step_s=step_s)


def _prefill_every(scene: Scene, token_s: float) -> None:
    for worker in scene.cluster.by_role("prefill"):
        worker.command(token_s=token_s)


def _parked_at(workers: Sequence[ChaosWorker]) -> list[float]:
    """Return the times at which one of ``workers`` had no block for a running sequence."""
    return [event["at"] for worker in workers for event in worker.events if event["event"] == "parked"]


async def fill_pool(scene: Scene) -> Proof:
    """Run streams that fit when placed but not when they have grown, so that some must be parked and resumed."""
    _struck(scene)
    _decode_every(scene, FILLING_S)
    scene.neighbours = [scene.cluster.ask(PROMPT, scene.ask.max_tokens) for _ in range(3)]
    for ask in scene.neighbours:
        scene.send(ask)
    return lambda: bool(_parked_at(scene.cluster.by_role("decode")))


async def find_pool_full(slots: int, scene: Scene) -> Proof:
    """All blocks are promised though some of the ``slots`` are free. Proof: the request waits for blocks, and no
    sequence is parked for it."""
    running = (await scene.cluster.requests())["running"]
    _struck(scene)
    _decode_every(scene, FILLING_S)
    return lambda: running < slots and not _parked_at(scene.cluster.by_role("decode"))


async def fill_pool_beside(phase: Literal["P", "X", "D"], scene: Scene) -> Proof:
    """Let two streams on each decode worker take its last block while the request is in ``phase``.

    With a reservation (P, X) the request is decoded there. While decoding (D) it is parked, as the latest sequence, and
    computed again."""
    await scene.cluster.links()  # trials of links are over, so their blocks do not fill a pool
    lost_attempts, decodes = await scene.cluster.lost_attempts(), scene.cluster.by_role("decode")
    for worker in decodes:
        worker.command(step_s=FILLING_S, slows_at=ALMOST, slow_s=WAITING_S)
    scene.neighbours = [scene.cluster.ask(PROMPT, FILLS) for _ in range(2 * len(decodes))]
    for ask in scene.neighbours:
        scene.send(ask)
    for worker in decodes:
        await scene.cluster.until(lambda at=worker: at.holds[0] >= ALMOST, ARRIVES_S, f"{worker.name} is almost full")
    await bring(scene, phase)
    assert not _parked_at([scene.decode]), "it is full too early"
    _prefill_every(scene, LASTS_S)
    _struck(scene)
    _decode_every(scene, FILLING_S)
    full_at = min(await scene.cluster.until(lambda: _parked_at([scene.decode]), ARRIVES_S, "a pool is full"))
    _prefill_every(scene, 0.0)
    _let_go(scene)
    await scene.over()
    steps, kept = scene.steps(scene.decode), await scene.cluster.lost_attempts() == lost_attempts
    if phase == "D":
        met = any(at > full_at and start < PROMPT for at, start, _ in steps)
    else:
        met = all(at > full_at for at, *_ in steps)
    return lambda: kept and met


# -- connections ------------------------------------------------------------------------------------------------------


def _line(scene: Scene, which: str) -> FaultProxy:
    return {"data": scene.decode.data, "prefill": scene.prefill.control, "decode": scene.decode.control}[which]


def _counted(proxy: FaultProxy, name: str) -> Proof:
    before = proxy.done[name]
    return lambda: proxy.done[name] > before


async def _cut(how: Callable[[FaultProxy], int], which: str, scene: Scene) -> Proof:
    proxy = _line(scene, which)
    proof = _counted(proxy, how.__name__)
    _struck(scene)
    how(proxy)
    _let_go(scene)
    return proof


async def reset_one_after_the_other(scene: Scene) -> Proof:
    """Reset the coordinator's connection to the request's decode worker, then that to the one that took over."""
    proof = await _cut(FaultProxy.reset, "decode", scene)
    other = scene.other(scene.decode)
    await scene.cluster.until(
        lambda: any(step[0] > scene.struck_at and step[3] >= PROMPT for step in other.steps()),
        ARRIVES_S,
        "the other decode worker computes it",
    )
    again = other.control.reset()
    return lambda: proof() and again > 0


async def reset_all(scene: Scene) -> Proof:
    """Reset every worker's connection to the coordinator, one after another, as when a device between them loses its
    state."""
    proof = await _cut(FaultProxy.reset, "decode", scene)
    others = [worker for worker in scene.cluster.workers.values() if worker is not scene.decode]
    struck = 0
    for worker in others:
        await asyncio.sleep(RESET_EVERY_S)
        struck += worker.control.reset() > 0
    return lambda: proof() and struck == len(others)


reset = partial(_cut, FaultProxy.reset)
half_close = partial(_cut, FaultProxy.half_close)


async def black_hole(which: str, scene: Scene) -> Proof:
    """Lose everything between this pair (or between worker and coordinator), without breaking connections."""
    proxy = _line(scene, which)
    proof = _counted(proxy, "black_hole")
    if which == "data":
        proxy.only = f"{scene.prefill.incarnation}|"
    _struck(scene)
    proxy.black_hole = True
    _let_go(scene)
    return proof


async def black_hole_next(scene: Scene) -> Proof:
    """Black-hole the first pair over which a hand-off is announced from now on, which is that of the queued request."""
    chosen: list[FaultProxy] = []

    def swallows(proxy: FaultProxy, parts: Parts) -> bool:
        if chosen or not is_a("open")(parts):
            return False
        chosen.append(proxy)
        proxy.only = f"{msgspec.msgpack.decode(parts[0][DIGEST_BYTES:])[3]}|"
        proxy.black_hole = True
        return True

    for worker in scene.cluster.by_role("decode"):
        worker.data.rules.append(Rule("drop", partial(swallows, worker.data)))
    _struck(scene)
    await scene.over()
    return lambda: bool(chosen and chosen[0].done["black_hole"]) and scene.ask.headers["x-tandem-path"] == "disagg"


async def outlast_lease(role: str, scene: Scene) -> Proof:
    """Partition a worker from the coordinator for longer than a lease.

    Proof: the worker drops everything when its lease expires, and the same process joins and serves after the partition
    ends. ``back_s`` is counted from then."""
    worker: ChaosWorker = getattr(scene, role)
    process, incarnation, held = worker.process, worker.incarnation, worker.holds
    proof = await black_hole(role, scene)
    await asyncio.sleep(FailureTimes().lease_s + 1.0)  # the length of the fault itself
    let_go = worker.holds == (0, 0)
    worker.control.heal()
    healed_at = clock()
    await scene.cluster.until_ready()
    scene.back_s = clock() - healed_at + await _of_use(scene, worker)
    same = process is worker.process and incarnation == worker.incarnation
    return lambda: proof() and any(held) and let_go and same


async def fail_hand_off(scene: Scene) -> Proof:
    """Black-hole the only link until one hand-off has failed, then heal it and send requests, which must be served."""
    proxy, known = scene.decode.data, len(_coordinators_log(scene))
    _struck(scene)
    proxy.black_hole = True

    def failed() -> bool:
        return "transfer_failed" in _coordinators_log(scene)[known:]

    await scene.cluster.until(failed, ARRIVES_S, "the hand-off fails")
    proxy.heal()
    scene.neighbours = [scene.cluster.ask(PROMPT, OUTPUT) for _ in range(3)]
    for ask in scene.neighbours:
        scene.send(ask)
    await scene.over()
    return lambda: all(ask.largest_gap(0) < SERVED_S for ask in scene.neighbours)


async def slow(which: str, knob: str, value: float, counter: str, scene: Scene) -> Proof:
    proxy = _line(scene, which)
    proof = _counted(proxy, counter)
    _struck(scene)
    setattr(proxy, knob, value)
    _let_go(scene)
    return proof


# -- messages ---------------------------------------------------------------------------------------------------------


async def grant_lost(scene: Scene) -> Proof:
    """Lose the first grant of every hand-off. Some are trials of a link, so the proof checks for the request's own."""
    dropped: set[str] = set()

    def first(parts: Parts) -> bool:
        if not is_a("grant")(parts):
            return False
        request = msgspec.msgpack.decode(parts[0][DIGEST_BYTES:])[1].hex()
        fresh = request not in dropped
        dropped.add(request)
        return fresh

    await tamper("drop", first, "down", 100, scene)
    scene.send(scene.ask)
    prefills = scene.cluster.by_role("prefill")
    return lambda: any(step[1] in dropped for worker in prefills for step in worker.steps())


async def tamper(
    action: Action, match: Callable[[Parts], bool], direction: Any, limit: int | None, scene: Scene
) -> Proof:
    rule = Rule(action, match, direction, limit=limit)
    for worker in scene.cluster.by_role("decode"):
        worker.data.rules.append(rule)
    _struck(scene)
    _let_go(scene)
    return lambda: rule.hits > 0


async def corrupt_every_frame(scene: Scene) -> Proof:
    """Corrupt every frame over every link, while all messages pass; the last resort is local prefill."""
    known = len(_coordinators_log(scene))
    proof = await tamper("corrupt", is_frame, "up", None, scene)
    await scene.over()
    failed = _coordinators_log(scene)[known:].count("transfer_failed")
    return lambda: proof() and failed == FAILED_PAIRS


def frame(action: Action) -> Fault:
    return partial(tamper, action, is_frame, "up", 1)


def lost(tag: str, direction: str, times: int = 1) -> Fault:
    return partial(tamper, "drop", is_a(tag), direction, times)
