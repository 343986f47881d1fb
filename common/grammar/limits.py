"""Bounds on what a grammar may cost a worker. The coordinator screens grammars with the same bounds."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLParserLimits

SUSPECT_S = 0.001
"""CPU seconds of one mask from which on no step waits for the masks of its sequence."""
LIMIT_S = 0.020
"""CPU seconds of one mask that count as a strike."""
TOKEN_LIMIT_S = 0.002
"""CPU seconds of following one token that count as a strike. llguidance keeps the interpreter lock meanwhile, so the
worker's loop may wait."""
FOLLOW_LIMIT_S = 0.020, 0.0003
"""CPU seconds for following an output on one worker: for any, and for each of its tokens."""
STRIKES = 2
"""Strikes that fail a request."""
BUDGET_S = 0.15, 0.002
"""CPU seconds for the masks of a request on one worker, all choices together: for any, and for each output token."""
COSTLY_S, COSTLY_SHARE = (0.01, 0.0001), 0.02
"""CPU seconds, as in BUDGET_S but without compiling, from which on a request's masks have only the time that nothing
else wants; for each token at least this share of a step."""
LONGEST_STEP_S = 0.1
"""Most seconds that a step counts with: those with prompts take longer."""
GIVE_UP_S = 5.0
"""Seconds after which a request fails whose mask, or whose compiled grammar, is not there."""


class Cost(NamedTuple):
    """CPU seconds of one mask: ``mask_s``, of which ``following_s`` for ``followed`` tokens before it, and
    ``compiling_s`` besides, if the grammar was compiled for it. ``new``: tokens of the output since the last mask."""

    mask_s: float
    following_s: float
    followed: int
    new: int
    compiling_s: float = 0.0


class Pace:
    """The mean duration of a worker's last steps with grammars, in seconds."""

    step_s = 0.0

    def note(self, seconds: float) -> None:
        """Count a step."""
        self.step_s += 0.05 * (min(seconds, LONGEST_STEP_S) - self.step_s)


class Budget:
    """The CPU time that the masks of one request have cost so far, all choices together. ``share``: of what they may
    cost. ``pace``: of the worker. May be used from several threads."""

    def __init__(self, share: float = 1.0, pace: Pace | None = None) -> None:
        self._share, self._pace, self._lock = share, Pace() if pace is None else pace, Lock()
        self._masks_s, self._compiling_s, self._tokens = 0.0, 0.0, 0

    def spend(self, masks_s: float, tokens: int, compiling_s: float = 0.0) -> None:
        """Count CPU seconds of masks and of compiling, and ``tokens`` more of the output."""
        with self._lock:
            self._masks_s += masks_s
            self._compiling_s += compiling_s
            self._tokens += tokens

    @property
    def costly(self) -> bool:
        """Whether the request has cost so much that its masks must take no time from others."""
        base_s, token_s = COSTLY_S
        return self._masks_s > base_s + self._tokens * max(token_s, COSTLY_SHARE * self._pace.step_s)

    @property
    def exceeded(self) -> bool:
        """Whether the request has cost more than it may."""
        spent_s = self._masks_s + self._compiling_s
        return spent_s > self._share * (BUDGET_S[0] + self._tokens * BUDGET_S[1])


class Spending:
    """The CPU time that the masks of one output have cost so far. ``share``: of what they may cost. ``budget``: that of
    its request."""

    def __init__(self, share: float = 1.0, budget: Budget | None = None) -> None:
        self._share, self._strikes, self._spare_s = share, 0, FOLLOW_LIMIT_S[0] * share
        self.budget = Budget(share) if budget is None else budget

    def exceeded(self, cost: Cost) -> bool:
        """Count a mask. Return whether the output has cost too much."""
        slow = cost.following_s >= TOKEN_LIMIT_S * self._share * max(1, cost.followed)
        self._strikes += slow or cost.mask_s >= LIMIT_S * self._share
        self._spare_s += cost.followed * FOLLOW_LIMIT_S[1] - cost.following_s
        self.budget.spend(cost.mask_s, cost.new, cost.compiling_s)
        return self._strikes >= STRIKES or self._spare_s < 0 or self.budget.exceeded


def parser_limits() -> LLParserLimits:
    """Return the bounds that llguidance checks itself. Schemas that clients have stay far below: one of 200 optional
    properties has 807 items in a row."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000, step_max_items=200_000, step_lexer_fuel=100_000, max_lexer_states=50_000,
        verbose_errors=False,
    )  # fmt: skip
