"""The machine's devices, memory and cores, and how one worker takes its share of them.

Probing imports no torch; only :func:`pin` does, because torch owns the intra-op threads.
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
"""Iterations of libgomp's spin loop before a waiting thread sleeps, 0.07 to 0.2 ms: longer than any gap between two
operations of a step. With far more, a waiting thread occupies a core on which the thread that it waits for could run,
where another process has taken that one's core."""
KV_LIMIT_BYTES = 4 * GIB
"""Most KV memory that a CPU worker takes by default."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@dataclass(frozen=True)
class Device:
    """One device. ``kind`` is cpu or cuda; ``cpus`` are the cores that this process may use; ``free_bytes`` of its
    memory are free now."""

    kind: str
    name: str
    cpus: tuple[int, ...]
    has_bf16: bool
    has_fp16: bool
    free_bytes: int


def probe() -> Device:
    """Return the first CUDA device if there is one, else the CPU."""
    if (gpu := _first_gpu()) is not None:
        name, free = gpu
        return Device("cuda", name, tuple(sorted(os.sched_getaffinity(0))), True, True, free)
    return probe_cpu()


def probe_cpu() -> Device:
    """Return the CPU, whether or not there is a GPU."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    flags = cpu_flags()
    has_bf16 = bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
    return Device("cpu", cpu_name(), cpus, has_bf16, bool(flags & {"avx512_fp16", "amx_fp16"}), free_memory())


def _first_gpu() -> tuple[str, int] | None:
    """Return name and free bytes of the first GPU that NVML shows; None without a driver or without nvidia-ml-py."""
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
    """Return the instruction-set flags of the first core, as Linux names them."""
    for key in ("flags", "Features"):
        if (value := _cpuinfo(key)) is not None:
            return frozenset(value.split())
    return frozenset()


def cpu_name() -> str:
    """Return the processor's model name, or its architecture where Linux gives no name."""
    return _cpuinfo("model name") or platform.machine()


def cpu_model() -> str:
    """Return the processor's family, model and stepping as Linux numbers them ("" where it does not): the model names
    that virtual machines show do not distinguish processors."""
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
    """Return the element type to compute in (``wanted`` unless it is "auto") and the reason in words."""
    if wanted != "auto":
        return wanted, "as requested"
    if device.kind == "cpu" and checkpoint_dtype == "bfloat16" and not device.has_bf16:
        return "float32", "this CPU has no bfloat16 instructions"
    if device.kind == "cpu" and checkpoint_dtype == "float16" and not device.has_fp16:
        return "float32", "this CPU has no float16 instructions"
    return checkpoint_dtype, "the checkpoint's"


# -- memory -----------------------------------------------------------------------------------------------------------


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


# -- cores ------------------------------------------------------------------------------------------------------------


def calm_threads() -> None:
    """Set the environment of OpenMP and the tokenizers library so that a waiting thread spins briefly, then sleeps. To
    be called before torch is imported.

    Threads must not sleep at once: a step has hundreds of parallel regions a few microseconds apart, and waking a
    thread can cost more than a region. They must not spin for long: an idle worker has to leave its cores to others.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    os.environ.setdefault("KMP_BLOCKTIME", "5")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
    lie in pages of 2 MiB if the system gives any, from which weights that every step reads are read faster."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE_PAGE
    if whole := size // LARGE_PAGE * LARGE_PAGE:
        with contextlib.suppress(OSError):  # the kernel has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory, start


def pin(cpus: Collection[int] | None = None, threads: int | None = None) -> int:
    """Bind this process to ``cpus`` and give torch ``threads`` threads (default: one per core); return their number."""
    calm_threads()
    if cpus:
        os.sched_setaffinity(0, cpus)
    count = threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(count)
    import torch  # after the environment: its OpenMP reads it once

    torch.set_num_threads(count)
    return count
