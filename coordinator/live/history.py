"""Rates and latencies of the last minutes.

Pure. Owns two bounded rings: a sample of the counters every ROW_S, of which the rows of the last five minutes are made,
and the times to first token of the last requests. Nothing is done per token: the intervals between tokens are read from
the histogram of ``/metrics``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from coordinator.requests.spec import Json
from coordinator.requests.timeline import Event, Timeline

ROW_S = 5.0
ROWS = 60
"""Rows of ROW_S seconds: five minutes."""
WINDOW_S = 60.0
"""Seconds that percentiles cover."""
MAX_FIRST_TOKENS = 4096
"""Most requests whose time to first token is kept."""
FRESH_S = 5.0
"""Seconds that the rates of a snapshot cover, if the feed has been listened to for that long."""
QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))

Buckets = Sequence[tuple[float, float]]
"""The upper bound of each bucket of a histogram in seconds, ascending, and how many values do not exceed it."""


class Counters(NamedTuple):
    """Counts since the start at one time."""

    at_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    refusals: int


class _Sample(NamedTuple):
    """The counts at one time, with the ``intervals`` between tokens since the start."""

    counters: Counters
    intervals: Buckets


class _FirstToken(NamedTuple):
    at_s: float
    seconds: float


class History:
    """Counts requests as a listener of their timelines. ``output_tokens`` and ``intervals`` are called for the number
    of accepted tokens and the histogram of intervals."""

    def __init__(self, output_tokens: Callable[[], int], intervals: Callable[[], Buckets]) -> None:
        self._output_tokens, self._intervals = output_tokens, intervals
        self._requests = self._prompt_tokens = self._refusals = 0
        self._first_tokens: deque[_FirstToken] = deque(maxlen=MAX_FIRST_TOKENS)
        self._samples: deque[_Sample] = deque(maxlen=int(WINDOW_S / ROW_S) + 1)
        self._fresh: deque[Counters] = deque(maxlen=int(FRESH_S))
        self._latencies: Json = {"ttft_ms": None, "itl_ms": None}
        self._latencies_at_s = 0.0
        self.rows: deque[Json] = deque(maxlen=ROWS)
        """The last five minutes, the latest row last."""

    def saw(self, timeline: Timeline, event: Event) -> None:
        """Count a request that starts or has its first token."""
        if event == "start":
            self._requests += 1
        elif event == "first_token":
            self._prompt_tokens += timeline.facts().prompt_tokens
            first_at_s = timeline.attempts[-1].first_token_at
            if first_at_s is not None:
                self._first_tokens.append(_FirstToken(first_at_s, first_at_s - timeline.arrived_at))

    def refused(self) -> None:
        """Count a request that was refused because of overload. It may have a timeline too: one that waited."""
        self._refusals += 1

    def sample(self, now_s: float, now_unix_s: float, running: int, waiting: int) -> Json | None:
        """Add a row and return it; None if there was no sample before. Must be called every ROW_S seconds. ``running``,
        ``waiting``: requests on workers, and in the queue."""
        now = _Sample(self._counters(now_s), self._intervals())
        before = self._samples[-1] if self._samples else None
        self._samples.append(now)
        if before is None:
            return None
        row: Json = {
            "t": round(now_unix_s, 3),
            **_rates(before.counters, now.counters),
            "ttft_ms": self._first_token_ms(before.counters.at_s),
            "itl_ms": _interval_ms(before.intervals, now.intervals),
            "running": running,
            "waiting": waiting,
        }
        self.rows.append(row)
        return row

    def snapshot(self, now_s: float) -> Json:
        """Return ``rates`` of the last seconds, and the percentiles ``ttft_ms`` and ``itl_ms`` of the last minute."""
        now = self._counters(now_s)
        while self._fresh and now_s - self._fresh[0].at_s > 2 * FRESH_S:  # no listener was connected meanwhile
            self._fresh.popleft()
        since = self._fresh[0] if self._fresh else self._samples[-1].counters if self._samples else now
        self._fresh.append(now)
        return {"rates": _rates(since, now), **self._last_minute(now_s)}

    def _last_minute(self, now_s: float) -> Json:
        """Return the percentiles of the last minute. They are computed anew every ROW_S, and while one is missing."""
        if None in self._latencies.values() or now_s - self._latencies_at_s >= ROW_S:
            now = self._intervals()
            oldest = self._samples[0].intervals if self._samples else now
            first_token_ms = self._first_token_ms(now_s - WINDOW_S)
            self._latencies = {"ttft_ms": first_token_ms, "itl_ms": _interval_ms(oldest, now)}
            self._latencies_at_s = now_s
        return self._latencies

    def _counters(self, now_s: float) -> Counters:
        return Counters(now_s, self._requests, self._prompt_tokens, self._output_tokens(), self._refusals)

    def _first_token_ms(self, since_s: float) -> Json | None:
        """Return percentiles of the times to first token since a time, in milliseconds; None if there is none."""
        start = bisect_left(self._first_tokens, since_s, key=lambda each: each.at_s)
        ordered = sorted(self._first_tokens[place].seconds for place in range(start, len(self._first_tokens)))
        if not ordered:
            return None
        return {name: _ms(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for name, share in QUANTILES}


def _rates(before: Counters, now: Counters) -> Json:
    seconds = max(now.at_s - before.at_s, 1e-9)
    return {
        "requests_s": round((now.requests - before.requests) / seconds, 3),
        "refused_s": round((now.refusals - before.refusals) / seconds, 3),
        "prompt_tokens_s": round((now.prompt_tokens - before.prompt_tokens) / seconds, 3),
        "output_tokens_s": round((now.output_tokens - before.output_tokens) / seconds, 3),
    }


def _interval_ms(before: Buckets, now: Buckets) -> Json | None:
    """Return percentiles of the intervals between two times in milliseconds; None if there are none. Inside a bucket
    values are taken to be spread evenly, as Prometheus' ``histogram_quantile`` does."""
    counts = [(bound, count - earlier) for (bound, count), (_, earlier) in zip(now, before, strict=True)]
    total = counts[-1][1] if counts else 0
    return {name: _ms(_quantile(counts, share * total)) for name, share in QUANTILES} if total else None


def _quantile(counts: Buckets, rank: float) -> float:
    """Return the value of ``rank``, of those in cumulative ``counts``; the largest finite bound if it exceeds that."""
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = (bound, count) if bound != float("inf") else (low, count)
    return low


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
