"""Who may queue: bounds on waiting requests and tokens, and what a refused client is told.

Pure. Owns the counts of what waits for a worker and a smoothed rate at which waiting tokens are placed; the answer to
"when shall I try again" is backlog divided by that rate.
"""

from __future__ import annotations

from common.errors import RequestError
from coordinator.refusals import overloaded

MIN_RETRY_S = 0.05
MAX_RETRY_S = 60.0
_SMOOTHING = 0.2
_ASSUMED_TOKENS_PER_S = 2_000.0
"""Before anything was measured."""


class Admission:
    """Counts the queue; ``max_requests`` and ``max_tokens`` (prompt tokens) bound it."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.requests = self.tokens = 0
        self._rate = _ASSUMED_TOKENS_PER_S
        self._since: float | None = None
        self._placed = 0

    def enter(self, requests: int, tokens: int) -> None:
        """``requests`` with ``tokens`` prompt tokens in all want to queue; RequestError 429 if they do not fit.

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
        self.requests += requests
        self.tokens += tokens

    def back(self, tokens: int) -> None:
        """One request returns to the queue after a setback: it was admitted before and is not refused now."""
        self.requests += 1
        self.tokens += tokens

    def leave(self, tokens: int, now_s: float, *, placed: bool) -> None:
        """One request leaves the queue, for a worker (``placed``) or for good."""
        self.requests -= 1
        self.tokens -= tokens
        if placed:
            self._measure(tokens, now_s)

    def retry_after_s(self, tokens: int) -> float:
        """Seconds until ``tokens`` more would probably fit: backlog over drain rate."""
        return min(MAX_RETRY_S, max(MIN_RETRY_S, (self.tokens + tokens) / self._rate))

    def _measure(self, tokens: int, now_s: float) -> None:
        """Updates the drain rate about every half second while there is a queue."""
        if self._since is None or self.requests == 0:
            self._since, self._placed = now_s, 0
            return
        self._placed += tokens
        elapsed = now_s - self._since
        if elapsed >= 0.5:
            self._rate += _SMOOTHING * (max(1.0, self._placed / elapsed) - self._rate)
            self._since, self._placed = now_s, 0
