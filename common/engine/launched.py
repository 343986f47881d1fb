"""Steps that a device computes while Python goes on.

A launched step reads and writes KV blocks until its tokens have been read. A sequence may leave in the meantime: it is
aborted, or the tokens of the step before end it. Its blocks must then not go back to the pool at once: the pool could
give them to a hand-off, whose bytes do not come through the device's queue, and the launched step would write its row
over them. The rule is:

    A block of a sequence that leaves is returned when the last step launched before has been read.

Within the queue of the device no rule is needed: a later step runs after an earlier one.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from common.core.errors import InvariantBroken
from common.core.ids import step_holder
from common.core.sequence import Batch, StepResult
from common.kv.cache import KvCache
from common.kv.table import BlockTable


class LaunchedStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait until the step is computed and return its result. To be called once, in the order of the launches."""
        ...


class StepLauncher(Protocol):
    """The way in which an engine starts a step."""

    def __call__(self, batch: Batch) -> LaunchedStep | None:
        """Start the decode step ``batch`` and return without waiting for it. A segment that starts at the end of its
        sequence's known tokens continues with the token that the step launched before samples for it. Return None, and
        start nothing, if the step must be run by ``step`` with all tokens known."""
        ...


class LaunchedBlocks:
    """Keeps the blocks of sequences that leave while launched steps may touch them. Pure."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._launched = self._read = self._kept = 0
        self._leaving: deque[tuple[int, BlockTable]] = deque()
        """Tables to close, each with the number of steps that must have been read before."""

    def launched(self) -> None:
        """Record that one more step was launched."""
        self._launched += 1

    def read(self) -> None:
        """Record that the oldest launched step has been read, and return the blocks that waited for it."""
        if self._read == self._launched:
            raise InvariantBroken("a step was read that was not launched")
        self._read += 1
        while self._leaving and self._leaving[0][0] <= self._read:
            self._cache.close(self._leaving.popleft()[1])

    def release(self, table: BlockTable) -> None:
        """Return the blocks of a sequence that has left: now, or when the steps launched so far have been read."""
        if self._read == self._launched:
            self._cache.close(table)
            return
        # another name, since the same attempt could come again and open a table under its own
        self._kept += 1
        self._cache.rename(table, step_holder(self._kept))
        self._leaving.append((self._launched, table))
