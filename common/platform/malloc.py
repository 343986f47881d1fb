"""What the C heap does with memory that is given back.

A frame of KV is a mebibyte that numpy or libzmq takes from the heap and gives back a millisecond later. Unless told
otherwise glibc returns such memory to the kernel at once, and the next frame faults every page in again, zeroed: both
ends of a hand-off over ZeroMQ spent a third of their time on that.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20
"""The free end of an arena is given back from this size on, where a few megabytes are the default."""
MAPPED_BYTES = 32 << 20
"""Pieces from this size on are mapped for themselves, and unmapped when they are freed; glibc allows no more."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed() -> bool:
    """Memory that was freed is used again by this process before the kernel gets it back: the state into which glibc
    comes by itself once a piece of MAPPED_BYTES was freed. Whether the C library can be told so; others need not be."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
