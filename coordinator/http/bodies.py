"""The memory for request bodies that are being received or wait to be parsed.

Small, ordinary and large ones have budgets of their own, so that a flood of one kind cannot use up what others need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum

from coordinator.requests.errors import overloaded
from coordinator.text.lanes import INLINE_BYTES, LARGE_BYTES

SMALL_BUDGET = 32 << 20
"""Bytes of all bodies of up to INLINE_BYTES together that have come in part."""
ORDINARY_BUDGET = 32 << 20
"""Bytes of all larger bodies of up to LARGE_BYTES together."""
LARGE_BUDGET = 64 << 20
"""Bytes of all larger bodies together, or twice the largest body that is allowed, whichever is more."""
RETRY_S = 1.0


class BodyKind(Enum):
    """The kind of a body, by its size so far."""

    SMALL = "small"
    ORDINARY = "ordinary"
    LARGE = "large"


def kind_of(size: int) -> BodyKind:
    """The kind of a body of ``size`` bytes."""
    if size <= INLINE_BYTES:
        return BodyKind.SMALL
    return BodyKind.LARGE if size > LARGE_BYTES else BodyKind.ORDINARY


class Bodies:
    """Counts the bytes of request bodies in memory, by kind."""

    def __init__(self, max_body_bytes: int) -> None:
        self.budgets = {
            BodyKind.SMALL: SMALL_BUDGET,
            BodyKind.ORDINARY: ORDINARY_BUDGET,
            BodyKind.LARGE: max(LARGE_BUDGET, 2 * max_body_bytes),
        }
        self.held = dict.fromkeys(BodyKind, 0)

    @contextlib.contextmanager
    def share(self) -> Iterator[BodyShare]:
        """The share of one request, for as long as its body is needed."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            share.release()


class BodyShare:
    """The bytes of one body."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0

    def grow(self, size: int) -> None:
        """Count ``size`` bytes, all that the body has by now; RequestError 429 if its kind is over the budget."""
        self.release()
        self._size = size
        kind = kind_of(size)
        held = self._bodies.held[kind] = self._bodies.held[kind] + size
        if held > self._bodies.budgets[kind]:
            raise overloaded(f"{kind.value} request bodies of {held:,} bytes are being received", RETRY_S)

    def release(self) -> None:
        """Count nothing any more."""
        self._bodies.held[kind_of(self._size)] -= self._size
        self._size = 0
