"""How much of a prompt is computed in a step that streams wait for, too.

Pure. A step takes about three times as long with its chunk as without: streams go on at a third of their pace, and a
prompt gets two thirds of the worker; smaller chunks would delay them more in the end, since each costs something by
itself. What a step takes without a chunk is looked at, not guessed: with a number of streams for which that is unknown,
or known from too long ago, there is a step without one first. What steps with a chunk take longer is what its tokens
add.
"""

from __future__ import annotations

import math

from common.core.sequence import Batch

MULTIPLE = 16
"""Chunks are of so many tokens, or of a multiple: kernels compute rows by the tile."""
TIMES = 3
"""As long a step takes with a chunk as without."""
FIRST_TOKENS = 64
"""Of a chunk as long as nothing is known; smaller ones tell less about what a token adds."""
BETWEEN_STREAMS = 128
"""Of a chunk in a step without streams, of a worker to which some may come during it."""
STALE_STEPS = 32
"""After so many steps with a chunk it is looked at again what those without take: contexts grow."""
_LEAST_S = 1e-9
"""What a token adds at least, if anything: rounding, or the average of many zeros, is no number to divide by."""
_SIZES = 4
"""Numbers of streams that count as different, in a doubling."""
_NEWEST = 0.1
"""Weight of the newest step in what steps usually take."""


class ChunkBudget:
    """Learns from steps of this worker."""

    def __init__(self) -> None:
        self._alone: dict[int, tuple[float, int]] = {}
        """What steps without a chunk took, by the size of their number of streams, and how many there had been with one
        when that was last seen."""
        self._each: float | None = None
        """Seconds that a token of a chunk adds."""
        self._steps = 0
        """With a chunk."""

    def took(self, batch: Batch, seconds: float) -> None:
        """How long a step has taken."""
        streams = batch.streams
        known = self._known(streams)
        if not (tokens := batch.length - streams):
            usual = seconds if known is None else known + _NEWEST * (seconds - known)
            self._alone[_size(streams)] = usual, self._steps
            return
        self._steps += 1
        if tokens >= MULTIPLE and (not streams or known is not None):
            each = max(0.0, seconds - (known or 0.0)) / tokens
            if self._each is None:
                self._each = each
            self._each += _NEWEST * min(1.0, tokens / FIRST_TOKENS) * (each - self._each)

    def most(self, streams: int, *, more_come: bool) -> int | None:
        """Tokens of prompts in a step with so many streams, None for any number, 0 if it is to show what it takes
        without; ``more_come``: whether hand-offs are expected."""
        if not streams:
            return BETWEEN_STREAMS if more_come else None
        if (alone := self._known(streams)) is None:
            return 0
        if not self._each:
            return FIRST_TOKENS
        return max(1, int((TIMES - 1) * alone / max(self._each, _LEAST_S)) // MULTIPLE) * MULTIPLE

    def _known(self, streams: int) -> float | None:
        """Seconds of a step with about so many streams and no chunk, if that was seen lately."""
        if not streams or (seen := self._alone.get(_size(streams))) is None:
            return None
        seconds, seen_at = seen
        return seconds if self._steps - seen_at < STALE_STEPS else None


def _size(streams: int) -> int:
    return round(_SIZES * math.log2(streams))
