"""Admission control: bounds on queued requests and prompt tokens, retry times for refused clients, the retry budget.

Pure. Owns the counts of queued requests and tokens, a smoothed rate at which queued tokens are placed, and the list of
refused clients that are expected to retry. Refused clients are scheduled in order: the first gets the time at which the
first place frees, the second the time of the second place, and so on. Places are kept for them, so that two retries are
enough for each. A request that would miss its deadline in the queue is refused on arrival, because an overloaded server
must not spend its time on answers whose clients have given up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from common.core.errors import RequestError
from common.core.ids import RequestId
from coordinator.requests.errors import RETRY_JITTER, overloaded
from coordinator.requests.residence import Residence, Running

MIN_RETRY_S = 0.05
MAX_RETRY_S = 60.0 / (1 + RETRY_JITTER)
"""The openai client obeys a Retry-After of up to one minute (since 3.0: two) and otherwise falls back to its own
backoff of half a second, so the retry time including its jitter must stay below one minute."""
RETRY_SHARE, MIN_RETRIES = 0.2, 10
"""At most this share of the requests in flight, but at least MIN_RETRIES of them, may be on a new attempt that has not
produced a token yet."""
RETRY_GRACE_S = 2.0
"""A refused client is expected until this long after the latest moment that its retry time and the jitter allow."""
MAX_EXPECTED = 2048
"""Maximum length of the list of refused clients. A further client gets a retry time after all of them, but no place is
kept for it."""
STRETCH_UP, STRETCH_DOWN, MAX_STRETCH = 2.0, 0.95, 8.0
"""Retry times are multiplied by a factor from 1 to MAX_STRETCH. Each retry that finds no place multiplies the factor by
STRETCH_UP and each retry that finds one by STRETCH_DOWN. It settles where one retry in 14 finds no place, so that about
one client in 200 finds none twice in a row."""
FORECAST_S = 0.1
"""How long a forecast is reused, so that a flood of refusals does not iterate over the running requests for each
one."""
_SMOOTHING = 0.2
_SPREADS = 2.0
"""A service time is bounded by its mean plus this many mean deviations, in the manner of TCP's retransmission timer
(RFC 6298, which uses four)."""
_ENOUGH = 8
_RETURN_SMOOTHING = 0.1


@dataclass(slots=True, eq=False)
class _ExpectedRetry:
    """A refused client that is expected to retry between ``earliest_at`` and ``latest_at``, and the requests and prompt
    tokens that it will add to the queue."""

    key: int
    requests: int
    tokens: int
    priority: int
    earliest_at: float = 0.0
    latest_at: float = 0.0


class Admission:
    """Counts the queue and bounds it by ``max_requests`` and ``max_tokens`` (prompt tokens). ``running`` is called for
    the requests on workers when a client is refused."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.requests = self.tokens = 0
        self.running: Callable[[], Iterable[Running]] = tuple
        self._residence = Residence()
        self._expected: list[_ExpectedRetry] = []
        """In the order in which places are kept for them."""
        self._return_share = 1.0
        """Smoothed share of the refused clients that retry in time."""
        self._stretch = 1.0
        self._forecast: Iterator[float] = iter(())
        self._frees: list[float] = []
        """The values taken from the forecast so far."""
        self._forecast_at = -math.inf
        self._rate = 0.0
        """Prompt tokens placed per second while there is a queue; 0 until it has been measured."""
        self._service_s = self._spread_s = 0.0
        self._by_priority: Counter[int] = Counter()
        self._since: float | None = None
        self._placed = self._placements = 0

    def enter(
        self,
        requests: int,
        tokens: int,
        now_s: float,
        *,
        priority: int = 0,
        within_s: float = math.inf,
        key: int = 0,
        first_try: bool = False,
    ) -> None:
        """Admit ``requests`` with ``tokens`` prompt tokens in total to the queue.

        ``key`` identifies the content of the request: a refused client that retries is recognized by it, unless
        ``first_try`` says that this is no retry. An empty queue admits any prompt, so that one above the bound is not
        refused for ever.

        Raises RequestError 429 if the requests do not fit, or if by the measured rates they would not end within
        ``within_s`` seconds; 400 if ``requests`` alone exceed the bound.
        """
        if requests > self.max_requests:
            raise RequestError(
                f"'prompt' has {requests} prompts, but this server queues at most {self.max_requests} requests.",
                param="prompt",
                code="invalid_value",
            )
        self._drop_overdue(now_s)
        retry = None if first_try else self._retry_of(key, now_s)
        if retry is not None:
            self._return_share += _RETURN_SMOOTHING * (1 - self._return_share)
        fits = self._fits(requests, tokens, priority, retry)
        if retry is not None:
            factor = STRETCH_DOWN if fits else STRETCH_UP
            self._stretch = min(MAX_STRETCH, max(1.0, self._stretch * factor))
        if not fits:
            raise overloaded(
                f"{self.requests} requests with {self.tokens} prompt tokens are waiting "
                f"(limits {self.max_requests} and {self.max_tokens})",
                self._schedule(retry or _ExpectedRetry(key, requests, tokens, priority), now_s),
            )
        if retry is not None:
            self._expected.remove(retry)
        waits_s, service_s = self._wait_s(priority), self._service_s + _SPREADS * self._spread_s
        if waits_s and waits_s + service_s > within_s:
            raise overloaded(
                f"the request would take about {waits_s:.1f} s in the queue and up to {service_s:.1f} s after it, "
                f"but its deadline is in {within_s:.1f} s",
                not_before(waits_s + service_s - within_s),
            )
        self.requests += requests
        self.tokens += tokens
        self._by_priority[priority] += tokens

    def _fits(self, requests: int, tokens: int, priority: int, retry: _ExpectedRetry | None) -> bool:
        """Return whether the queue has room.

        For a request that is no retry, the places of expected retries of the same or a more urgent priority count as
        taken. An empty queue always has room, so that kept places never leave workers idle.
        """
        if not self.requests:
            return True
        kept_requests = kept_tokens = 0.0
        if retry is None:
            kept_requests, kept_tokens = self._asked_by(each for each in self._expected if each.priority <= priority)
        return (
            self.requests + requests + round(kept_requests) <= self.max_requests
            and self.tokens + tokens + kept_tokens <= self.max_tokens
        )

    def _asked_by(self, retries: Iterable[_ExpectedRetry]) -> tuple[float, float]:
        """Return the expected number of requests and prompt tokens of ``retries``: their sum times the share of clients
        that do retry."""
        requests = tokens = 0
        for each in retries:
            requests += each.requests
            tokens += each.tokens
        return self._return_share * requests, self._return_share * tokens

    def _wait_s(self, priority: int) -> float:
        """Return the seconds until the requests that precede a new one of ``priority`` are placed; 0 if unknown."""
        if not self._rate or not self.requests:
            return 0.0
        return sum(tokens for each, tokens in self._by_priority.items() if each <= priority) / self._rate

    def back(self, tokens: int, *, priority: int = 0) -> None:
        """Return one request to the queue for a new attempt. It was admitted before, so no bound applies."""
        self.requests += 1
        self.tokens += tokens
        self._by_priority[priority] += tokens

    def leave(self, tokens: int, now_s: float, *, placed: bool, priority: int = 0) -> None:
        """Remove one request from the queue because it was placed on a worker (``placed``) or has ended."""
        self.requests -= 1
        self.tokens -= tokens
        self._by_priority[priority] -= tokens
        if not self._by_priority[priority]:
            del self._by_priority[priority]
        if placed:
            self._measure(tokens, now_s)

    def freed(self, seconds: float) -> None:
        """Record that a request left its workers, for any reason, ``seconds`` after it was placed."""
        self._residence.ended(seconds)

    def served(self, seconds: float) -> None:
        """Record that a request finished or missed its deadline ``seconds`` after it was placed."""
        error = seconds - self._service_s
        self._service_s += _SMOOTHING * error
        self._spread_s += _SMOOTHING * (abs(error) - self._spread_s)

    # -- refused clients ------------------------------------------------------------------------------------------

    def _drop_overdue(self, now_s: float) -> None:
        """Remove the clients that should have retried by now and have not."""
        kept = [each for each in self._expected if each.latest_at > now_s]
        self._return_share *= (1 - _RETURN_SMOOTHING) ** (len(self._expected) - len(kept))
        self._expected = kept

    def _retry_of(self, key: int, now_s: float) -> _ExpectedRetry | None:
        """Return the expected retry with ``key``, or None; of several, the one whose time is nearest to ``now_s``."""
        same = (each for each in self._expected if each.key == key)
        return min(same, key=lambda each: abs(each.earliest_at + each.latest_at - 2 * now_s), default=None)

    def _schedule(self, retry: _ExpectedRetry, now_s: float) -> float:
        """Return after how many seconds the client should retry, before jitter is applied.

        The earliest time that the jitter allows is when the client's place frees. A client that is in the list keeps
        its turn; another one is appended.
        """
        if retry not in self._expected and len(self._expected) < MAX_EXPECTED:
            self._expected.append(retry)
        turn = self._expected.index(retry) if retry in self._expected else len(self._expected)
        ahead = self._asked_by(self._expected[:turn])
        delay_s = not_before(self._stretch * self._frees_s(self._places_before(retry, *ahead), now_s))
        retry.earliest_at = now_s + (1 - RETRY_JITTER) * delay_s
        retry.latest_at = now_s + (1 + RETRY_JITTER) * delay_s + RETRY_GRACE_S
        return delay_s

    def _places_before(self, retry: _ExpectedRetry, requests_ahead: float, tokens_ahead: float) -> int:
        """Return how many requests must be placed on workers before ``retry`` fits into the queue behind the queued
        requests and the expected retries ahead of it. Each of those is assumed to have the average number of tokens."""
        waiting, tokens = self.requests + requests_ahead, self.tokens + tokens_ahead
        by_requests = round(waiting) + retry.requests - self.max_requests
        over = tokens + retry.tokens - self.max_tokens
        by_tokens = math.ceil(over * waiting / tokens) if over > 0 and tokens else 0
        return max(1, by_requests, min(round(waiting), by_tokens))

    def _frees_s(self, places: int, now_s: float) -> float:
        """Return the seconds until ``places`` places have become free. The forecast stops at the first value of at
        least MAX_RETRY_S, since no client is asked to wait longer."""
        if now_s - self._forecast_at > FORECAST_S:
            self._forecast, self._frees, self._forecast_at = self._residence.forecast(self.running()), [], now_s
        while len(self._frees) < places and (not self._frees or self._frees[-1] < MAX_RETRY_S):
            self._frees.append(next(self._forecast))
        return self._frees[min(places, len(self._frees)) - 1] - (now_s - self._forecast_at)

    def _measure(self, tokens: int, now_s: float) -> None:
        """Update the placement rate about every half second while there is a queue.

        Needs _ENOUGH placements: the first ones after a start are slow, and a rate that is too low would not correct
        itself, because requests that it refuses are never measured.
        """
        if self._since is None or self.requests == 0:
            self._since, self._placed, self._placements = now_s, 0, 0
            return
        self._placed += tokens
        self._placements += 1
        elapsed = now_s - self._since
        if elapsed >= 0.5 and self._placements >= _ENOUGH:
            rate = max(1.0, self._placed / elapsed)
            self._rate = self._rate + _SMOOTHING * (rate - self._rate) if self._rate else rate
            self._since, self._placed, self._placements = now_s, 0, 0


def not_before(seconds: float) -> float:
    """Return the delay whose earliest end after jitter is ``seconds`` from now, within the bounds that clients obey."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds / (1 - RETRY_JITTER)))


class RetryBudget:
    """Bounds how many requests are retried at once, so that a fault that hits many requests does not crowd out the
    rest.

    A request over the budget waits; it does not fail, because half of all requests may have been on the worker that
    died. An attempt counts from its placement to its first new token.
    """

    def __init__(self) -> None:
        self._trying: set[RequestId] = set()

    def allows(self, in_flight: int) -> bool:
        """Return whether one more request may be retried, with ``in_flight`` requests in total."""
        return len(self._trying) < max(MIN_RETRIES, RETRY_SHARE * in_flight)

    def placed(self, request: RequestId) -> None:
        """Count ``request``, whose new attempt has been placed."""
        self._trying.add(request)

    def settled(self, request: RequestId) -> bool:
        """Stop counting ``request``: its attempt has produced a token or is over. Return False if it was not
        counted."""
        if request not in self._trying:
            return False
        self._trying.remove(request)
        return True
