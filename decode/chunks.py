"""How much of a prompt is computed in a step that streams wait for, too.

Pure. A step takes about twice as long with its chunk as without: streams go on at half of their pace, and a prompt gets
half of the worker. What steps without a chunk take is remembered by the number of their streams, in powers of two, and
what a token of a prompt adds is what steps with one took longer.
"""

from __future__ import annotations

from common.sequence import Batch

MULTIPLE = 16
"""Chunks are of so many tokens, or of a multiple: kernels compute rows by the tile."""
FIRST_TOKENS = 64
"""Of a chunk as long as nothing is known; smaller ones tell less about what a token adds."""
BETWEEN_STREAMS = 128
"""Of a chunk in a step without streams, of a worker to which some may come during it."""
_NEWEST = 0.1
"""Weight of the newest step in what steps usually take."""


class Chunks:
    """Learns from steps of this worker."""

    def __init__(self) -> None:
        self._alone: dict[int, tuple[float, float]] = {}
        """Streams and seconds of steps without a chunk, by the power of two of the former: averages of late ones."""
        self._each: float | None = None
        """Seconds that a token of a chunk adds."""

    def took(self, batch: Batch, seconds: float) -> None:
        """How long a step has taken."""
        streams = sum(segment.length == 1 for segment in batch.segments)
        if not (tokens := batch.length - streams):
            size = streams.bit_length()
            count, usual = self._alone.get(size, (streams, seconds))
            self._alone[size] = count + _NEWEST * (streams - count), usual + _NEWEST * (seconds - usual)
        elif tokens >= MULTIPLE and (not streams or self._alone):
            each = max(0.0, seconds - (self.alone_s(streams) if streams else 0.0)) / tokens
            if self._each is None:
                self._each = each
            self._each += _NEWEST * min(1.0, tokens / FIRST_TOKENS) * (each - self._each)

    def most(self, streams: int, *, more_come: bool) -> int | None:
        """Tokens of prompts in a step with so many streams, None for any number; ``more_come``: whether hand-offs are
        expected."""
        if not streams:
            return BETWEEN_STREAMS if more_come else None
        if not self._alone or not self._each:
            return FIRST_TOKENS
        return max(1, int(self.alone_s(streams) / self._each) // MULTIPLE) * MULTIPLE

    def alone_s(self, streams: int) -> float:
        """Seconds of a step without a chunk, between what fewer and what more streams take; of more than were seen, or
        of fewer, what the nearest took."""
        known = sorted(self._alone.values())
        below = [each for each in known if each[0] <= streams]
        above = [each for each in known if each[0] > streams]
        if not below or not above:
            return (below[-1:] or above)[0][1]
        (fewer, least), (more, most) = below[-1], above[0]
        return least + (most - least) * (streams - fewer) / (more - fewer)
