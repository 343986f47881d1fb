"""The memory of compiled grammars: how much they are estimated to have, and that it is given back.

llguidance does not report the size of a lexer, whose states grow with its use. So it is estimated from the CPU time of
masks: those that need no new states take microseconds, and new states take memory at a rate that differs little between
grammars.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from queue import SimpleQueue

BYTES_PER_S, USUAL_S = 256 << 20, 0.0001
"""Estimated growth per CPU second of a mask, and CPU seconds of a mask that needs no new states."""
BASE_BYTES, BYTES_PER_CHAR = 64 << 10, 160
"""Estimated size of a compiled grammar that was not used yet."""
TRIM_BYTES = 16 << 20
"""Estimated bytes that are given back to the operating system together."""


class GrammarMemory:
    """Counts the estimated bytes of all compiled grammars of a worker. May be used from any thread."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()
        self._freed: SimpleQueue[int | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, size: int) -> None:
        """Count ``size`` bytes."""
        with self._lock:
            self.bytes += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._give_back, name="grammar-memory", daemon=True)
                self._thread.start()

    def free(self, size: int) -> None:
        """Count ``size`` bytes as freed. May be called while an object is destroyed, in the middle of anything."""
        self._freed.put(size)

    def close(self) -> None:
        """End the thread."""
        self._freed.put(None)

    def _give_back(self) -> None:
        unused = 0
        while (size := self._freed.get()) is not None:
            with self._lock:
                self.bytes -= size
            unused += size
            if unused >= TRIM_BYTES:
                unused = 0
                _trim()


def estimate(cpu_s: float) -> int:
    """Return the estimated bytes of the states that a mask of ``cpu_s`` CPU seconds has made."""
    return max(0, int((cpu_s - USUAL_S) * BYTES_PER_S))


def _trim() -> None:
    """Return the free memory of the C library's heaps to the operating system, without the interpreter lock."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
