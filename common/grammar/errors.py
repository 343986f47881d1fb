"""Why a grammar fails its request."""

from __future__ import annotations

from common.core.sequence import Refusal

TOO_COMPLEX, FAILED = "grammar_too_complex", "grammar_failed"
"""Codes of :data:`common.net.messages.FAILURES`: the grammar costs too much, or it cannot be obeyed."""
NOTHING_LEFT = Refusal(FAILED, "no token is left that all parameters of the request together allow")
BROKEN = Refusal(FAILED, "the grammar failed in this worker")
UNKNOWN = Refusal(FAILED, "this worker does not constrain outputs")


class GrammarError(Exception):
    """A grammar fails its request, for the reason in ``refusal``."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.refusal = Refusal(code, words)
