"""Checks of this machine: processor, NUMA nodes, memory, limits, kernels, GPUs, clock."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import platform
import re
import resource
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from bench.load.neighbours import NOTICED, busy_share
from common.config.up import UpConfig
from common.kv import pieces
from common.kv.budget import human_bytes
from common.platform import device, memory, open_files, threads
from common.platform.gpu import Gpu, NoGpu, is_driver_loaded, nvml, out_of_reach
from common.platform.gpu_readings import GpuLost, Nvml, NvmlFailed, read
from deploy.doctor.finding import Finding, bad, good, warning
from deploy.launcher import cores, fleet

FEATURES = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "sve", "i8mm", "bf16",
)  # fmt: skip
"""Instruction sets that kernels use, as Linux names them."""
LEAST_FREE_BYTES = 1 << 30
MANY_SWAPPED_BYTES = 256 << 20
FEW_FILES, TOO_FEW_FILES = 4096, 256
_WITH_SLICES = (6, 12)
"""The first version of Linux that grants threads the time slices that they ask for."""
_NODES = Path("/sys/devices/system/node")
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_LEAST_FOR_NCCL = 1 << 30
_UNSYNCHRONISED, _CLOCK_ERROR = 0x40, 5  # timex.h: STA_UNSYNC, TIME_ERROR


# -- processor --------------------------------------------------------------------------------------------------------


def processor() -> Iterator[Finding]:
    """Yield the processor's name, cores and instruction sets, the limit of a container, and the frequency governor."""
    mine, flags = cores.usable_cores(), device.cpu_flags()
    found = [each for each in FEATURES if each in flags]
    text = f"{device.cpu_name()}, {len(mine)} of {os.cpu_count()} cores; {', '.join(found) or 'no vector instructions'}"
    if flags & {"avx2", "asimd"}:
        yield good("processor", text)
    else:
        yield warning("processor", f"{text}: steps are several times slower", "use a processor with AVX2 or NEON")
    if not device.probe_cpu().has_bf16:
        yield good("processor", "no bfloat16 instructions: bfloat16 checkpoints compute in float32 (--dtype)")
    quota = cores.core_quota()
    if quota is not None and quota < len(mine):
        yield warning(
            "processor",
            f"the container may use {quota} of {len(mine)} cores at a time: workers are not bound to cores",
            "give the container whole cores (a cpuset) instead of a share of time",
        )
    with contextlib.suppress(OSError):
        if _GOVERNOR.read_text().strip() == "powersave" and "pstate" not in _driver():
            yield warning("processor", "its frequency is held low (powersave)", "cpupower frequency-set -g performance")


def _driver() -> str:
    with contextlib.suppress(OSError):
        return _GOVERNOR.with_name("scaling_driver").read_text()
    return ""


def load() -> Iterator[Finding]:
    """Yield a warning if other processes compute on the cores."""
    share = busy_share(cores.usable_cores())
    if share > NOTICED:
        yield warning(
            "load",
            f"other processes take {share:.0%} of these cores",
            "stop them, or give Tandem cores of its own with --cpus",
        )
    else:
        yield good("load", "the cores are idle")


def numa(config: UpConfig) -> Iterator[Finding]:
    """Yield the NUMA nodes, and whether a worker of this configuration would have cores on several."""
    nodes = numa_nodes()
    if len(nodes) < 2:
        yield good("numa", "one node")
        return
    shown = "; ".join(f"node {node}: {_ranges(each)}" for node, each in nodes.items())
    spread = [
        member.label
        for member in fleet.plan(config)
        if member.share.cores and sum(bool(set(member.share.cores) & set(each)) for each in nodes.values()) > 1
    ]
    unbound = [member.label for member in fleet.plan(config) if member.share.cores is None]
    if spread or unbound:
        yield warning(
            "numa",
            f"{len(nodes)} nodes ({shown}), and {', '.join(spread + unbound)} would compute on several: half of the "
            "memory is then far away",
            "start so many workers that each fits into a node, or one tandem per node with --cpus",
        )
    else:
        yield good("numa", f"{len(nodes)} nodes ({shown}); each worker's cores are on one")


def numa_nodes(root: Path = _NODES) -> dict[int, tuple[int, ...]]:
    """Return the cores of each NUMA node that this process may use."""
    mine, found = set(cores.usable_cores()), dict[int, tuple[int, ...]]()
    for path in sorted(root.glob("node[0-9]*"), key=lambda each: int(each.name[4:])):
        with contextlib.suppress(OSError, ValueError):
            of_node = [part for part in (path / "cpulist").read_text().strip().split(",") if part]
            listed = {core for part in of_node for core in _range(part)}
            if listed & mine:
                found[int(path.name[4:])] = tuple(sorted(listed & mine))
    return found


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as 0-3,8."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


# -- memory -----------------------------------------------------------------------------------------------------------


def ram() -> Iterator[Finding]:
    """Yield free memory, swap, and the settings that hold memory back."""
    sizes = memory_sizes()
    free, total = memory.free_memory(), sizes["MemTotal"]
    text = f"{human_bytes(free)} free of {human_bytes(total)}"
    if free < LEAST_FREE_BYTES:
        yield warning("memory", f"{text}: little room for weights and KV", "stop other processes")
    else:
        yield good("memory", text)
    swapped = sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0)
    if swapped > MANY_SWAPPED_BYTES:
        yield warning(
            "memory",
            f"{human_bytes(swapped)} are swapped out: a step that needs them waits for the disk",
            "stop other processes, or swapoff -a",
        )
    with contextlib.suppress(OSError):
        if "[never]" in _LARGE_PAGES.read_text():
            yield warning("memory", "pages of 2 MiB are off: weights are read slower", f"echo madvise > {_LARGE_PAGES}")
    with contextlib.suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            yield warning(
                "memory",
                "the kernel reserves memory that is not used yet (vm.overcommit_memory=2): KV pools may not fit",
                "sysctl vm.overcommit_memory=0",
            )


def memory_sizes(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Return the entries of /proc/meminfo that are sizes, in bytes."""
    return {
        name: int(value) * 1024 for name, value in re.findall(r"^(\w+): +(\d+) kB$", path.read_text(), re.MULTILINE)
    }


def shared_memory(gpus: Collection[Gpu]) -> Iterator[Finding]:
    """Yield whether workers can share memory, over which they hand KV over, and the room that NCCL needs."""
    try:
        descriptor = os.memfd_create("tandem-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as mapped:
                mapped[0] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        yield bad(
            "shared memory",
            f"workers cannot share memory: {error.strerror}",
            "allow memfd_create and mmap in the sandbox, or give --kv-transport zmq",
        )
    else:
        yield good("shared memory", "workers on this machine hand KV over in memory")
    if len(gpus) > 1 and _SHARED_MEMORY.is_dir():
        room = os.statvfs(_SHARED_MEMORY)
        size = room.f_blocks * room.f_frsize
        if size < _LEAST_FOR_NCCL:
            yield warning(
                "shared memory",
                f"{_SHARED_MEMORY} has {human_bytes(size)}: ranks on several GPUs (NCCL) may fail",
                "start the container with --shm-size 1g",
            )


# -- limits -----------------------------------------------------------------------------------------------------------


def files() -> Iterator[Finding]:
    """Yield how many files and connections a process may have open: processes raise the limit to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = open_files.MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, open_files.MOST_FILES)
    text = f"{most:,} connections and files per process"
    if most < TOO_FEW_FILES:
        yield bad("open files", text, open_files.HINT)
    elif most < FEW_FILES:
        yield warning("open files", f"{text}: more clients get 429", open_files.HINT)
    else:
        yield good("open files", text)


def real_time(config: UpConfig) -> Iterator[Finding]:
    """Yield whether threads that pass tokens on may run in real time, which they need where processes share cores."""
    mine, _ = fleet.machine(config)
    own_core = len(mine) > len(fleet.plan(config))
    if threads.may_be_real_time():
        yield good("real time", "threads that pass tokens on may run in real time")
    elif own_core:
        yield good("real time", "not permitted, and not needed: the coordinator has a core of its own")
    else:
        yield warning(
            "real time",
            "not permitted, and the coordinator shares a core with a worker: while a prompt is computed there, tokens "
            "of other streams wait for milliseconds",
            "ulimit -r 1, CAP_SYS_NICE, or LimitRTPRIO=1 in the systemd unit",
        )
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if version < _WITH_SLICES:
        shown = ".".join(map(str, _WITH_SLICES))
        yield good("real time", f"Linux {platform.release()}: time slices are equal for all threads before {shown}")


# -- software ---------------------------------------------------------------------------------------------------------


def software() -> Iterator[Finding]:
    """Yield the versions of Python and of the libraries, and whether torch is there."""
    from importlib import metadata

    found = list[str]()
    for name in ("tandem", "torch", "transformers", "pyzmq"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield bad("software", f"{name} is not installed", "make install, or pip install -e .")
    yield good("software", f"Python {platform.python_version()}, Linux {platform.release()}, {', '.join(found)}")


def kernels() -> Iterator[Finding]:
    """Yield whether the kernels in C are compiled, and for which instruction set they run."""
    from common.kernels import cpu  # imports torch

    library = cpu.library()
    if library is None:
        yield warning(
            "kernels",
            "the kernels in C are not compiled, or are of older sources: steps are computed by torch, much slower",
            "install a C compiler, then make clean install, or pip install -e .",
        )
    else:
        others = ", ".join(library.variants[1:]) or "no other"
        yield good(
            "kernels",
            f"compiled; run with {library.variant}, quantized weights with {library.group_variant} "
            f"({others} would run, too)",
        )
    if not pieces.are_compiled():
        yield warning(
            "kernels",
            "the checksums of hand-offs are not compiled: hand-offs take longer",
            "install a C compiler, then make clean install, or pip install -e .",
        )


def graphics(gpus: Sequence[Gpu], why: str) -> Iterator[Finding]:
    """Yield each GPU that workers would use, its health, and whether the GPUs reach each other. ``why``: why workers
    compute on the CPU though a driver is loaded, "" if there is nothing to say."""
    if not gpus:
        if why and is_driver_loaded():
            yield warning("gpu", why, "see docs/operate/gpus.md, or give --device cpu")
        else:
            yield good("gpu", "no NVIDIA driver is loaded: workers compute on the CPU")
        return
    if importlib.util.find_spec("triton") is None:
        yield bad("gpu", "triton is not installed: there is no attention on GPUs", "pip install -e '.[gpu]'")
    for gpu in gpus:
        yield from _graphics(gpu)
    if len(gpus) > 1:
        with contextlib.suppress(NoGpu):
            if apart := out_of_reach(gpus):
                yield warning("gpu", f"{apart}: KV between them passes through the host", "see nvidia-smi topo -p2p r")
            else:
                yield good("gpu", f"GPU {gpus[0].number} reaches the memory of the others directly")


def _graphics(gpu: Gpu) -> Iterator[Finding]:
    major, minor = gpu.capability
    bf16 = "bfloat16" if device.probe_gpu(gpu).has_bf16 else "no bfloat16 (float16 instead)"
    part = ", a part of a GPU (MIG)" if gpu.is_part else ""
    text = f"GPU {gpu.number}: {gpu.name}, {human_bytes(gpu.free_bytes)} free of {human_bytes(gpu.total_bytes)}"
    yield good("gpu", f"{text}, compute capability {major}.{minor}, {bf16}{part}")
    if gpu.free_bytes < 0.9 * gpu.total_bytes:
        taken = human_bytes(gpu.total_bytes - gpu.free_bytes)
        yield warning(
            "gpu",
            f"GPU {gpu.number}: {taken} of its memory are taken",
            "stop what uses it (nvidia-smi), or lower --gpu-memory-utilization",
        )
    try:
        with nvml() as library:
            reader = Nvml(library)
            state = read(reader, reader.find(gpu.uuid))
    except GpuLost as error:
        yield bad("gpu", f"GPU {gpu.number} is lost: {error}", "reset or replace it; see the kernel's log")
        return
    except (NoGpu, NvmlFailed) as error:
        yield warning("gpu", f"GPU {gpu.number}: its health is unknown: {error}", "see nvidia-smi")
        return
    if state.throttled_by:
        yield warning(
            "gpu",
            f"GPU {gpu.number} is slowed down by {' and '.join(state.throttled_by)}",
            "look at its cooling and power limit: nvidia-smi -q -d PERFORMANCE",
        )
    if state.ecc_uncorrected:
        yield bad(
            "gpu", f"GPU {gpu.number}: {state.ecc_uncorrected} uncorrected memory errors", "reset it, then watch it"
        )
    if state.remap_failed:
        yield bad("gpu", f"GPU {gpu.number}: a memory row could not be replaced", "replace the card")
    elif state.remap_pending:
        yield warning("gpu", f"GPU {gpu.number}: a memory row is replaced at the next reset", "reset it when idle")


# -- clock ------------------------------------------------------------------------------------------------------------


class _Timex(ctypes.Structure):
    """``struct timex``, of which only ``status`` is read; the rest is room for its other fields."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def is_clock_synchronised() -> bool | None:
    """Return whether the kernel says that its clock follows another one (NTP, PTP); None if it does not say."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).ntp_adjtime
    except (OSError, AttributeError):
        return None
    found = _Timex()
    state = function(ctypes.byref(found))
    return None if state < 0 else state != _CLOCK_ERROR and not found.status & _UNSYNCHRONISED


def clock(several_hosts: bool) -> Iterator[Finding]:
    """Yield whether this machine's clock is synchronised, which matters only where logs of several hosts are
    compared: requests are timed by monotonic clocks."""
    synchronised = is_clock_synchronised()
    if synchronised is False and several_hosts:
        yield warning("clock", "it is not synchronised: times in logs of several hosts differ", "run chrony or ntpd")
    else:
        words = {True: "synchronised", False: "not synchronised, which matters only among hosts", None: "unknown"}
        yield good("clock", words[synchronised])
