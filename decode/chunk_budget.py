"""How many prompt tokens to compute in a step beside streams.

Pure. A step with a chunk is to take about three times as long as one without: streams run at a third of their speed,
and the prompt gets two thirds of the worker. Smaller chunks would delay streams more in the end, since each chunk has a
cost of its own. The duration of a step without a chunk is measured, not guessed: if it is unknown for the number of
streams, or was measured too long ago, a step without a chunk comes first. What steps with a chunk take beyond that
duration is the cost of the chunk's tokens.
"""

from __future__ import annotations

import math

from common.core.sequence import Batch

MULTIPLE = 16
"""Chunks have this many tokens or a multiple: kernels compute rows by the tile."""
TIMES = 3
"""Target duration of a step with a chunk, relative to one without."""
FIRST_TOKENS = 64
"""Tokens of a chunk while their cost is unknown. Smaller chunks count less in the measured cost of a token."""
BETWEEN_STREAMS = 128
"""Tokens of a chunk in a step without streams, if hand-offs are expected: streams may begin during it."""
STALE_STEPS = 32
"""Steps with a chunk after which one without is measured again, since contexts grow."""
_LEAST_S = 1e-9
"""Lower bound of a token's cost in seconds: an average of many zeros is no number to divide by."""
_SIZES = 4
"""Size classes of stream counts per doubling."""
_NEWEST = 0.1
"""Weight of the newest step in the moving averages."""


class ChunkBudget:
    """Chooses chunk sizes from the measured durations of this worker's steps."""

    def __init__(self) -> None:
        self._alone: dict[int, tuple[float, int]] = {}
        """By size class of the number of streams: average seconds of steps without a chunk, and ``_steps`` when the
        last of them was measured."""
        self._each: float | None = None
        """Average seconds that a token of a chunk adds; None until measured."""
        self._steps = 0
        """Steps with a chunk so far."""

    def took(self, batch: Batch, seconds: float) -> None:
        """Record that the step ``batch`` took ``seconds``."""
        streams = batch.streams
        known = self._known(streams)
        if not (tokens := batch.prompt_tokens):
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
        """Return the most prompt tokens for a step with ``streams`` streams: None for no limit, 0 to measure a step
        without a chunk. ``more_come``: whether hand-offs are expected."""
        if not streams:
            return BETWEEN_STREAMS if more_come else None
        if (alone := self._known(streams)) is None:
            return 0
        if not self._each:
            return FIRST_TOKENS
        return max(1, int((TIMES - 1) * alone / max(self._each, _LEAST_S)) // MULTIPLE) * MULTIPLE

    def _known(self, streams: int) -> float | None:
        """Return the seconds of a step with about so many streams and no chunk; None if not measured lately."""
        if not streams or (seen := self._alone.get(_size(streams))) is None:
            return None
        seconds, seen_at = seen
        return seconds if self._steps - seen_at < STALE_STEPS else None


def _size(streams: int) -> int:
    return round(_SIZES * math.log2(streams))
