"""What happened to each request, and when.

Pure. A :class:`Timeline` collects the times of one request's events as they happen: a few numbers per attempt, and
nothing per token. :mod:`coordinator.requests.waterfall` makes the spans that are shown of them. :class:`Timelines`
keeps the requests that have not ended and the last that have, and passes changes to its listeners.

Times are seconds of ``time.monotonic``. Times inside a worker are known only as durations, and are placed relative to
the arrival of what the worker sent, so that clocks of different machines are never compared.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from common.core.errors import RequestError
from common.core.ids import RequestId
from common.core.request import FinishReason
from common.net.messages import PromptChunk
from coordinator.requests.state import State
from coordinator.requests.trace_context import TraceContext
from coordinator.routing.router import Placement

log = logging.getLogger("tandem.timeline")

MAX_ENDED = 512
"""Ended requests that are remembered."""
MAX_INTERVALS = 4096
"""Intervals between tokens that are kept of an ended request."""
MAX_ATTEMPTS, MAX_WAITS, MAX_STALLS = 16, 16, 64
"""Most attempts, waits of one attempt, and stalls of one request that are remembered; the middle attempts, and later
waits and stalls, are left out."""
STALL_S, STALL_INTERVALS, STALL_AFTER = 0.25, 8, 3
"""A stall is a gap between two tokens of a choice of more than STALL_S and STALL_INTERVALS of the median of the last
intervals, once there are STALL_AFTER intervals."""
BEHIND_OTHERS = "requests ahead of it wait"
_NO_ID = RequestId(b"")
_NUMBERS = re.compile(r"\d+")
_KEPT = frozenset(
    ("queue_ms", "prefill_ms", "cached_tokens", "transfer_ms", "transfer_exposed_ms", "kv_bytes", "decode_wait_ms")
)
"""The values of workers' Timing messages that are kept."""

Event = Literal["start", "placed", "first_token", "retried", "resumed", "end", "late"]
"""What changed. ``first_token``: the first of the answer; ``resumed``: the first of a later attempt to continue it.
``late``: a worker's figures arrived after the end of the request."""


class Progress(Protocol):
    """The state of a request."""

    @property
    def state(self) -> State:
        """The state of its state machine."""

    @property
    def finish(self) -> Sequence[FinishReason]:
        """The finish reason of each choice."""


class TimedRequest(Protocol):
    """The fields of a request's record that its timeline shows; :class:`coordinator.requests.record.RequestRecord` has
    them."""

    @property
    def id(self) -> RequestId:
        """The id under which workers know it."""

    @property
    def n(self) -> int:
        """Number of choices."""

    @property
    def progress(self) -> Progress:
        """Its state."""

    @property
    def arrived_at(self) -> float:
        """When the HTTP request arrived."""

    @property
    def tokenized_at(self) -> float:
        """When the tokens of its prompt were known."""

    @property
    def first_token_at(self) -> float | None:
        """When its first output token was accepted; None before."""

    @property
    def last_token_at(self) -> Sequence[float]:
        """When the last token of each choice was accepted; 0 before."""

    @property
    def intervals(self) -> Sequence[float]:
        """The intervals between two tokens of a choice, in seconds."""

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""

    @property
    def output_length(self) -> int:
        """Number of accepted output tokens of all choices."""

    @property
    def path(self) -> str:
        """A :data:`coordinator.routing.paths.Path`."""


@dataclass(slots=True)
class Wait:
    """A reason to stay in the queue, since ``at``."""

    at: float
    why: str


@dataclass(slots=True)
class Attempt:
    """An attempt to serve a request, from its place in the queue to its loss or the end of the request.

    ``queued_at``: when the span of the queue begins, for the first attempt once the prompt is tokenized;
    ``entered_at``: when the request is in the queue. ``prefill`` and ``decode`` are names of workers; without a
    hand-off both are the same. ``landed_at``: when decode had the KV. ``tokens_first``, ``tokens_end``: output tokens
    of the request just after this attempt's first tokens, and at its loss. ``migrates``: whether output had been
    accepted when it was lost; ``last_token_at`` is then the time of the last token."""

    number: int
    queued_at: float
    entered_at: float
    waits: list[Wait] = field(default_factory=list)
    placed_at: float | None = None
    path: str = ""
    prefill: str = ""
    decode: str = ""
    why: str = ""
    first_token_at: float | None = None
    tokens_first: int = 0
    landed_at: float | None = None
    timings: dict[str, float] = field(default_factory=dict)
    link: str = ""
    chunks: Sequence[PromptChunk] = ()
    lost_at: float | None = None
    lost_from: str = ""
    lost_why: str = ""
    migrates: bool = False
    last_token_at: float = 0.0
    tokens_end: int = 0


@dataclass(slots=True)
class Facts:
    """What is known of a request as a whole. ``finish``: None for a choice that runs. ``intervals``: those between
    tokens of a choice in seconds; ``last_token_at`` is 0 before the first token."""

    state: State
    path: str
    prompt_tokens: int
    output_tokens: int
    choices: int
    finish: tuple[str | None, ...]
    first_token_at: float | None
    last_token_at: float
    intervals: Sequence[float]
    finished_at: float | None = None


@dataclass(slots=True, eq=False)
class Timeline:
    """The events of one request. ``id`` is the id of its answer (``chatcmpl-…``), ``request_id`` that of the HTTP
    request, ``arrived_unix_s`` the wall-clock time of its arrival."""

    id: str = ""
    request_id: str = ""
    trace: TraceContext | None = None
    """Its place in a trace; None if it did not come by HTTP."""
    asked: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of a request whose trace is exported."""
    endpoint: str = ""
    stream: bool = False
    grammar_s: float = 0.0
    """Time for compiling the grammar of the output, a part of the time until the prompt was tokenized."""
    arrived_unix_s: float = 0.0
    arrived_at: float = 0.0
    tokenized_at: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each stall."""
    retries: int = 0
    migrations: int = 0
    error: str | None = None
    error_code: str = ""
    error_status: int = 0
    """The HTTP status that belongs to the error."""
    version: int = 0
    """Grows with every change that listeners see."""
    internal_id: RequestId = _NO_ID
    _record: TimedRequest | None = None
    """The request, while it has not ended."""
    _facts: Facts | None = None
    """What is kept of an ended request."""
    _notify: Callable[[Timeline, Event], None] | None = None

    def open(self, record: TimedRequest, now: float, notify: Callable[[Timeline, Event], None] | None = None) -> None:
        """Begin with ``record``, which is queued at ``now``. ``notify`` is called after each event that listeners
        see."""
        self._record, self._notify, self.internal_id = record, notify, record.id
        self.arrived_at, self.tokenized_at = record.arrived_at, record.tokenized_at
        self.attempts = [Attempt(0, record.tokenized_at, now)]
        self._changed("start")

    @property
    def trace_id(self) -> str | None:
        """The id of the trace that the request belongs to, 32 hexadecimal digits."""
        return self.trace.trace_id if self.trace is not None else None

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        return self._facts is not None

    @property
    def placed(self) -> bool:
        """Whether the request was placed on workers at least once."""
        return any(attempt.placed_at is not None for attempt in self.attempts)

    def facts(self) -> Facts:
        """Return what is known of the request now."""
        if self._facts is not None:
            return self._facts
        record = self._record
        if record is None:
            return Facts(State.QUEUED, "", 0, 0, 0, (), None, 0.0, ())
        return Facts(
            record.progress.state,
            record.path,
            record.prompt_length,
            record.output_length,
            record.n,
            tuple(each.name.lower() if each else None for each in record.progress.finish),
            record.first_token_at,
            max(record.last_token_at),
            record.intervals,
        )

    # -- events -------------------------------------------------------------------------------------------------------

    def fail(self, error: RequestError) -> None:
        """Note the error with which the request ends."""
        self.error, self.error_code, self.error_status = error.message, error.code or error.type, error.status

    def refused(self, now: float, error: RequestError) -> None:
        """Note that the request was refused before it was queued. Listeners do not see it."""
        self.fail(error)
        self._facts = Facts(State.FAILED, "", 0, 0, 0, (), None, 0.0, (), now)

    def wait(self, now: float, why: str) -> None:
        """Note that the request stays in the queue because of ``why``. The same reason with other numbers in it is the
        same wait."""
        waits = self.attempts[-1].waits if self.attempts else []
        if waits and waits[-1].why == why:
            return
        if waits and _NUMBERS.sub("", waits[-1].why) == _NUMBERS.sub("", why):
            waits[-1].why = why
        elif len(waits) < MAX_WAITS:
            waits.append(Wait(now, why))

    def place(self, now: float, placement: Placement) -> None:
        """Note where the request is placed."""
        if not self.attempts:
            return
        attempt = self.attempts[-1]
        attempt.placed_at, attempt.path, attempt.why = now, placement.path, placement.why
        attempt.decode = placement.decode.hello.name
        attempt.prefill = placement.prefill.hello.name if placement.prefill is not None else attempt.decode
        self._changed("placed")

    def first_tokens(self, now: float, output_length: int) -> None:
        """Note the first tokens of the current attempt, with which the request has ``output_length`` in all."""
        if self.attempts:
            attempt = self.attempts[-1]
            resumed = any(each.first_token_at is not None for each in self.attempts)
            attempt.first_token_at, attempt.tokens_first = now, output_length
            self._changed("resumed" if resumed else "first_token")

    def land(self, now: float) -> None:
        """Note that decode has the KV of the current attempt: it has sent its first figures, or tokens, at ``now``."""
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.landed_at = now - max(0.0, attempt.timings.get("decode_wait_ms", 0.0)) / 1000

    def report(
        self, number: int, values: Mapping[str, float], link: str = "", chunks: Sequence[PromptChunk] = ()
    ) -> None:
        """Keep what a worker measured in attempt ``number``."""
        attempt = next((each for each in reversed(self.attempts) if each.number == number), None)
        if attempt is None:
            return
        for name, value in values.items():
            if name in _KEPT:
                attempt.timings[name] = value
        attempt.link, attempt.chunks = link or attempt.link, chunks or attempt.chunks
        if self.over:
            self._changed("late")

    def gap(self, start: float, end: float, usual_s: float, intervals: int) -> None:
        """Note a gap of more than STALL_S between two tokens of a choice. It is a stall if it is long compared with
        ``usual_s``, the median of the ``intervals`` last ones, and neither a hand-off nor a new attempt explains it."""
        if intervals < STALL_AFTER or end - start <= STALL_INTERVALS * usual_s or not self.attempts:
            return
        attempt = self.attempts[-1]
        begins = attempt.landed_at if attempt.landed_at is not None else attempt.first_token_at
        if begins is None or start < begins:
            return
        if self.stalls and start < self.stalls[-1][1]:  # the same gap in another choice
            self.stalls[-1] = min(start, self.stalls[-1][0]), max(end, self.stalls[-1][1])
        elif len(self.stalls) < MAX_STALLS:
            self.stalls.append((start, end))

    def lose(self, now: float, worker: str, why: str, *, migrates: bool) -> None:
        """Note that the current attempt is lost with ``worker`` because of ``why``, and that the request is queued
        again. ``migrates``: it has output already."""
        if not self.attempts or self._record is None:
            return
        attempt = self.attempts[-1]
        attempt.lost_at, attempt.lost_from, attempt.lost_why = now, worker, why
        attempt.tokens_end, attempt.migrates = self._record.output_length, migrates
        attempt.last_token_at = max(self._record.last_token_at)
        if migrates:
            self.migrations += 1
        else:
            self.retries += 1
        if len(self.attempts) >= MAX_ATTEMPTS:
            del self.attempts[1]
        self.attempts.append(Attempt(attempt.number + 1, now, now))
        self._changed("retried")

    def end(self, now: float) -> None:
        """Note the end of the request, whose record is in its last state, and let go of the record."""
        if self._record is not None:
            facts = self.facts()
            facts.finished_at, facts.intervals = now, _kept(facts.intervals)
            self._facts, self._record = facts, None
            self._changed("end")

    def _changed(self, event: Event) -> None:
        self.version += 1
        if self._notify is not None:
            self._notify(self, event)


class Timelines:
    """The timelines of all requests that have not ended, and of the last ``most`` that have. ``listeners`` are called
    with each change, and must not block."""

    def __init__(self, most: int = MAX_ENDED) -> None:
        self.listeners: list[Callable[[Timeline, Event], None]] = []
        self._most = most
        self._running: dict[RequestId, Timeline] = {}
        self._ended: dict[RequestId, Timeline] = {}

    def open(self, timeline: Timeline, record: TimedRequest, now: float) -> None:
        """Begin the timeline of ``record``, which is queued at ``now``."""
        self._running[record.id] = timeline
        timeline.open(record, now, self._notify)

    def end(self, timeline: Timeline, now: float) -> None:
        """Note the end of a request, and forget the one that ended first if there are too many."""
        if self._running.pop(timeline.internal_id, None) is not None:
            self._ended[timeline.internal_id] = timeline
            if len(self._ended) > self._most:
                del self._ended[next(iter(self._ended))]
        timeline.end(now)

    def get(self, id: RequestId) -> Timeline | None:
        """Return the timeline of the request that workers know by ``id``."""
        return self._running.get(id) or self._ended.get(id)

    def find(self, name: str) -> Timeline | None:
        """Return a timeline by the id of its answer, the id of its HTTP request, or its internal id in hexadecimal; of
        several, the latest. None if there is none."""
        found = [each for each in self._all() if name in (each.id, each.request_id) or name == each.internal_id.hex()]
        return max(found, key=lambda each: (each.arrived_at, -_place(each)), default=None)

    def recent(self, limit: int) -> list[Timeline]:
        """Return the last ``limit`` requests that arrived, the latest first."""
        return heapq.nlargest(limit, self._all(), key=lambda each: each.arrived_at)

    def _all(self) -> itertools.chain[Timeline]:
        return itertools.chain(self._running.values(), self._ended.values())

    def _notify(self, timeline: Timeline, event: Event) -> None:
        for listener in self.listeners:
            try:
                listener(timeline, event)
            except Exception:  # what only watches must not end what it watches
                log.exception("a listener of requests failed")


def _kept(intervals: Sequence[float]) -> Sequence[float]:
    """Return what is kept of the intervals between the tokens of an ended request: all, or so many of them in order of
    size that percentiles and the maximum stay the same."""
    if len(intervals) <= MAX_INTERVALS:
        return intervals
    ordered = sorted(intervals)
    last = len(ordered) - 1
    return array("f", (ordered[last * place // (MAX_INTERVALS - 1)] for place in range(MAX_INTERVALS)))


def _place(timeline: Timeline) -> int:
    """Return the place of a timeline among those of one HTTP request, by the number at the end of its id."""
    _, dot, number = timeline.id.rpartition(".")
    return int(number) if dot and number.isdigit() else 0
