"""Log-probabilities of consecutive tokens of a prompt, as columns of numbers.

Pure; knows no tensors. Columns rather than one object per token, since a prompt may have a hundred thousand tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

WORD = 4
"""Bytes of each number in a column: float32 or uint32."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Natural-log probabilities of the prompt tokens at positions ``[start, end)``, each given the tokens before it.

    ``logprobs`` [n] float32 and ``ranks`` [n] uint32 are those of the tokens themselves; a rank is the number of tokens
    of the vocabulary that are at least as likely, 1 for the most likely one. ``top_ids`` [n * tops] uint32 and ``top``
    [n * tops] float32 are the ``tops`` most likely tokens per position, descending.
    """

    start: int
    tops: int
    logprobs: array[float]
    ranks: array[int]
    top_ids: array[int]
    top: array[float]

    @property
    def end(self) -> int:
        """Position after the last token of the span."""
        return self.start + len(self.logprobs)

    @property
    def size(self) -> int:
        """Bytes of all columns."""
        return WORD * 2 * len(self.logprobs) * (1 + self.tops)

    def part(self, start: int, end: int) -> PromptSpan:
        """Return positions ``[start, end)`` of the span, which has them."""
        first, last, tops = start - self.start, end - self.start, self.tops
        return PromptSpan(
            start,
            tops,
            self.logprobs[first:last],
            self.ranks[first:last],
            self.top_ids[first * tops : last * tops],
            self.top[first * tops : last * tops],
        )

    def pieces(self, entries: int) -> Iterator[PromptSpan]:
        """Yield the span in order, in parts of at most ``entries`` log-probabilities (and at least one position)."""
        step = max(1, entries // (1 + self.tops))
        for at in range(self.start, self.end, step):
            yield self.part(at, min(at + step, self.end))
