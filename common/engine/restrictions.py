"""Token masks for ``allowed_token_ids`` and ``bad_words``.

A mask is a pure function of a request's parameters and of its output so far, so that a first token sampled on prefill,
and output after a hand-off, a preemption or a retry, obey the same rules. Must not know the sampler.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from common.core.request import SamplingParams
from common.core.sequence import Sequence
from common.grammar.matcher import Mask


class Restriction:
    """The masks of one request over a vocabulary of ``vocab_size`` ids (``Sequence.restriction``). Ids outside the
    vocabulary are ignored."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        allowed = np.frombuffer(sampling.allowed_token_ids, "<u4")
        self._always = _bits(vocab_size, allowed if len(allowed) else np.arange(vocab_size))
        words = [word for word in sampling.bad_words if word and word[-1] < vocab_size]
        self._always &= ~_bits(vocab_size, np.array([word[0] for word in words if len(word) == 1], np.int64))
        self._after: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Bad words of several tokens, by the last but one."""
        for word in words:
            if len(word) > 1:
                self._after[word[-2]].append(word)

    def mask(self, sequence: Sequence, grammar: Mask | None) -> Mask:
        """Return the mask of the next token of ``sequence``; ``grammar`` is what its grammar allows, None for no
        grammar."""
        mask = self._always if grammar is None else self._always & grammar
        banned = self._completed(sequence.tokens, sequence.output_length)
        if banned:
            mask = mask.copy() if mask is self._always else mask
            for token in banned:
                mask[token >> 5] &= ~np.left_shift(np.uint32(1), np.uint32(token & 31)).view(np.int32)
        return mask

    def _completed(self, tokens: list[int], output_length: int) -> list[int]:
        """Return the tokens that would complete a bad word, all of whose tokens are output."""
        if not output_length:
            return []
        words = self._after.get(tokens[-1], ())
        return [
            word[-1]
            for word in words
            if len(word) <= output_length + 1 and tokens[len(tokens) - len(word) + 1 :] == list(word[:-1])
        ]


def restricted(sequence: Sequence, grammar: Mask | None, vocab_size: int) -> Mask | None:
    """Return the mask of the next token of ``sequence``, None if every token may follow. ``grammar``: what its grammar
    allows, None for no grammar."""
    if not (sequence.masked and sequence.request.sampling.restricts):
        return grammar
    restriction = sequence.restriction
    if not isinstance(restriction, Restriction):
        restriction = sequence.restriction = Restriction(sequence.request.sampling, vocab_size)
    return restriction.mask(sequence, grammar)


def _bits(vocab_size: int, tokens: npt.NDArray[np.integer[Any]]) -> Mask:
    """Return a mask with the bits of ``tokens``, int32 [ceil(vocab_size / 32)]."""
    flags = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
    flags[tokens[tokens < vocab_size]] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
