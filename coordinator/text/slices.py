"""Tokenization of long texts in slices.

The tokenizers library takes about 200 bytes of memory per character while it encodes, and an encoding cannot be
cancelled. A long text is therefore encoded in overlapping slices. Two neighbouring slices must agree on the tokens of
their overlap, and the text is cut where they begin to agree. Tokenizers work locally (words, merges within a word), so
the ids equal those of the whole text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from tokenizers import Tokenizer

SLICE_CHARS = 16_384
OVERLAP_CHARS = 2_048
GUARD_CHARS = 512
"""Characters at the end of a slice that are ignored, because the following text may change their tokens."""
_ENOUGH = 8
"""Tokens in a row that must be equal in both slices."""


class _Token(NamedTuple):
    """One token of an overlap. ``start`` and ``end``: characters in the whole text. ``number``: its index in its
    slice."""

    id: int
    start: int
    end: int
    number: int

    def same(self, other: _Token) -> bool:
        return self[:3] == other[:3]


def encode_slices(tokenizer: Tokenizer, text: str, longest_token: int = 0) -> Iterator[list[int]]:
    """Yield the ids of ``text``, without special tokens around it, one slice at a time. Releases the interpreter lock.

    ``longest_token``: characters of the longest token. Where neighbouring slices do not agree, as in a "word" of
    thousands of characters that is one unknown token, the text is cut at the end of a token of the earlier slice."""
    guard = max(GUARD_CHARS, 2 * longest_token)
    overlap = max(OVERLAP_CHARS, 4 * guard)
    size = max(SLICE_CHARS, 4 * overlap)
    start = first = 0
    piece = _Slice(tokenizer, text[:size])
    while start + size < len(text):
        end = start + size
        zone = piece.zone(start, end - overlap, end - guard)
        after = next((token for token in zone if token.number > first and token.start > start), None)
        if after is None:  # a single token covers the whole overlap
            after = _Token(0, end, end, len(piece.ids))
        following = _Slice(tokenizer, text[after.start : after.start + size])
        cut, next_first = _agreement(zone, following.zone(after.start, after.start, end - guard)) or (after.number, 0)
        yield piece.ids[first:cut]
        start, first, piece = after.start, next_first, following
    yield piece.ids[first:]


class _Slice:
    """One encoded slice. Looks up the positions of single tokens, because a list of all positions is slow to build."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        # only batch calls release the interpreter lock
        self._encoding = tokenizer.encode_batch([text], add_special_tokens=False)[0]
        self.ids: list[int] = self._encoding.ids

    def place(self, number: int) -> tuple[int, int]:
        """Return the first and the end character of a token in the slice."""
        place: tuple[int, int] | None = self._encoding.token_to_chars(number)
        assert place is not None, "no such token"
        return place

    def zone(self, offset: int, low: int, high: int) -> list[_Token]:
        """Return the tokens between the characters ``low`` and ``high`` of the text, in which this slice begins at
        ``offset``.

        The first one begins a character: if one character has several tokens, each of them has the position of the
        whole character."""
        first = bisect_left(range(len(self.ids)), low - offset, key=lambda number: self.place(number)[0])
        before = self.place(first - 1)[1] if first else 0
        zone: list[_Token] = []
        for number in range(first, len(self.ids)):
            start, end = self.place(number)
            if end + offset > high:
                break
            if zone or start >= before:
                zone.append(_Token(self.ids[number], start + offset, end + offset, number))
            before = end
        return zone


def _agreement(left: list[_Token], right: list[_Token]) -> tuple[int, int] | None:
    """Return the token numbers, one per slice, from which on both zones are equal up to their ends. None if fewer than
    _ENOUGH tokens are equal."""
    same = 0
    while same < min(len(left), len(right)) and left[-1 - same].same(right[-1 - same]):
        same += 1
    return (left[-same].number, right[-same].number) if same >= _ENOUGH else None
