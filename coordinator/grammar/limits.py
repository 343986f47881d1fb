"""The limits of a grammar's compilation and of one mask, the same as on the workers."""

from __future__ import annotations

from llguidance import LLParserLimits

LIMITS = LLParserLimits(step_lexer_fuel=100_000, step_max_items=50_000, max_lexer_states=20_000, verbose_errors=False)
"""About 7 ms of lexer and 2.5 ms of parser per mask, and 20 to 40 MB of lexer states."""
