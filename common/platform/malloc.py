"""Settings of the C heap for freed memory.

A KV frame is a mebibyte that numpy or libzmq allocates and frees a millisecond later. By default glibc returns such
memory to the kernel at once, and the next frame faults in every page again, zeroed, which takes a large part of a
hand-off's time at both ends.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20
"""Size from which on the free end of an arena is returned to the kernel; glibc's default is a few megabytes."""
MAPPED_BYTES = 32 << 20
"""Size from which on each allocation is a mapping of its own, unmapped when freed; the most that glibc allows."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed() -> bool:
    """Let this process reuse freed memory before the kernel gets it back. glibc adapts to the same state by itself once
    an allocation of MAPPED_BYTES was freed. Return whether the C library took the settings; others than glibc need
    none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
