"""Bounds on what a grammar may cost a worker. The coordinator screens grammars with the same bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
GIVE_UP_S = 5.0
"""Seconds after which a request fails whose mask, or whose compiled grammar, is not there."""


class Spending:
    """The CPU time that the masks of one output have cost so far. ``share``: of what they may cost."""

    def __init__(self, share: float = 1.0) -> None:
        self._share, self._strikes, self._spare_s = share, 0, FOLLOW_LIMIT_S[0] * share

    def exceeded(self, cpu_s: float, following_s: float, tokens: int) -> bool:
        """Count a mask of ``cpu_s`` CPU seconds, of which ``following_s`` for following ``tokens`` tokens before it.
        Return whether the output has cost too much."""
        self._strikes += cpu_s >= LIMIT_S * self._share or following_s >= TOKEN_LIMIT_S * self._share * max(1, tokens)
        self._spare_s += tokens * FOLLOW_LIMIT_S[1] - following_s
        return self._strikes >= STRIKES or self._spare_s < 0


def parser_limits() -> LLParserLimits:
    """Return the bounds that llguidance checks itself. Schemas that clients have stay far below: one of 200 optional
    properties has 807 items in a row."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000, step_max_items=200_000, step_lexer_fuel=100_000, max_lexer_states=50_000,
        verbose_errors=False,
    )  # fmt: skip
