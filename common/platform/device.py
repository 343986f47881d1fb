"""The devices of this machine, the one that a worker computes on, and the cores that it is bound to.

Probing imports no torch; only :func:`pin` does, because torch owns the intra-op threads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from common.core.errors import StartError
from common.kv.layout import KvDtype
from common.platform.gpu import Gpu, GpuGone, NoGpu, is_driver_loaded, newest_cuda, out_of_reach, visible_gpus
from common.platform.memory import free_memory

_SPINS = "4000"
"""Iterations of libgomp's spin loop before a waiting thread sleeps, 0.07 to 0.2 ms: longer than any gap between two
operations of a step. With far more, a waiting thread could occupy the only core on which the thread that it waits for
can run, while another process has that thread's own core."""
_FREE = 0.9
"""Part of a GPU's memory that is free if nothing else uses the GPU."""
_CUDA_OF_TORCH = re.compile(r"^cuda\b.*= '(\d+)\.", re.MULTILINE)
"""The line of torch's version file with the version of CUDA."""
_FIRST_WITH_BF16 = (8, 0)
"""Compute capability from which on GPUs multiply bfloat16."""


@dataclass(frozen=True)
class Device:
    """One device. ``kind`` is cpu or cuda; ``cpus`` are the cores that this process may use; ``free_bytes`` of its
    memory are free now. ``gpu`` is set for cuda."""

    kind: Literal["cpu", "cuda"]
    name: str
    cpus: tuple[int, ...]
    has_bf16: bool
    has_fp16: bool
    free_bytes: int
    gpu: Gpu | None = None

    @property
    def address(self) -> str:
        """The device as torch and ``--device`` call it, such as cuda:1."""
        return self.kind if self.gpu is None else f"cuda:{self.gpu.index}"

    @property
    def shown(self) -> str:
        """The device as a user sees it; a GPU has the same number in every process."""
        return self.kind if self.gpu is None else f"GPU {self.gpu.number} ({self.name})"


def choose(wanted: str) -> tuple[Device, str]:
    """Return the device for ``--device wanted`` (the first GPU of several) and the reason, as :func:`usable_gpus`."""
    gpus, reason = usable_gpus(wanted)
    return (probe_gpu(gpus[0]) if gpus else probe_cpu()), reason


def choose_ranks(wanted: str, ranks: int) -> tuple[list[Device], str]:
    """Return the devices of a worker with ``ranks`` ranks for ``--device wanted``, and the reason as
    :func:`usable_gpus`: the CPU, or a GPU for each rank. These are ``cuda:N`` and the visible ones after it, with auto
    and cuda the first visible ones, those that nothing else uses before others. Raises StartError if there are too few,
    or if they do not suit each other."""
    if ranks == 1:
        machine, reason = choose(wanted)
        return [machine], reason
    gpus, reason = usable_gpus(wanted, and_after=True)
    if not gpus:
        return [probe_cpu()], reason
    named = wanted.startswith("cuda:")
    if len(gpus) < ranks:
        raise _too_few(ranks, gpus, f"visible from {wanted} on" if named else "visible")
    if not named:
        gpus.sort(key=lambda each: each.free_bytes < _FREE * each.total_bytes)
    chosen = sorted(gpus[:ranks], key=lambda each: each.index)
    _require_group(chosen)
    return [probe_gpu(each) for each in chosen], reason


def _require_group(gpus: Sequence[Gpu]) -> None:
    """Raise StartError unless the ranks of one worker can compute on ``gpus``."""
    if len({each.capability for each in gpus}) > 1:
        raise StartError(
            "the ranks of a worker need GPUs of one kind",
            f"it would get {_listed(gpus)}",
            "show it GPUs of one kind with CUDA_VISIBLE_DEVICES",
        )
    if parts := [each.uuid for each in gpus if each.is_part]:
        raise StartError(
            "the ranks of a worker need whole GPUs",
            f"{', '.join(parts)} are parts of GPUs (MIG), which NCCL does not connect",
            "turn MIG off, or give --tensor-parallel-size 1",
        )
    try:
        why = out_of_reach(gpus)
    except NoGpu as error:
        why = str(error)
    if why:
        raise StartError(
            "the GPUs of a worker must reach each other's memory, since rank 0 hands over the KV of all ranks",
            why,
            "use GPUs for which nvidia-smi topo -p2p r says OK, or --tensor-parallel-size 1",
        )


def _too_few(ranks: int, gpus: Sequence[Gpu], which: str) -> StartError:
    return StartError(
        f"{ranks} ranks need {ranks} GPUs",
        f"{which} are {len(gpus)}: {_listed(gpus)}",
        f"give --tensor-parallel-size {len(gpus)} or less, make more GPUs visible, or give --device cpu",
    )


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"cuda:{each.index} ({each.name})" for each in gpus)


def usable_gpus(wanted: str, *, and_after: bool = False) -> tuple[list[Gpu], str]:
    """Return the GPUs that ``--device wanted`` (auto, cpu, cuda or cuda:N) allows, none for the CPU, and the reason in
    words ("" if there is nothing to say); ``and_after``: with cuda:N also the visible ones after it. Raises StartError
    if a GPU is demanded that cannot be used. A UUID in CUDA_VISIBLE_DEVICES demands that GPU, also with auto: a worker
    whose GPU is gone must not go on on the CPU."""
    if wanted == "cpu":
        return [], ""
    try:
        gpus = visible_gpus()
    except GpuGone as error:
        todo = "look at nvidia-smi -L and at the kernel's log: it was taken away, or has failed"
        raise StartError("the GPU of this process is gone", str(error), todo) from None
    except NoGpu as error:
        if wanted == "auto":
            return [], f"computing on the CPU: {error}" if is_driver_loaded() else ""
        todo = "make the GPU visible (nvidia-smi -L and CUDA_VISIBLE_DEVICES), or give --device cpu"
        raise StartError(f"--device {wanted} cannot be used", str(error), todo) from None
    if misfit := _misfit_of_torch():
        why, todo = misfit
        if wanted == "auto":
            return [], f"computing on the CPU though there is a GPU ({gpus[0].name}): {why}"
        raise StartError(f"--device {wanted} cannot be used", why, f"{todo}, or give --device cpu")
    if wanted.startswith("cuda:"):
        known = _listed(gpus)
        number = int(wanted.removeprefix("cuda:"))
        gpus = [each for each in gpus if each.index == number or (and_after and each.index > number)]
        if not gpus or gpus[0].index != number:
            raise StartError(
                f"there is no {wanted}", f"visible are {known}", "choose one of these, or give --device cuda"
            )
    return gpus, "the driver shows a GPU" if wanted == "auto" else "as requested"


def has_cuda() -> bool:
    """Return whether torch, which is not imported here, is built with CUDA."""
    found = importlib.util.find_spec("torch")
    return (
        found is not None and found.origin is not None and (Path(found.origin).parent / "lib/libtorch_cuda.so").exists()
    )


def cuda_of_torch() -> int | None:
    """Return the major version of CUDA for which torch, which is not imported here, is built; None if it is unknown."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return None
    built = _CUDA_OF_TORCH.search(text)
    return int(built[1]) if built else None


def _misfit_of_torch() -> tuple[str, str] | None:
    """Return why torch cannot compute on the GPUs that the driver shows, and what to do; None if it can. A driver
    serves all versions of CUDA up to its own major one."""
    if not has_cuda():
        return "torch is built without CUDA", "install torch's build for CUDA (make clean up)"
    if (wanted := cuda_of_torch()) is None or (newest := newest_cuda()) is None or newest >= wanted:
        return None
    why = f"torch is built for CUDA {wanted}, and the NVIDIA driver serves CUDA {newest} at most"
    return why, f"install a newer driver, or torch's build for CUDA {newest}"


def probe_gpu(gpu: Gpu) -> Device:
    """Return ``gpu`` as a device."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return Device("cuda", gpu.name, cpus, gpu.capability >= _FIRST_WITH_BF16, True, gpu.free_bytes, gpu)


def probe_cpu() -> Device:
    """Return the CPU, whether or not there is a GPU."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    flags = cpu_flags()
    has_bf16 = bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
    return Device("cpu", cpu_name(), cpus, has_bf16, bool(flags & {"avx512_fp16", "amx_fp16"}), free_memory())


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
    if checkpoint_dtype == "bfloat16" and not device.has_bf16:
        if device.gpu is not None:
            major, minor = device.gpu.capability
            return "float16", f"this GPU has no bfloat16 (compute capability {major}.{minor})"
        return "float32", "this CPU has no bfloat16 instructions"
    if device.kind == "cpu" and checkpoint_dtype == "float16" and not device.has_fp16:
        return "float32", "this CPU has no float16 instructions"
    return checkpoint_dtype, "the checkpoint's type"


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


def hide_triton() -> None:
    """Make this process do without the package triton, for a worker on a CPU. To be called before torch is imported,
    which imports triton wherever it is installed, at a price in memory and time.

    In Triton's interpreter kernels run on a CPU, too; then nothing is hidden."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]


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
