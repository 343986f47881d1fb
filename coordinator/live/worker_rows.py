"""Workers and their links as JSON, for ``GET /admin/workers`` and for the feed."""

from __future__ import annotations

from collections.abc import Iterator

from common.core.gpu import GpuState
from coordinator.cluster.absent_workers import Absence
from coordinator.cluster.link_stats import LinkStats
from coordinator.cluster.registry import Registry, WorkerHandle
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.spec import Json
from coordinator.routing.breakers import Breakers, BreakerState, Pair

SHOWN_DIGITS = 8
"""Hexadecimal digits of a worker's incarnation that are shown, enough to notice a restart. The full value is close to
the worker's identity on the coordinator's socket and is not published."""


def worker_rows(dispatcher: Dispatcher) -> Json:
    """Return ``workers``, those that are registered, and ``absent``, those that should be."""
    registry, now_s = dispatcher.registry, dispatcher.gateway.clock()
    breakers = dispatcher.breakers
    avoided = {} if breakers.calm else {each.id: _avoided(each, breakers, registry) for each in registry}
    return {
        "workers": [_worker(each, dispatcher.link_stats, avoided.get(each.id, []), now_s) for each in registry],
        "absent": [_absent(name, each, now_s) for name, each in registry.absent],
    }


def link_rows(dispatcher: Dispatcher) -> list[Json]:
    """Return the measured links: the rate of a large trial hand-off in megabytes per second, and the milliseconds of a
    small one."""
    return list(_links(dispatcher))


def _links(dispatcher: Dispatcher) -> Iterator[Json]:
    for worker in dispatcher.registry:
        for link in dispatcher.link_stats.of(worker) if worker.role == "prefill" else ():
            yield {
                "from": worker.hello.name,
                "to": link.to,
                "transport": link.transport,
                "mb_s": None if link.gb_per_s is None else round(link.gb_per_s * 1000, 3),
                "ms": None if link.latency_us is None else round(link.latency_us / 1000, 3),
            }


def _avoided(prefill: WorkerHandle, breakers: Breakers, registry: Registry) -> list[str]:
    return [
        each.hello.name for each in registry if breakers.state(Pair(prefill.id, each.id)) is not BreakerState.CLOSED
    ]


def _worker(worker: WorkerHandle, links: LinkStats, avoids: list[str], now_s: float) -> Json:
    """Return one worker as JSON.

    ``links``: measured links, of a worker that sends KV. ``transports``: the supported ones, best first. ``avoids``:
    names of the decode workers to which its circuit breaker is not closed. ``incarnation``: its first digits, which
    change when the worker restarts. ``turn_ms``: how long the current iteration of the worker's loop has taken so far,
    None while it waits for messages. ``heard_ms``: time since the worker's last heartbeat. ``clock_ms``: how far its
    clock is ahead of the coordinator's, None before its first heartbeat."""
    hello, beat = worker.hello, worker.beat
    free, cached, held = worker.blocks
    return {
        "id": hello.name,
        "role": hello.role,
        "state": worker.state.value,
        "pid": hello.pid,
        "host": hello.host,
        "model": hello.model,
        "kv_blocks": {"total": hello.kv_blocks, "free": free, "cached": cached, "held": held},
        "block_size": hello.block_size,
        "running": beat.running if beat else 0,
        "waiting": beat.waiting if beat else 0,
        "waiting_tokens": beat.waiting_tokens if beat else 0,
        "turn_ms": beat.turn_ms if beat and beat.turn_ms >= 0 else None,
        "heard_ms": max(0, int((now_s - worker.heard_at) * 1000)),
        "clock_ms": worker.clock.ms,
        "incarnation": hello.incarnation[:SHOWN_DIGITS],
        "links": links.of(worker),
        "transports": hello.links,
        "avoids": avoids,
        "device": hello.device,
        "dtype": hello.dtype,
        "gpus": [_gpu(each) for each in worker.gpus],
        "counters": dict(beat.counters) if beat else {},
    }


def _gpu(state: GpuState) -> Json:
    """Return one GPU as JSON; values that its card does not have are null."""
    shown: Json = {name: getattr(state, name) for name in state.__struct_fields__}
    return shown | {"throttled_by": state.throttled_by, "xids": {str(xid): count for xid, count in state.xids.items()}}


def _absent(name: str, absence: Absence, now_s: float) -> Json:
    """Return an absent worker as JSON. ``restart_in_s`` is null if it is unknown whether it is started again."""
    restart_at_s = absence.restart_at_s
    return {
        "id": name,
        "why": absence.why,
        "for_s": round(now_s - absence.since_s, 1),
        "restart_in_s": None if restart_at_s is None else round(max(0.0, restart_at_s - now_s), 1),
    }
