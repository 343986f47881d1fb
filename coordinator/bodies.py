"""The memory for request bodies that are being received or wait to be parsed.

Large bodies have a budget of their own, so that a flood of them cannot use up what ordinary ones need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from coordinator.lanes import LARGE_BYTES
from coordinator.refusals import overloaded

ORDINARY_BUDGET = 32 << 20
"""Bytes of all bodies of up to LARGE_BYTES together."""
LARGE_BUDGET = 64 << 20
"""Bytes of all larger bodies together, or twice the largest body that is allowed, whichever is more."""
RETRY_S = 1.0


class Bodies:
    """Counts the bytes of request bodies in memory, by class: ordinary and large."""

    def __init__(self, max_body_bytes: int) -> None:
        self.budgets = {False: ORDINARY_BUDGET, True: max(LARGE_BUDGET, 2 * max_body_bytes)}
        self.held = {False: 0, True: 0}
        """Bytes by ``is large``."""

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
        """Count ``size`` bytes, all that the body has by now; RequestError 429 if its class is over the budget."""
        self.release()
        self._size = size
        large = size > LARGE_BYTES
        held = self._bodies.held[large] = self._bodies.held[large] + size
        if held > self._bodies.budgets[large]:
            raise overloaded(f"request bodies of {held:,} bytes are being received", RETRY_S)

    def release(self) -> None:
        """Count nothing any more."""
        self._bodies.held[self._size > LARGE_BYTES] -= self._size
        self._size = 0
