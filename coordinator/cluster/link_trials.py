"""Trial hand-offs, which measure the KV link of each pair of workers.

Owns the measurements (:class:`LinkStats`) and sends the Measure messages of the trials that they ask for. Knows no
request. A trial that fails is not repeated, because nothing waits for its result, except a measurement of all pairs
that a client asked for, which gives up after PATIENCE_S. It measures one pair at a time: trials side by side would slow
each other down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from common.core.ids import Incarnation, new_request_id
from common.net.messages import Measure, Measured
from coordinator.cluster.gateway import Gateway
from coordinator.cluster.link_stats import LinkStats, Trial
from coordinator.cluster.peers import introduce
from coordinator.cluster.registry import WorkerHandle

PATIENCE_S = 5.0
"""Longest time for one trial when all pairs are measured: a worker that is short of blocks sends no result."""


class _Pair(NamedTuple):
    prefill: Incarnation
    decode: Incarnation


class LinkTrials:
    """Starts the trials of workers that join and records their results in ``stats``."""

    def __init__(self, gateway: Gateway) -> None:
        self.stats = LinkStats()
        self._gateway = gateway
        self._rest: deque[_Pair] = deque()
        """Pairs that are still to be measured anew."""
        self._pair: _Pair | None = None
        """The one that is being measured anew, until ``_due`` at the latest."""
        self._due = 0.0
        self._waiting: list[Callable[[], None]] = []

    def begin(self, worker: WorkerHandle) -> None:
        """Start the first trial of each pair that ``worker``, which has just joined, forms with others."""
        for trial in self.stats.trials(worker, self._gateway.registry):
            self._send(trial)

    def measure_all(self, done: Callable[[], None]) -> None:
        """Measure every pair of ready workers anew, and call ``done`` at the end. If they are being measured already,
        ``done`` is called with the others."""
        self._waiting.append(done)
        if len(self._waiting) > 1:
            return
        ready = [worker for worker in self._gateway.registry if worker.ready]
        decodes = [worker.id for worker in ready if worker.role == "decode"]
        self._rest.extend(_Pair(each.id, decode) for each in ready if each.role == "prefill" for decode in decodes)
        self._next()

    def look(self, now: float) -> None:
        """Give up a trial of :meth:`measure_all` that takes too long. Call it from time to time."""
        if self._pair is not None and now >= self._due:
            self._next()

    def measured(self, worker: WorkerHandle, message: Measured) -> None:
        """Record the result of a trial hand-off and start the trial that follows it, if any."""
        decode = self._gateway.registry.get(message.decode)
        trial = None if decode is None else self.stats.measured(worker, decode, message)
        if trial is not None:
            self._send(trial)
        if self._pair == (worker.id, message.decode):
            if trial is None:
                self._next()
            else:
                self._due = self._gateway.clock() + PATIENCE_S

    def forget(self, worker: WorkerHandle) -> None:
        """Remove the measurements of a worker that is gone."""
        self.stats.forget(worker)
        if self._pair is not None and worker.id in self._pair:
            self._next()

    def _next(self) -> None:
        """Begin with the next pair to be measured anew; without one, report the end."""
        self._pair, registry = None, self._gateway.registry
        while self._rest:
            pair = self._rest.popleft()
            prefill, decode = registry.get(pair.prefill), registry.get(pair.decode)
            if prefill is None or decode is None or not (prefill.ready and decode.ready):
                continue
            if (trial := self.stats.again(prefill, decode)) is not None:
                self._pair, self._due = pair, self._gateway.clock() + PATIENCE_S
                self._send(trial)
                return
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done()

    def _send(self, trial: Trial) -> None:
        """Send a trial hand-off to its two ends, to decode first, because it must expect what prefill offers."""
        request = new_request_id()
        prefill, decode = introduce(trial.prefill, trial.decode)
        if self._gateway.send(trial.decode, Measure(request, 0, prefill, trial.tokens)):
            self._gateway.send(trial.prefill, Measure(request, 0, decode, trial.tokens))
