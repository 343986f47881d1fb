"""What this machine has, and how one worker takes its share of it.

Probing imports no torch; only :func:`pin` touches it, because torch owns the intra-op threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from common.kv.layout import KvDtype

GIB = 1 << 30
LARGE_PAGE = 2 << 20
_SPINS = "4000"
"""Turns of libgomp's waiting loop, 0.07 to 0.2 ms: longer than anything between two operations of a step. Far more, and
a thread that waits uses up the time in which the one it waits for could have had its core from another process."""
KV_LIMIT_BYTES = 4 * GIB
"""Most KV memory that a CPU worker takes by itself."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@dataclass(frozen=True)
class Device:
    """``kind`` is cpu or cuda; ``cpus`` may be used by this process; bytes are free right now."""

    kind: str
    name: str
    cpus: tuple[int, ...]
    has_bf16: bool
    has_fp16: bool
    free_bytes: int


def probe() -> Device:
    """This machine as a worker sees it: the first CUDA device if there is one, else the CPU."""
    if (gpu := _first_gpu()) is not None:
        name, free = gpu
        return Device("cuda", name, tuple(sorted(os.sched_getaffinity(0))), True, True, free)
    return probe_cpu()


def probe_cpu() -> Device:
    """The processor, whether or not there is a GPU beside it."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    flags = cpu_flags()
    has_bf16 = bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
    return Device("cpu", cpu_name(), cpus, has_bf16, bool(flags & {"avx512_fp16", "amx_fp16"}), free_memory())


def _first_gpu() -> tuple[str, int] | None:
    """Name and free bytes of the first GPU that NVML shows; None without a driver or without nvidia-ml-py."""
    if not Path("/proc/driver/nvidia/version").exists():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return str(pynvml.nvmlDeviceGetName(handle)), int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except Exception:  # no library, no permission, no device: all mean that there is no GPU to use
        return None


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of the first core, as Linux names them."""
    for key in ("flags", "Features"):
        if (value := _cpuinfo(key)) is not None:
            return frozenset(value.split())
    return frozenset()


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.machine()


def cpu_model() -> str:
    """Which processor it is as Linux numbers it, since names do not tell those of virtual machines apart; empty where
    Linux does not."""
    x86, arm = ("cpu family", "model", "stepping"), ("CPU implementer", "CPU part", "CPU variant", "CPU revision")
    return ", ".join(f"{key} {value}" for key in (*x86, *arm) if (value := _cpuinfo(key)) is not None)


def _cpuinfo(key: str) -> str | None:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None


def choose_dtype(wanted: KvDtype | Literal["auto"], checkpoint_dtype: KvDtype, device: Device) -> tuple[KvDtype, str]:
    """The element type to compute in, and the reason: ``wanted`` unless it is "auto"."""
    if wanted != "auto":
        return wanted, "asked for"
    if device.kind == "cpu" and checkpoint_dtype == "bfloat16" and not device.has_bf16:
        return "float32", "this CPU has no bfloat16 instructions"
    if device.kind == "cpu" and checkpoint_dtype == "float16" and not device.has_fp16:
        return "float32", "this CPU has no float16 instructions"
    return checkpoint_dtype, "the checkpoint's"


# -- memory -----------------------------------------------------------------------------------------------------------


def free_memory() -> int:
    """Bytes that this process may still take: the machine's available memory or its control group's rest, if less."""
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
    """Page cache in a memory.stat file that the kernel gives back when asked."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(key + " "):
                return int(line.split()[1])
    return 0


def _cgroup_v2_rest() -> int | None:
    """The least that any level of this process's control group (version 2) leaves."""
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
    """Bytes of KV cache for each of ``workers`` CPU workers: a quarter of free memory in all, at most 4 GiB each."""
    free = free_memory() if free_bytes is None else free_bytes
    return min(KV_LIMIT_BYTES, free // 4 // max(1, workers))


# -- cores ------------------------------------------------------------------------------------------------------------


def calm_threads() -> None:
    """Environment for OpenMP and its kin, to be set before torch is imported: a thread that waits sleeps after a while.

    Not at once, because a step has hundreds of parallel regions some microseconds apart, and waking a thread can cost
    more than a region: with two threads that never spin, a decode step of an 82 M-parameter model measured 129 ms,
    against 28 ms. Not for long, because an idle worker must leave its cores to others. One thread never spins.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    os.environ.setdefault("KMP_BLOCKTIME", "5")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def keep_freed_memory() -> None:
    """Makes the C library keep what is freed instead of giving it back to the kernel after every large buffer.

    A step's buffers of several MiB would otherwise be mapped and faulted in page by page each time, which measured as
    much as the work done in them. To be called after loading, whose larger leftovers are given back first.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, GIB), (_M_TOP_PAD, 64 << 20)):
            libc.mallopt(option, value)


def large_pages(size: int) -> tuple[mmap.mmap, int]:
    """Zeroed memory, and the offset in it from which ``size`` bytes lie in pages of 2 MiB, but for their last part, if
    the system gives any: what is swept through in every step is read a tenth faster from these."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE_PAGE
    if whole := size // LARGE_PAGE * LARGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory, start


def pin(cpus: Collection[int] | None = None, threads: int | None = None) -> int:
    """Binds this process to ``cpus`` and gives torch ``threads`` threads (default: one per core); how many."""
    calm_threads()
    if cpus:
        os.sched_setaffinity(0, cpus)
    count = threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(count)
    import torch  # after the environment: its OpenMP reads it once

    torch.set_num_threads(count)
    return count
