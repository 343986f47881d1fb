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


def parser_limits() -> LLParserLimits:
    """Return the bounds that llguidance checks itself. Schemas that clients have stay far below: one of 200 optional
    properties has 807 items in a row."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000, step_max_items=200_000, step_lexer_fuel=100_000, max_lexer_states=50_000,
        verbose_errors=False,
    )  # fmt: skip
