"""The coordinator's record of one request, and the client interface that receives its tokens."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Protocol

from common.core.errors import RequestError
from common.core.ids import Incarnation, RequestId
from common.core.prompt_span import PromptSpan
from common.core.request import FinishReason, SamplingParams
from common.net.messages import Logprobs
from coordinator.requests.state import RequestState
from coordinator.requests.timeline import Timeline
from coordinator.routing.breakers import Pair
from coordinator.routing.paths import Path
from coordinator.routing.router import HORIZON_TOKENS, Chains, Demand, Placement, Promise

RECENT_INTERVALS = 16
"""Last intervals whose median is the request's present pace."""


class Client(Protocol):
    """Receives the tokens of one or more requests. Methods are called in the event loop and must not block."""

    @property
    def partly_sent(self) -> bool:
        """Whether any part of the answer has been sent; an error can then only cut the stream off."""

    def tokens(
        self,
        record: RequestRecord,
        choice: int,
        ids: list[int],
        logprobs: Sequence[Logprobs | None],
        finish: FinishReason,
    ) -> bool:
        """Take new tokens of a choice; return True if they complete a stop string, which ends the choice."""

    def prompt_logprobs(self, record: RequestRecord, span: PromptSpan) -> None:
        """Take log-probabilities of the prompt of ``record``. Spans come in order; the last comes before any token."""

    def done(self, record: RequestRecord) -> None:
        """Called once when all choices of ``record`` have ended; all of its tokens have been delivered."""

    def failed(self, record: RequestRecord, error: RequestError) -> None:
        """Called when ``record`` has ended with ``error``; no more tokens follow."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request from admission to its end. Times are seconds of ``time.monotonic`` (uvloop's own clock counts whole
    milliseconds). ``prompt`` holds little-endian uint32 token ids."""

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
    """The client set no output limit: ``sampling.max_tokens`` is what fitted on arrival, and a worker with less room
    may serve the request too."""
    progress: RequestState = field(init=False)
    order: int = 0
    queued: bool = False
    placement: Placement | None = None
    promise: Promise | None = None
    pair: Pair | None = None
    """The pair whose hand-off for this request is in progress and not yet reported to its circuit breaker."""
    timer: asyncio.TimerHandle | None = None
    cut: bool = False
    """The coordinator ended a choice (a stop string), which the workers do not know yet."""
    sent: dict[Incarnation, int] = field(default_factory=dict)
    """For each of its workers, the sequence number of the last control message about the request, comparable with
    ``Heartbeat.acted_on``."""
    not_before: float = 0.0
    """Earliest time of the next placement: the delay after a failure, or the wait for answers to a Ping."""
    asked: int = 0
    """Number of the last Ping that was sent to the other workers because a worker of this request had died; 0 if none
    has. A worker that dies without having answered it was already dead when the request was placed on it."""
    shortage: int = 0
    """``PingRounds.shortages`` when that Ping was sent, -1 after a request suspected of a crash has waited. If
    ``shortages`` has changed since, the answers may be outdated."""
    excluded_pairs: frozenset[Pair] = frozenset()
    excluded_workers: frozenset[Incarnation] = frozenset()
    held_back: bool = False
    """Output has arrived before all log-probabilities of the prompt, and was dropped; the workers are asked for it
    again."""
    missed_beats: dict[Incarnation, int] = field(default_factory=dict)
    """For each worker, how many heartbeats in a row did not list the request."""
    heard_at: float = 0.0
    """When its workers last sent tokens or accepted its hand-off."""
    pending_crash_verdict: Incarnation | None = None
    """The worker that this request may have crashed; the request is not placed again before the worker's death is
    confirmed or refuted."""
    awaiting_reconnect: bool = False
    """The request arrived while a role had no worker, but one may reconnect, or join a coordinator that has just
    started. The request waits only as long as that is possible."""
    placed_at: float | None = None
    first_token_at: float | None = None
    first_attempt: int | None = None
    """The attempt whose tokens began the answer."""
    finished_at: float | None = None
    last_token_at: list[float] = field(init=False)
    intervals: array[float] = field(default_factory=lambda: array("f"))
    """Seconds between tokens of a choice, in the order in which they were accepted; four bytes each."""
    asked_at: float = 0.0
    unplaceable_since: float | None = None
    """Since when none of the ready workers could hold the request, even if idle."""
    accepts_truncation: bool = False
    """The request has waited long enough for a larger worker and accepts an output cut to the room of a smaller one."""
    timings: dict[str, float] = field(default_factory=dict)
    path: Path = "disagg"
    timeline: Timeline = field(default_factory=Timeline)
    key_name: str = ""
    """Name of the API key that the client sent, for metrics."""

    def __post_init__(self) -> None:
        to_score = 0 if self.sampling.prompt_logprobs is None else self.prompt_length - 1
        self.progress = RequestState(self.n, to_score)
        self.last_token_at = [0.0] * self.n

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt) // 4

    @property
    def output_length(self) -> int:
        """Number of accepted tokens of all choices."""
        return sum(map(len, self.progress.output))

    @property
    def longest_output(self) -> int:
        """Number of accepted tokens of the longest choice."""
        return max(map(len, self.progress.output))

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens of each choice."""
        return self.sampling.max_tokens

    @property
    def interval_s(self) -> float:
        """Median of the last RECENT_INTERVALS inter-token intervals of a choice, in seconds; 0 before there are two
        tokens."""
        return median(self.intervals[-RECENT_INTERVALS:]) if self.intervals else 0.0

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields of log lines about this request."""
        return {"trace_id": trace_id} if (trace_id := self.timeline.trace_id) is not None else {}

    def end_wait(self) -> None:
        """Forget why the request waited for workers: it has been placed."""
        self.awaiting_reconnect, self.unplaceable_since, self.accepts_truncation = False, None, False

    def limit_s(self) -> float:
        """Return the seconds until the request reaches its ``max_tokens`` at the pace of its last tokens; inf if the
        client set no limit or there are no two tokens yet."""
        if self.open_ended or not self.intervals:
            return inf
        running = (
            tokens for tokens, finish in zip(self.progress.output, self.progress.finish, strict=True) if not finish
        )
        return self.interval_s * max((self.sampling.max_tokens - len(tokens) for tokens in running), default=0)

    def demand(self) -> Demand:
        """Return what the choices that have not ended demand of workers."""
        lengths = [
            len(tokens) for tokens, finish in zip(self.progress.output, self.progress.finish, strict=True) if not finish
        ]
        emitted, sampling = max(lengths, default=0), self.sampling
        diverged = self.n > 1 and self.progress.started
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
            enough=enough, urgent=self.progress.started or self.priority < 0,
        )  # fmt: skip
