"""What this process uses of the machine, for monitoring."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")


def process_usage() -> dict[str, float]:
    """Return ``process_cpu_seconds``, the CPU time of all threads since the start, and ``process_resident_bytes``, the
    resident memory, if the system reports it."""
    found = {"process_cpu_seconds": time.process_time()}
    try:
        resident = int(_STATM.read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return found
    return found | {"process_resident_bytes": float(resident * _PAGE_BYTES)}
