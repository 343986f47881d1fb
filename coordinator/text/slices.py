"""Long texts to tokens, a slice at a time.

The tokenizers library takes about 200 bytes per character while it works, and nothing stops it. So a long text is
encoded in overlapping slices: two neighbours must agree on the tokens of their overlap, and the text is cut where they
begin to agree. Tokenizers decide locally (words, merges within a word), so that the tokens are those of the whole text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from tokenizers import Tokenizer

SLICE_CHARS = 16_384
OVERLAP_CHARS = 2_048
GUARD_CHARS = 512
"""So many characters before the end of a slice say nothing: what follows may change their tokens."""
_ENOUGH = 8
"""So many tokens in a row must be the same in both slices."""


class _Token(NamedTuple):
    """One token of an overlap: its place in the whole text, and its number in its slice."""

    id: int
    start: int
    end: int
    number: int

    def same(self, other: _Token) -> bool:
        return self[:3] == other[:3]


def encode_slices(tokenizer: Tokenizer, text: str, longest_token: int = 0) -> Iterator[list[int]]:
    """The ids of ``text`` without what belongs around it, some at a time. Lets go of the interpreter lock. Where
    neighbours agree nowhere, as in a "word" of thousands of characters that is one unknown token, the text is cut
    anyway: every slice ends where one of its tokens does."""
    guard = max(GUARD_CHARS, 2 * longest_token)
    overlap = max(OVERLAP_CHARS, 4 * guard)
    size = max(SLICE_CHARS, 4 * overlap)
    start = first = 0
    piece = _Slice(tokenizer, text[:size])
    while start + size < len(text):
        end = start + size
        zone = piece.zone(start, end - overlap, end - guard)
        after = next((token for token in zone if token.number > first and token.start > start), None)
        if after is None:  # one token over the whole overlap
            after = _Token(0, end, end, len(piece.ids))
        following = _Slice(tokenizer, text[after.start : after.start + size])
        cut, next_first = _agreement(zone, following.zone(after.start, after.start, end - guard)) or (after.number, 0)
        yield piece.ids[first:cut]
        start, first, piece = after.start, next_first, following
    yield piece.ids[first:]


class _Slice:
    """One encoded slice. Asks for the places of single tokens: a list of all places is slow to make."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        # only batches let go of the interpreter lock
        self._encoding = tokenizer.encode_batch([text], add_special_tokens=False)[0]
        self.ids: list[int] = self._encoding.ids

    def place(self, number: int) -> tuple[int, int]:
        """Beginning and end of a token in the slice."""
        place: tuple[int, int] | None = self._encoding.token_to_chars(number)
        assert place is not None, "no such token"
        return place

    def zone(self, offset: int, low: int, high: int) -> list[_Token]:
        """Tokens that lie between ``low`` and ``high`` where the slice is at ``offset`` of the text, the first of them
        at the beginning of a character (a character of several tokens gives each of them its whole place)."""
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
    """Where both begin to have the same tokens up to their ends, as a number in each slice; None if too late."""
    same = 0
    while same < min(len(left), len(right)) and left[-1 - same].same(right[-1 - same]):
        same += 1
    return (left[-same].number, right[-same].number) if same >= _ENOUGH else None
