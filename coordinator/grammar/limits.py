"""The limits of a grammar's compilation and of one mask, the same as on the workers."""

from __future__ import annotations

from llguidance import LLParserLimits

LIMITS = LLParserLimits(verbose_errors=False)
