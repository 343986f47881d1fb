"""Computes, from the workers' events (``tests/chaos/worker.py``), how long they held anything without a use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tests.chaos.cluster import ChaosWorker

Attempt = tuple[str, int]
"""A request id in hex, and the number of its attempt."""


class Holding(NamedTuple):
    """The period in which a worker held blocks or a slot for ``attempt``, in monotonic seconds."""

    attempt: Attempt
    since: float
    until: float


def holdings(worker: ChaosWorker, now: float) -> Iterator[Holding]:
    """Yield all holdings of ``worker``. One that has not ended is taken to end with the process, or ``now``."""
    held: dict[Attempt, float] = {}
    for event in worker.events:
        if event["event"] == "held":
            by = {(request, attempt) for request, attempt in event["by"]}
            for attempt in held.keys() - by:
                yield Holding(attempt, held.pop(attempt), event["at"])
            held |= dict.fromkeys(by - held.keys(), event["at"])
    for attempt, since in held.items():
        yield Holding(attempt, since, min(worker.ended_at, now))


def orphaned_s(workers: Iterable[ChaosWorker], struck_at: float, answered: Mapping[int, float], now: float) -> float:
    """Return the longest time, in seconds, for which a running worker held anything useless after the fault.

    Only the last attempt of an answered request is useful: on a prefill worker until decode computes with it, on a
    decode worker until the end of the answer. ``answered`` maps the requests' seeds to these ends. Everything else is
    useless from the fault (``struck_at``) on: attempts that were followed by another, those whose client has gone, and
    trials of links. Holdings of a stopped or hung worker count from when it continues.
    """
    workers = list(workers)
    held = [(worker, holding) for worker in workers for holding in holdings(worker, now)]
    taken = [event for worker in workers for event in worker.events if event["event"] == "taken"]
    ends = {event["request"]: answered[event["seed"]] for event in taken if event["seed"] in answered}
    last = dict(sorted(holding.attempt for _, holding in held))  # sorted by attempt: the last one of each request wins
    decoded: dict[Attempt, float] = {}
    for worker in workers:
        if worker.role == "decode":
            for at, request, number, *_ in worker.steps():
                decoded.setdefault((request, number), at)

    def useless_since(worker: ChaosWorker, attempt: Attempt) -> float:
        request, number = attempt
        if number < last[request] or request not in ends:
            return struck_at
        return decoded.get(attempt, ends[request]) if worker.role == "prefill" else ends[request]

    times = [
        until - max(since, struck_at, worker.awake_since, useless_since(worker, attempt))
        for worker, (attempt, since, until) in held
    ]
    return max([0.0, *times])
