"""Bounds on what a grammar may cost a worker. Whoever screens a grammar for workers uses the same ones."""

from __future__ import annotations

from llguidance import LLParserLimits

SUSPECT_S = 0.001
"""CPU seconds of one mask from which on no step waits for the masks of its sequence."""
LIMIT_S = 0.020
"""CPU seconds of one mask that count as a strike."""
STRIKES = 2
"""Strikes that fail a request."""
GIVE_UP_S = 5.0
"""Seconds after which a request fails whose mask, or whose compiled grammar, is not there."""


def parser_limits() -> LLParserLimits:
    """Return the bounds that llguidance checks itself: about 7 ms of lexer and 2.5 ms of parser per mask, and 20 to 40
    MB of lexer states."""
    return LLParserLimits(step_lexer_fuel=100_000, step_max_items=50_000, max_lexer_states=20_000, verbose_errors=False)
