"""When the parts of a prompt were computed, for the worker's :class:`common.net.messages.Timing`."""

from __future__ import annotations

from itertools import zip_longest

from common.net.messages import MAX_CHUNKS, PromptChunk


class ChunkTimes:
    """The steps that computed one prompt, in order. Neighbours are merged when there are more than MAX_CHUNKS."""

    def __init__(self) -> None:
        self._chunks: list[PromptChunk] = []

    def add(self, start_s: float, seconds: float, tokens: int) -> None:
        """Add a step that began ``start_s`` seconds after the first one and computed ``tokens`` of the prompt."""
        if len(self._chunks) == MAX_CHUNKS:
            pairs = zip_longest(self._chunks[::2], self._chunks[1::2])
            self._chunks = [first if second is None else _merged(first, second) for first, second in pairs]
        self._chunks.append(PromptChunk(start_s * 1000, seconds * 1000, tokens))

    def reported(self) -> tuple[PromptChunk, ...]:
        """Return them as the field of a message."""
        return tuple(self._chunks)


def _merged(first: PromptChunk, second: PromptChunk) -> PromptChunk:
    until_ms = second.start_ms + second.ms
    return PromptChunk(
        first.start_ms, until_ms - first.start_ms, first.tokens + second.tokens, first.steps + second.steps
    )
