"""The memory that this process may take, and how it takes it from the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

GIB = 1 << 30
LARGE_PAGE = 2 << 20
KV_LIMIT_BYTES = 4 * GIB
"""Most KV memory that a CPU worker takes by default."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def free_memory() -> int:
    """Return the bytes that this process may still take: the machine's available memory, or what its control group
    leaves if that is less."""
    available = _meminfo("MemAvailable")
    return min([available, *(rest for rest in (_cgroup_v2_rest(), _cgroup_v1_rest()) if rest is not None)])


def _meminfo(key: str) -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path, key: str) -> int:
    """Return the bytes of page cache that the kernel frees on demand, from entry ``key`` of a memory.stat file."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(key + " "):
                return int(line.split()[1])
    return 0


def _cgroup_v2_rest() -> int | None:
    """Return the least bytes that any level of this process's control group (version 2) leaves; None if unlimited."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                here = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
                levels = [here, *here.parents]
                rests = [_v2_level(level) for level in levels if level.is_relative_to("/sys/fs/cgroup")]
                return min((rest for rest in rests if rest is not None), default=None)
    return None


def _v2_level(level: Path) -> int | None:
    limit, used = _number(level / "memory.max"), _number(level / "memory.current")
    if limit is None or used is None:
        return None
    return max(0, limit - used + _reclaimable(level / "memory.stat", "inactive_file"))


def _cgroup_v1_rest() -> int | None:
    root = Path("/sys/fs/cgroup/memory")
    limit, used = _number(root / "memory.limit_in_bytes"), _number(root / "memory.usage_in_bytes")
    if limit is None or used is None or limit > 1 << 60:
        return None
    return max(0, limit - used + _reclaimable(root / "memory.stat", "total_inactive_file"))


def kv_budget(workers: int = 1, free_bytes: int | None = None) -> int:
    """Return the bytes of KV cache for each of ``workers`` CPU workers: a quarter of free memory in all, at most
    4 GiB each."""
    free = free_memory() if free_bytes is None else free_bytes
    return min(KV_LIMIT_BYTES, free // 4 // max(1, workers))


def keep_freed_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the kernel after every large buffer.

    Otherwise a step's buffers of several MiB are mapped and faulted in page by page each time, which costs as much as
    the work done in them. To be called after loading: its larger leftovers are returned to the kernel first.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, GIB), (_M_TOP_PAD, 64 << 20)):
            libc.mallopt(option, value)


def large_pages(size: int) -> tuple[mmap.mmap, int]:
    """Return zeroed memory, and the offset in it at which ``size`` bytes begin. These bytes, but for their last part,
    lie in pages of 2 MiB if the system gives any. Weights in large pages are read faster, and every step reads them."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE_PAGE
    if whole := size // LARGE_PAGE * LARGE_PAGE:
        with contextlib.suppress(OSError):  # the kernel has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory, start
