"""Admission to the queue and budgets for retries: bounds on waiting requests and tokens, and when to retry.

Pure. Owns the counts of what waits for a worker, a smoothed rate at which waiting tokens are placed, and the list of
refused clients that are expected to retry. They are served in turn: the first gets the time at which the first place
frees, the second that of the second, and places are kept for them, so that two retries are enough for each. A request
that would miss its deadline in the queue is refused on arrival: work for clients that have given up is what makes an
overloaded server useless.
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
"""The openai client waits for up to a minute (since 3.0: two), which the jitter must not exceed; beyond that it falls
back to its own backoff of half a second."""
RETRY_SHARE, MIN_RETRIES = 0.2, 10
"""This share of what is in flight, and at least so many, may be on a new attempt that has not spoken yet."""
RETRY_GRACE_S = 2.0
"""A refused client is expected until so long after the latest moment that its retry time and the jitter allow."""
MAX_EXPECTED = 2048
"""Bound of the list of refused clients; one more gets a time behind all of them, but no place is kept for it."""
STRETCH_UP, STRETCH_DOWN, MAX_STRETCH = 2.0, 0.95, 8.0
"""Retry times are multiplied by a factor from 1 to MAX_STRETCH. It grows by STRETCH_UP with each retry that finds no
place and shrinks by STRETCH_DOWN with each that finds one. So it settles where one retry in 14 finds none: two in a row
find none one time in 200."""
FORECAST_S = 0.1
"""A forecast is used for so long: a flood of refusals costs one walk over the running requests each time."""
_SMOOTHING = 0.2
_SPREADS = 2.0
"""So many mean deviations above its mean a service may take, as of TCP's retransmission timer (RFC 6298, with four)."""
_ENOUGH = 8
_RETURN_SMOOTHING = 0.1


@dataclass(slots=True, eq=False)
class _ExpectedRetry:
    """A refused client that is expected to retry between two moments, and what its request asks of the queue."""

    key: int
    requests: int
    tokens: int
    priority: int
    earliest_at: float = 0.0
    latest_at: float = 0.0


class Admission:
    """Counts the queue; ``max_requests`` and ``max_tokens`` (prompt tokens) bound it. ``running`` is called for the
    requests that are at workers when a client is refused."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.requests = self.tokens = 0
        self.running: Callable[[], Iterable[Running]] = tuple
        self._residence = Residence()
        self._expected: list[_ExpectedRetry] = []
        """In the order of their turns."""
        self._return_share = 1.0
        """Smoothed share of the refused clients that retry in time."""
        self._stretch = 1.0
        self._forecast: Iterator[float] = iter(())
        self._frees: list[float] = []
        """What was taken from the forecast so far."""
        self._forecast_at = -math.inf
        self._rate = 0.0
        """Prompt tokens a second; 0 before it was measured."""
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
        """Take ``requests`` with ``tokens`` prompt tokens in all into the queue; RequestError 429 if they do not fit,
        or if by all that was measured they would not end within ``within_s`` seconds. ``key`` stands for the content of
        the request: a refused client that retries is recognised by it, unless ``first_try`` says that it is none.

        A queue that is empty takes any prompt: one that is longer than the bound must not be refused for ever. More
        requests at once than the queue has places for are refused for good: 400.
        """
        if requests > self.max_requests:
            raise RequestError(
                f"'prompt' has {requests} prompts, but this server lets only {self.max_requests} requests wait.",
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
                f"about {waits_s:.1f} s would pass in the queue and up to {service_s:.1f} s after it, "
                f"but the deadline is in {within_s:.1f} s",
                not_before(waits_s + service_s - within_s),
            )
        self.requests += requests
        self.tokens += tokens
        self._by_priority[priority] += tokens

    def _fits(self, requests: int, tokens: int, priority: int, retry: _ExpectedRetry | None) -> bool:
        """Whether there are places. Places are kept for expected retries of the same priority or an earlier one against
        all but retries, and never so that the queue is empty: no worker may idle for want of work."""
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
        """Requests and prompt tokens that will probably come with ``retries``."""
        requests = tokens = 0
        for each in retries:
            requests += each.requests
            tokens += each.tokens
        return self._return_share * requests, self._return_share * tokens

    def _wait_s(self, priority: int) -> float:
        """Seconds until everybody who is served before a new request of ``priority`` has been placed; 0 if unknown."""
        if not self._rate or not self.requests:
            return 0.0
        return sum(tokens for each, tokens in self._by_priority.items() if each <= priority) / self._rate

    def back(self, tokens: int, *, priority: int = 0) -> None:
        """One request returns to the queue for a retry: it was admitted before and is not refused now."""
        self.requests += 1
        self.tokens += tokens
        self._by_priority[priority] += tokens

    def leave(self, tokens: int, now_s: float, *, placed: bool, priority: int = 0) -> None:
        """One request leaves the queue, for a worker (``placed``) or for good."""
        self.requests -= 1
        self.tokens -= tokens
        self._by_priority[priority] -= tokens
        if not self._by_priority[priority]:
            del self._by_priority[priority]
        if placed:
            self._measure(tokens, now_s)

    def freed(self, seconds: float) -> None:
        """Note that a request has left its workers, however it ended, ``seconds`` after it was placed there."""
        self._residence.ended(seconds)

    def served(self, seconds: float) -> None:
        """A request has ended, or run out of time, ``seconds`` after it was placed."""
        error = seconds - self._service_s
        self._service_s += _SMOOTHING * error
        self._spread_s += _SMOOTHING * (abs(error) - self._spread_s)

    # -- refused clients ------------------------------------------------------------------------------------------

    def _drop_overdue(self, now_s: float) -> None:
        """Forget the clients that should have retried by now and have not."""
        kept = [each for each in self._expected if each.latest_at > now_s]
        self._return_share *= (1 - _RETURN_SMOOTHING) ** (len(self._expected) - len(kept))
        self._expected = kept

    def _retry_of(self, key: int, now_s: float) -> _ExpectedRetry | None:
        """The expected retry that a request with ``key`` is; of several the one whose time is nearest."""
        same = (each for each in self._expected if each.key == key)
        return min(same, key=lambda each: abs(each.earliest_at + each.latest_at - 2 * now_s), default=None)

    def _schedule(self, retry: _ExpectedRetry, now_s: float) -> float:
        """Seconds after which the client should retry, before the jitter: the earliest that the jitter allows is when
        its place frees. It keeps its turn if it has one, else it gets the last."""
        if retry not in self._expected and len(self._expected) < MAX_EXPECTED:
            self._expected.append(retry)
        turn = self._expected.index(retry) if retry in self._expected else len(self._expected)
        ahead = self._asked_by(self._expected[:turn])
        delay_s = not_before(self._stretch * self._frees_s(self._places_before(retry, *ahead), now_s))
        retry.earliest_at = now_s + (1 - RETRY_JITTER) * delay_s
        retry.latest_at = now_s + (1 + RETRY_JITTER) * delay_s + RETRY_GRACE_S
        return delay_s

    def _places_before(self, retry: _ExpectedRetry, requests_ahead: float, tokens_ahead: float) -> int:
        """How many requests must be placed at workers before ``retry`` fits into the queue behind those in it and
        those ahead, which have as many tokens each as they have on average."""
        waiting, tokens = self.requests + requests_ahead, self.tokens + tokens_ahead
        by_requests = round(waiting) + retry.requests - self.max_requests
        over = tokens + retry.tokens - self.max_tokens
        by_tokens = math.ceil(over * waiting / tokens) if over > 0 and tokens else 0
        return max(1, by_requests, min(round(waiting), by_tokens))

    def _frees_s(self, places: int, now_s: float) -> float:
        """Seconds until so many places have become free; at least MAX_RETRY_S if it is longer than that."""
        if now_s - self._forecast_at > FORECAST_S:
            self._forecast, self._frees, self._forecast_at = self._residence.forecast(self.running()), [], now_s
        while len(self._frees) < places and (not self._frees or self._frees[-1] < MAX_RETRY_S):
            self._frees.append(next(self._forecast))
        return self._frees[min(places, len(self._frees)) - 1] - (now_s - self._forecast_at)

    def _measure(self, tokens: int, now_s: float) -> None:
        """Updates the drain rate about every half second while there is a queue. A few placements tell nothing: the
        first answers after a start come late, and whoever is refused for that does not show that it was wrong."""
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
    """The delay, within the bounds that clients obey, whose earliest end under the jitter is ``seconds`` from now."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds / (1 - RETRY_JITTER)))


class RetryBudget:
    """How many requests may try again at once: a fault that hits many must not crowd out everybody else.

    Whoever is over the budget waits its turn (and is not failed: half of what is in flight may have been on the worker
    that died). An attempt counts from its placement to its first new token.
    """

    def __init__(self) -> None:
        self._trying: set[RequestId] = set()

    def allows(self, in_flight: int) -> bool:
        """Whether one more may try, with ``in_flight`` requests in all."""
        return len(self._trying) < max(MIN_RETRIES, RETRY_SHARE * in_flight)

    def placed(self, request: RequestId) -> None:
        """A new attempt is on its way."""
        self._trying.add(request)

    def settled(self, request: RequestId) -> bool:
        """It has spoken, or is over; False if it was not counted. Idempotent."""
        if request not in self._trying:
            return False
        self._trying.remove(request)
        return True
