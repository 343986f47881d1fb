"""Memory budgets for request bodies that are being received or are waiting to be parsed.

Small, ordinary and large bodies have separate budgets, so that a flood of one kind cannot starve the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum

from coordinator.requests.errors import overloaded
from coordinator.text.lanes import INLINE_BYTES, LARGE_BYTES

SMALL_BUDGET = 32 << 20
"""Total bytes of partially received bodies of up to INLINE_BYTES each."""
ORDINARY_BUDGET = 32 << 20
"""Total bytes of bodies between INLINE_BYTES and LARGE_BYTES."""
LARGE_BUDGET = 64 << 20
"""Total bytes of bodies above LARGE_BYTES. Twice the largest allowed body is used instead if that is more."""
RETRY_S = 1.0


class BodyKind(Enum):
    """The size class of a body, by the bytes received so far."""

    SMALL = "small"
    ORDINARY = "ordinary"
    LARGE = "large"


def kind_of(size: int) -> BodyKind:
    """Return the size class of a body of ``size`` bytes."""
    if size <= INLINE_BYTES:
        return BodyKind.SMALL
    return BodyKind.LARGE if size > LARGE_BYTES else BodyKind.ORDINARY


class Bodies:
    """The bytes of request bodies in memory, by kind."""

    def __init__(self, max_body_bytes: int) -> None:
        self.budgets = {
            BodyKind.SMALL: SMALL_BUDGET,
            BodyKind.ORDINARY: ORDINARY_BUDGET,
            BodyKind.LARGE: max(LARGE_BUDGET, 2 * max_body_bytes),
        }
        self.held = dict.fromkeys(BodyKind, 0)

    @contextlib.contextmanager
    def share(self) -> Iterator[BodyShare]:
        """Yield the share of one request. Its bytes are released on exit."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            share.release()


class BodyShare:
    """The bytes of one body that are counted in :class:`Bodies`."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0

    def grow(self, size: int) -> None:
        """Set the size of this body so far to ``size`` bytes. Raises RequestError 429 if its kind is over budget."""
        self.release()
        self._size = size
        kind = kind_of(size)
        held = self._bodies.held[kind] = self._bodies.held[kind] + size
        if held > self._bodies.budgets[kind]:
            raise overloaded(f"{kind.value} request bodies of {held:,} bytes are being received", RETRY_S)

    def release(self) -> None:
        """Return the counted bytes to the budget."""
        self._bodies.held[kind_of(self._size)] -= self._size
        self._size = 0
