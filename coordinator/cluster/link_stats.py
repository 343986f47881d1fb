"""Measured bandwidth and latency of the KV link from each prefill worker to each decode worker.

Pure. When both ends of a pair are ready, they make three trial hand-offs of meaningless blocks: a warm-up, since the
first hand-off maps the pool and touches its pages; a large one for the bandwidth; one of LATENCY_TOKENS for the
latency. Nothing waits for the results, and a worker that is short of blocks sends none. Every pair is measured anew
when a client asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.core.ids import Incarnation, WorkerName
from common.kv.layout import CHAIN_STEP
from common.net.messages import Measured
from coordinator.cluster.registry import WorkerHandle

RATE_TOKENS = 1024
LATENCY_TOKENS = CHAIN_STEP
MAX_POOL_SHARE = 4
"""A trial takes at most one in MAX_POOL_SHARE blocks of either pool."""
MAX_PEERS = 4
"""Maximum number of peers that a joining worker is measured with: a large cluster is not measured pair by pair."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial hand-off of ``tokens`` tokens from ``prefill`` to ``decode``."""

    prefill: WorkerHandle
    decode: WorkerHandle
    tokens: int


@dataclass(slots=True)
class Link:
    """The measurements between one prefill worker and the decode worker named ``to``."""

    to: WorkerName
    transport: str
    gb_per_s: float | None = None
    latency_us: float | None = None

    @property
    def measured(self) -> bool:
        """Whether all trials have succeeded."""
        return self.latency_us is not None


class LinkStats:
    """The measured links, by prefill and decode incarnation."""

    def __init__(self) -> None:
        self._links: dict[Incarnation, dict[Incarnation, Link]] = {}
        self._before: dict[tuple[Incarnation, Incarnation], Link] = {}
        """The previous measurement of each pair that is being measured anew."""

    def trials(self, joined: WorkerHandle, workers: Iterable[WorkerHandle]) -> list[Trial]:
        """Return the first trials of the pairs of ``joined``, which is now ready, with the other ready workers."""
        others = [worker for worker in workers if worker.ready and worker is not joined]
        if joined.role == "prefill":
            pairs = [(joined, other) for other in others if other.role == "decode"]
        elif joined.role == "decode":
            pairs = [(other, joined) for other in others if other.role == "prefill"]
        else:
            pairs = []
        return [Trial(*pair, tokens) for pair in pairs[:MAX_PEERS] if (tokens := _rate_tokens(*pair))]

    def again(self, prefill: WorkerHandle, decode: WorkerHandle) -> Trial | None:
        """Return the first trial of a new measurement of a pair; None if a pool is too small. What was measured before
        is kept until that is complete."""
        if not (tokens := _rate_tokens(prefill, decode)):
            return None
        links, pair = self._links.setdefault(prefill.id, {}), (prefill.id, decode.id)
        known = links.pop(decode.id, None)
        if known is not None and known.measured:
            self._before[pair] = known
        if (before := self._before.get(pair)) is not None:  # its pages are mapped: no warm-up
            links[decode.id] = Link(decode.hello.name, before.transport)
        return Trial(prefill, decode, tokens)

    def measured(self, prefill: WorkerHandle, decode: WorkerHandle, message: Measured) -> Trial | None:
        """Record a result and return the trial that follows it, if any."""
        links = self._links.setdefault(prefill.id, {})
        link = links.get(decode.id)
        if link is None:
            links[decode.id] = Link(decode.hello.name, message.link)
            return Trial(prefill, decode, _rate_tokens(prefill, decode))
        if link.gb_per_s is None:
            link.transport, link.gb_per_s = message.link, message.bytes / max(message.seconds, 1e-9) / 1e9
            return Trial(prefill, decode, LATENCY_TOKENS)
        if link.latency_us is None:
            link.latency_us = message.seconds * 1e6
            self._before.pop((prefill.id, decode.id), None)
        return None

    def forget(self, worker: WorkerHandle) -> None:
        """Remove the links from and to a worker that is gone."""
        self._links.pop(worker.id, None)
        for links in self._links.values():
            links.pop(worker.id, None)
        self._before = {pair: link for pair, link in self._before.items() if worker.id not in pair}

    def of(self, prefill: WorkerHandle) -> list[Link]:
        """Return the fully measured links of one prefill worker."""
        before = {decode: link for (source, decode), link in self._before.items() if source == prefill.id}
        links = before | {decode: link for decode, link in self._links.get(prefill.id, {}).items() if link.measured}
        return list(links.values())


def _rate_tokens(prefill: WorkerHandle, decode: WorkerHandle) -> int:
    """Return the number of tokens of a bandwidth trial, a multiple of CHAIN_STEP; 0 if a pool is too small."""
    smallest = min(worker.hello.kv_blocks * worker.hello.block_size for worker in (prefill, decode))
    return min(RATE_TOKENS, smallest // MAX_POOL_SHARE // CHAIN_STEP * CHAIN_STEP)
