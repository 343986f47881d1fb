"""The state of a grammar after the output of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.core.request import SamplingParams
from common.grammar.errors import FAILED, TOO_COMPLEX, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from common.grammar.compiled import CompiledGrammar

Mask = npt.NDArray[np.int32]
"""A mask has one bit per token id: bit ``i % 32`` of word ``i // 32`` is set if token ``i`` may follow."""

PIECE = 32
"""Tokens that are followed at once: llguidance keeps the interpreter lock meanwhile."""


class Matcher:
    """A pure function of the grammar and of the output tokens that it has followed.

    A token is *forced* if the grammar leaves one continuation only: then it is not sampled. An output's first token
    never is. Once the grammar is complete and nothing more can follow, the end of the sequence is forced. An ending
    token id can be sampled exactly where the grammar is complete; with ``ignore_eos`` the end of a sequence only if
    nothing else can follow.
    """

    def __init__(self, grammar: CompiledGrammar, sampling: SamplingParams, vocab_size: int) -> None:
        self._inner = grammar.start.deep_copy()
        self._first = grammar.first
        self._ends = [token for token in sampling.ending_token_ids if token < vocab_size]
        self._ignored = [token for token in sampling.eos_token_ids if token < vocab_size and sampling.ignore_eos]
        self._min_tokens = sampling.min_tokens
        self.length = 0
        """Output tokens followed."""
        self._sampled_at = -1
        """Length at which it is known that the next token is not forced."""

    @property
    def inner(self) -> LLMatcher:
        """The matcher of llguidance."""
        return self._inner

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on by output ``tokens``. Raises GrammarError if the grammar does not allow them."""
        for at in range(0, len(tokens), PIECE):
            part = list(tokens[at : at + PIECE])
            taken = self._inner.try_consume_tokens(part)
            if self._inner.is_error():
                raise self._too_complex()
            if taken < len(part):
                raise GrammarError(FAILED, "the output so far does not match the grammar")
            self.length += taken

    def forced(self) -> list[int]:
        """Return the next tokens that are forced; empty if the next is to be sampled. More may follow them."""
        if self.length in (0, self._sampled_at):
            return []
        if self._inner.is_stopped():
            if self._inner.is_error():
                raise self._too_complex()
            forced = self._ends[:1] if self.length >= self._min_tokens else []
        else:
            forced = self._inner.compute_ff_tokens()
            if self._inner.is_error():
                raise self._too_complex()
            if ending := next((at for at, token in enumerate(forced) if token in self._ends), -1) + 1:
                del forced[ending - 1 :]
        if not forced:
            self._sampled_at = self.length
        return forced

    def force(self) -> list[int]:
        """Follow and return all tokens that are forced now."""
        run: list[int] = []
        while forced := self.forced():
            run += forced
            if forced == self._ends[:1]:
                break
            self.follow(forced)
        return run

    def fill(self, mask: Mask) -> bool:
        """Write to ``mask`` which tokens may follow; return whether the only one is forced."""
        if forced := self.forced():
            allow(mask, forced[0])
            return True
        if self.length:
            self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        else:
            mask[:] = self._first
        self.settle(mask)
        return False

    def settle(self, mask: Mask) -> None:
        """Complete ``mask``, which llguidance has computed, by what the request says about endings."""
        if self._inner.is_error():
            raise self._too_complex()
        complete = self._inner.is_accepting()
        for token in self._ends:
            if complete:
                mask[token >> 5] |= _bit(token)
            else:
                mask[token >> 5] &= ~_bit(token)
        if self._ignored and complete:
            kept = mask.copy()
            for token in self._ignored:
                mask[token >> 5] &= ~_bit(token)
            if not mask.any():
                mask[:] = kept

    def _too_complex(self) -> GrammarError:
        """Return which limit the matcher has reached."""
        text = self._inner.get_error().partition("\n")[0][:300]
        return GrammarError(TOO_COMPLEX, f"the grammar is too complex: {text}")


def allow(mask: Mask, token: int) -> None:
    """Make ``token`` the only one that ``mask`` allows."""
    mask[:] = 0
    mask[token >> 5] = _bit(token)


def _bit(token: int) -> np.int32:
    return _BITS[token & 31]


_BITS: list[np.int32] = [*np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)]
