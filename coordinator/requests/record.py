"""One request on its way through the coordinator, and who waits for its tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Protocol

from common.core.errors import RequestError
from common.core.ids import Incarnation, RequestId
from common.core.request import FinishReason, SamplingParams
from common.net.messages import Logprobs
from coordinator.requests.state import RequestState
from coordinator.routing.breakers import Pair
from coordinator.routing.paths import Path
from coordinator.routing.router import HORIZON_TOKENS, Chains, Demand, Placement, Promise

REMEMBERED_INTERVALS = 16


class Client(Protocol):
    """Who waits for the tokens of one or more requests. Called in the event loop; must not wait."""

    @property
    def told(self) -> bool:
        """Whether anything of the answer has been seen already: an error can then only break it off."""

    def tokens(
        self,
        record: RequestRecord,
        choice: int,
        ids: list[int],
        logprobs: Sequence[Logprobs | None],
        finish: FinishReason,
    ) -> bool:
        """New tokens of a choice; True if the choice ends with them for a reason of the client's (a stop string)."""

    def done(self, record: RequestRecord) -> None: ...

    def failed(self, record: RequestRecord, error: RequestError) -> None: ...


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request on its way. Times are ``time.monotonic`` (uvloop's own clock counts whole ms)."""

    id: RequestId
    prompt: bytes
    sampling: SamplingParams
    n: int
    cache_salt: str
    priority: int
    chains: Chains
    client: Client
    arrived_at: float
    tokenized_at: float
    deadline_at: float
    open_ended: bool = False
    """Its client has set no limit: ``sampling.max_tokens`` is what fitted when it came, and less is an answer."""
    life: RequestState = field(init=False)
    order: int = 0
    queued: bool = False
    placement: Placement | None = None
    promise: Promise | None = None
    pair: Pair | None = None
    """The pair whose hand-off this request waits for: its breaker has not been told how that ended."""
    timer: asyncio.TimerHandle | None = None
    cut: bool = False
    """A choice was ended from this side: the workers do not know."""
    sent: dict[Incarnation, int] = field(default_factory=dict)
    """The number of the last message about it to each of its workers, as their heartbeats count."""
    not_before: float = 0.0
    """Not to be placed earlier: after a failure something must change first."""
    asked: int = 0
    """The Ping to the other workers when one that had it died last, 0 if none did. One that dies without an answer to
    it was dead when it was given the request."""
    shortage: int = 0
    """The last time, until then, that the queue stood still for want of room."""
    excluded_pairs: frozenset[Pair] = frozenset()
    excluded_workers: frozenset[Incarnation] = frozenset()
    missed_beats: dict[Incarnation, int] = field(default_factory=dict)
    """How many heartbeats in a row of each worker did not list it."""
    heard_at: float = 0.0
    """When its workers last gave a sign that it goes on."""
    pending_crash_verdict: Incarnation | None = None
    """The worker that may have died of it: it is not tried again before that is known."""
    awaiting_reconnect: bool = False
    """It came when there were only workers that may have lost just their connection, or that may still find this
    coordinator, and waits until that is known."""
    placed_at: float | None = None
    first_token_at: float | None = None
    first_attempt: int | None = None
    """Whose tokens began the answer."""
    finished_at: float | None = None
    last_token_at: list[float] = field(init=False)
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_INTERVALS))
    asked_at: float = 0.0
    unplaceable_since: float | None = None
    """Since when only workers that have left could hold it."""
    accepts_truncation: bool = False
    """It has waited for them for long enough, and takes what room there is."""
    timings: dict[str, float] = field(default_factory=dict)
    path: Path = "disagg"

    def __post_init__(self) -> None:
        self.life = RequestState(self.n)
        self.last_token_at = [0.0] * self.n

    @property
    def prompt_length(self) -> int:
        return len(self.prompt) // 4

    @property
    def output_length(self) -> int:
        """Accepted tokens of all choices."""
        return sum(map(len, self.life.output))

    @property
    def interval_s(self) -> float:
        """Median of the last times between two tokens of a choice; 0 before there were two."""
        return median(self.intervals) if self.intervals else 0.0

    def limit_s(self) -> float:
        """Seconds until it reaches its ``max_tokens`` at the pace of its last tokens; inf if its client has set no
        limit, or there were no two tokens yet."""
        if self.open_ended or not self.intervals:
            return inf
        running = (tokens for tokens, finish in zip(self.life.output, self.life.finish, strict=True) if not finish)
        return self.interval_s * max((self.sampling.max_tokens - len(tokens) for tokens in running), default=0)

    def demand(self) -> Demand:
        """What its choices that have not ended ask of workers."""
        lengths = [len(tokens) for tokens, finish in zip(self.life.output, self.life.finish, strict=True) if not finish]
        emitted, sampling = max(lengths, default=0), self.sampling
        diverged = self.n > 1 and self.life.started
        tokens, output = self.prompt_length + emitted, sampling.max_tokens - emitted
        enough = None
        if self.open_ended:
            enough = (
                1
                if self.accepts_truncation
                else max(sampling.min_tokens - emitted, min(HORIZON_TOKENS, -(-output // 2)))
            )
        return Demand(
            tokens, output, len(lengths), self.chains, diverged, self.excluded_pairs, self.excluded_workers,
            enough=enough, urgent=self.life.started or self.priority < 0,
        )  # fmt: skip
