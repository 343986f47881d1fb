"""How long workers kept something for nobody, by what they have told (``tests/chaos/worker.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tests.chaos.house import Worker

Attempt = tuple[str, int]
"""The request, in hex, and the number of the attempt to serve it."""


class Holding(NamedTuple):
    """Blocks, or a place among the requests, that a worker had for ``attempt``. Times are monotonic seconds."""

    attempt: Attempt
    since: float
    until: float


def holdings(worker: Worker, now: float) -> Iterator[Holding]:
    """Whatever ``worker`` held. What it still holds ends with its process, or ``now``."""
    held: dict[Attempt, float] = {}
    for event in worker.events:
        if event["event"] == "held":
            by = {(request, attempt) for request, attempt in event["by"]}
            for attempt in held.keys() - by:
                yield Holding(attempt, held.pop(attempt), event["at"])
            held |= dict.fromkeys(by - held.keys(), event["at"])
    for attempt, since in held.items():
        yield Holding(attempt, since, min(worker.ended_at, now))


def for_nobody(workers: Iterable[Worker], struck_at: float, answered: Mapping[int, float], now: float) -> float:
    """The longest time, in seconds, that a worker which ran kept something after the fault for which nobody had a use.

    Only the last attempt of a request that was answered is of use: on a prefill worker until decode computes with it,
    on a decode worker until the end of the answer. ``answered`` has these ends by the requests' seeds. All others were
    in vain, and count from the fault (``struck_at``): those that another attempt followed, those whose client has gone,
    and trials of links. What a stopped or hanging worker holds counts from when it goes on.
    """
    workers = list(workers)
    held = [(worker, holding) for worker in workers for holding in holdings(worker, now)]
    taken = [event for worker in workers for event in worker.events if event["event"] == "taken"]
    ends = {event["request"]: answered[event["seed"]] for event in taken if event["seed"] in answered}
    last = dict(sorted(holding.attempt for _, holding in held))  # of each request, which is then written last
    decoded: dict[Attempt, float] = {}
    for worker in workers:
        if worker.role == "decode":
            for at, request, number, *_ in worker.steps():
                decoded.setdefault((request, number), at)

    def useless_since(worker: Worker, attempt: Attempt) -> float:
        request, number = attempt
        if number < last[request] or request not in ends:
            return struck_at
        return decoded.get(attempt, ends[request]) if worker.role == "prefill" else ends[request]

    times = [
        until - max(since, struck_at, worker.awake_since, useless_since(worker, attempt))
        for worker, (attempt, since, until) in held
    ]
    return max([0.0, *times])
