"""What a worker reports regularly: its state and its counters, with heartbeats, and the prefixes that it has cached."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from common.net.messages import MAX_KEYS, STEP_SIZES, STEPS_OF, Cached
from common.worker.membership import Snapshot

if TYPE_CHECKING:
    from common.worker.loop import Worker

USAGE_S = 1.0
"""Shortest interval between two readings of what the process uses."""


class HandoffCounts(NamedTuple):
    """Counts of a role's hand-offs. ``reserved``: those that wait for blocks or KV here, now. ``bad_messages``: invalid
    messages and frames that were dropped. ``stale_frames``: frames that arrived after the end of their hand-off.
    ``cut_off_peers``: peers that are ignored for good, because they sent invalid messages."""

    reserved: int
    bad_messages: int
    stale_frames: int
    cut_off_peers: int


class WorkerReport:
    """The counters of ``worker``, and the snapshot that its heartbeats report."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.counters: dict[str, float] = {}
        self.usage: Callable[[], Mapping[str, float]] | None = None
        """Returns what the process uses, by the names of counters; None to report nothing of it."""
        self._usage_read_at = -inf

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter that heartbeats report."""
        self.counters[name] = self.counters.get(name, 0) + by

    def stepped(self, tokens: int, seconds: float) -> None:
        """Count a step of ``tokens`` tokens that took ``seconds``."""
        self.count("steps")
        self.count("step_seconds", seconds)
        self.count("step_tokens", tokens)
        self.count(STEPS_OF[bisect_left(STEP_SIZES, tokens)])

    def publish(self) -> None:
        """Replace the snapshot that heartbeats report, and announce the changes of the prefix cache since the last
        call."""
        worker, planner, cache = self._worker, self._worker.planner, self._worker.cache
        counts, handoffs = cache.pool.counts, worker.handoff_counts()
        self._update_counters(handoffs)
        shot = Snapshot(
            live=b"".join({transfer.request: None for transfer in worker.holdings()}),
            acted_on=worker.membership.acted_on,
            free=counts.free,
            cached=counts.cached,
            held=counts.held,
            running=planner.running,
            waiting=planner.waiting + handoffs.reserved,
            waiting_tokens=planner.waiting_tokens,
            draining=worker.draining_until is not None,
            counters=dict(self.counters),
            longest_step_s=worker.step_times.longest,
            resting=b"".join(planner.resting()),
        )
        worker.membership.publish(shot)
        added, removed = cache.prefix.take_changes()
        for first in range(0, max(len(added), len(removed)), MAX_KEYS):
            part = slice(first, first + MAX_KEYS)
            worker.membership.send(Cached(b"".join(added[part]), b"".join(removed[part])))

    def _update_counters(self, handoffs: HandoffCounts) -> None:
        worker, planner = self._worker, self._worker.planner
        self.counters["prefix_cache_queries"] = planner.queried_tokens
        self.counters["prefix_cache_hits"] = planner.hit_tokens
        self.counters["num_preemptions"] = planner.preemptions
        self.counters["bad_messages"] = worker.membership.bad_messages + handoffs.bad_messages
        self.counters["stale_frames"] = handoffs.stale_frames
        self.counters["cut_off_peers"] = handoffs.cut_off_peers
        self.counters["leaked_blocks"] = worker.cache.strays()
        if worker.steps.cores is not None:
            self.counters["borrowed_core_seconds"] = worker.steps.cores.borrowed_s()
        if self.usage is not None and worker.clock() - self._usage_read_at >= USAGE_S:
            self._usage_read_at = worker.clock()
            self.counters.update(self.usage())
