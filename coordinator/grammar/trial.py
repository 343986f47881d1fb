"""The trial of a compiled grammar: short random outputs, whose masks may cost no more than on a worker.

A worker fails a request whose token masks take too much CPU time (:mod:`common.grammar.limits`) in the middle of its
output. Here such a grammar is refused before that. The bounds are tighter than the workers', as their machines may be
slower; a grammar that becomes costly only later in its output is still stopped there.
"""

from __future__ import annotations

import random
from time import thread_time

from llguidance import LLMatcher, LLTokenizer

from common.grammar.limits import Budget, Cost, Spending

OUTPUTS, TOKENS = 4, 64
"""Random outputs, and maximum tokens of each."""
SHARE = 0.5
"""What a mask may take, as a share of the workers' bounds."""
ENOUGH_S = 0.15
"""CPU seconds after which no further output is tried."""
_CLOSERS = ('"', "}", "]", ",", ":", ">", ")")
"""Texts that half of the random choices prefer where they may follow, so that outputs leave strings and lists."""


class TooSlow(Exception):
    """Token masks take more CPU time than they may."""


def affordable(matcher: LLMatcher, tokenizer: LLTokenizer) -> LLMatcher:
    """Compute the masks of random outputs. Return the last state, which is in its error state if an output has reached
    one of llguidance's own limits. Raises TooSlow. ``matcher``: at the start of the grammar, of which nothing was
    computed yet, since later masks of the same state are faster."""
    closers = [tokenizer.tokenize_str(text)[0] for text in _CLOSERS]
    rng = random.Random(0)  # noqa: S311 - the same trial whenever a grammar is screened
    began = thread_time()
    state = matcher
    for output in range(OUTPUTS):
        state = matcher.deep_copy()
        _follow(state, tokenizer.eos_tokens, closers if output % 2 else [], rng)
        if state.is_error() or thread_time() - began > ENOUGH_S:
            break
    return state


def _follow(state: LLMatcher, ends: list[int], closers: list[int], rng: random.Random) -> None:
    """Let ``state`` follow a random output without the tokens ``ends``. Raises TooSlow."""
    spending, followed, tokens = Spending(SHARE, Budget()), 0.0, 0
    for _ in range(TOKENS):
        started = thread_time()
        mask = state.compute_bitmask()
        if spending.exceeded(Cost(thread_time() - started + followed, followed, tokens, tokens)):
            raise TooSlow
        token = _chosen(mask, ends, closers, rng)
        if state.is_error() or token is None:
            return
        started = thread_time()
        state.consume_token(token)
        forced = [] if state.is_stopped() else state.compute_ff_tokens()[:TOKENS]
        state.consume_tokens(forced)
        followed, tokens = thread_time() - started, 1 + len(forced)
        if state.is_stopped():
            return


def _chosen(given: bytes, ends: list[int], closers: list[int], rng: random.Random) -> int | None:
    """Return a random token out of the mask ``given`` that is not among ``ends``, None if there is none."""
    mask = bytearray(given)
    for token in ends:
        mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    allowed = [token for token in closers if mask[token >> 3] >> (token & 7) & 1]
    if allowed and rng.random() < 0.5:
        return rng.choice(allowed)
    at = rng.randrange(len(mask))
    for start in (at, 0):
        if rest := mask[start:].lstrip(b"\0"):
            byte = len(mask) - len(rest)
            bits = [bit for bit in range(8) if rest[0] >> bit & 1]
            return 8 * byte + rng.choice(bits)
    return None
