"""Who may queue and who may try again: bounds on waiting requests and tokens, and what a refused client is told.

Pure. Owns the counts of what waits for a worker and a smoothed rate at which waiting tokens are placed; the answer to
"when shall I try again" is backlog divided by that rate. Who would miss its deadline in the queue is told at the door:
to work for clients that have given up is what makes an overloaded server useless.
"""

from __future__ import annotations

import math
from collections import Counter

from common.errors import RequestError
from common.ids import RequestId
from coordinator.refusals import overloaded

MIN_RETRY_S = 0.05
MAX_RETRY_S = 60.0
RETRY_SHARE, MIN_RETRIES = 0.2, 10
"""This share of what is in flight, and at least so many, may be on a new attempt that has not spoken yet."""
_SMOOTHING = 0.2
_SPREADS = 2.0
"""So many mean deviations above its mean a service may take, as of TCP's retransmission timer (RFC 6298, with four)."""
_ENOUGH = 8
_ASSUMED_TOKENS_PER_S = 2_000.0
"""Before anything was measured."""


class Admission:
    """Counts the queue; ``max_requests`` and ``max_tokens`` (prompt tokens) bound it."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.requests = self.tokens = 0
        self._rate = _ASSUMED_TOKENS_PER_S
        self._measured = False
        self._service_s = self._spread_s = 0.0
        self._by_priority: Counter[int] = Counter()
        self._since: float | None = None
        self._placed = self._placements = 0

    def enter(self, requests: int, tokens: int, *, priority: int = 0, within_s: float = math.inf) -> None:
        """``requests`` with ``tokens`` prompt tokens in all want to queue; RequestError 429 if they do not fit, or if
        by all that was seen they would not end within ``within_s`` seconds.

        A queue that is empty takes any prompt: one that is longer than the bound must not be refused for ever. More
        requests at once than the queue has places for are refused for good: 400.
        """
        if requests > self.max_requests:
            raise RequestError(
                f"'prompt' has {requests} prompts, but this server lets only {self.max_requests} requests wait.",
                param="prompt",
                code="invalid_value",
            )
        too_many = self.requests + requests > self.max_requests
        too_long = self.requests > 0 and self.tokens + tokens > self.max_tokens
        if too_many or too_long:
            raise overloaded(
                f"{self.requests} requests with {self.tokens} prompt tokens are waiting "
                f"(limits {self.max_requests} and {self.max_tokens})",
                self.retry_after_s(tokens),
            )
        waits_s, service_s = self._wait_s(priority), self._service_s + _SPREADS * self._spread_s
        if waits_s and waits_s + service_s > within_s:
            raise overloaded(
                f"about {waits_s:.1f} s would pass in the queue and up to {service_s:.1f} s after it, "
                f"but the deadline is in {within_s:.1f} s",
                min(MAX_RETRY_S, max(MIN_RETRY_S, waits_s + service_s - within_s)),
            )
        self.requests += requests
        self.tokens += tokens
        self._by_priority[priority] += tokens

    def _wait_s(self, priority: int) -> float:
        """Seconds until everybody who is served before a new request of ``priority`` has been placed; 0 if unknown."""
        if not self._measured or not self.requests:
            return 0.0
        return sum(tokens for each, tokens in self._by_priority.items() if each <= priority) / self._rate

    def back(self, tokens: int, *, priority: int = 0) -> None:
        """One request returns to the queue after a setback: it was admitted before and is not refused now."""
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

    def served(self, seconds: float) -> None:
        """A request has ended, or run out of time, ``seconds`` after it was placed."""
        error = seconds - self._service_s
        self._service_s += _SMOOTHING * error
        self._spread_s += _SMOOTHING * (abs(error) - self._spread_s)

    def retry_after_s(self, tokens: int) -> float:
        """Seconds until ``tokens`` more would probably fit: backlog over drain rate."""
        return min(MAX_RETRY_S, max(MIN_RETRY_S, (self.tokens + tokens) / self._rate))

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
            self._rate = self._rate + _SMOOTHING * (rate - self._rate) if self._measured else rate
            self._measured = True
            self._since, self._placed, self._placements = now_s, 0, 0


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
