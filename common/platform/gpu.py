"""The NVIDIA GPUs that this process may use, as the driver's management library (NVML) reports them.

Light: it creates no CUDA context and imports no torch. ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it, with GPUs
counted as ``nvidia-smi`` counts them (see :func:`number_by_bus`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVERS = Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg")
"""Files of which one exists where an NVIDIA driver is loaded: on Linux, in sandboxes that show a process only the
devices, and on Linux in Windows."""
_ORDINAL = re.compile(r"\d+")
_UUID = "GPU-", "MIG-"
"""Beginnings of the names of GPUs, and of parts of GPUs."""


class NoGpu(Exception):
    """There is no GPU to use; the text says why."""


class GpuGone(NoGpu):
    """CUDA_VISIBLE_DEVICES names GPUs by UUID, and the driver does not show the first of them."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU. ``index`` is its place among the visible ones, which torch calls ``cuda:index``; ``uuid`` names
    it for every process. ``capability`` is CUDA's compute capability, such as (9, 0) for Hopper. ``number`` is its
    place among all GPUs of the machine, as ``nvidia-smi`` counts them."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    number: int = 0

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a GPU (MIG)."""
        return self.uuid.startswith("MIG-")


def is_driver_loaded() -> bool:
    """Return whether an NVIDIA driver is loaded, whatever GPUs it shows."""
    return any(path.exists() for path in _DRIVERS)


def number_by_bus() -> None:
    """Make CUDA number the GPUs as NVML does, by their place on the bus; its default is the fastest first. To be called
    before CUDA is initialised."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield the module pynvml, initialised. Raises NoGpu without a driver or without the library."""
    if not is_driver_loaded():
        raise NoGpu("no NVIDIA driver is loaded")
    try:
        import pynvml
    except ImportError:
        raise NoGpu("nvidia-ml-py, which finds GPUs, is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpu(f"the NVIDIA driver does not answer: {error}") from None
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA shows this process, in its order; at least one. Raises NoGpu."""
    with nvml() as library:
        try:
            handles = _visible_handles(library, environment.get(VISIBLE))
            return [_describe(library, index, handle) for index, handle in enumerate(handles)]
        except library.NVMLError as error:
            raise NoGpu(f"the NVIDIA driver does not answer: {error}") from None


def newest_cuda() -> int | None:
    """Return the newest major version of CUDA that the driver serves; None if it does not say."""
    with contextlib.suppress(NoGpu), nvml() as library, contextlib.suppress(library.NVMLError):
        return int(library.nvmlSystemGetCudaDriverVersion_v2()) // 1000
    return None


def out_of_reach(gpus: Sequence[Gpu]) -> str:
    """Return which of ``gpus`` the first one cannot read and write over NVLink or PCIe, in words; "" if there is none,
    or if the driver does not say. Raises NoGpu if it does not answer any more."""
    with nvml() as library:
        kinds = library.NVML_P2P_CAPS_INDEX_READ, library.NVML_P2P_CAPS_INDEX_WRITE
        known = library.NVML_P2P_STATUS_OK, library.NVML_P2P_STATUS_UNKNOWN
        try:
            first, *others = [library.nvmlDeviceGetHandleByUUID(each.uuid) for each in gpus]
            refused = [
                str(each.number)
                for each, handle in zip(gpus[1:], others, strict=True)
                if any(library.nvmlDeviceGetP2PStatus(first, handle, kind) not in known for kind in kinds)
            ]
        except library.NVMLError:
            return ""
    return f"GPU {gpus[0].number} cannot access the memory of GPU {', '.join(refused)}" if refused else ""


def _visible_handles(library: Any, visible: str | None) -> list[Any]:
    """Return NVML's handles of the GPUs named by ``visible``, the value of CUDA_VISIBLE_DEVICES (None: all GPUs). As in
    CUDA, the first name that is no GPU ends the list, and a repeated one empties it. Raises NoGpu if it is empty."""
    by_uuid = visible is not None and all(name.strip().startswith(_UUID) for name in visible.split(","))
    handles, uuids = _known(library, partly=by_uuid)
    if visible is None:
        return handles
    found: dict[str, Any] = {}
    for name in visible.split(","):
        handle = _named(library, name.strip(), handles, uuids)
        if handle is None:
            break
        if (uuid := str(library.nvmlDeviceGetUUID(handle))) in found:
            raise NoGpu(f"{VISIBLE}={visible} names a GPU twice, for which CUDA hides all")
        found[uuid] = handle
    if not found and by_uuid:
        raise GpuGone(f"{VISIBLE}={visible} names a GPU that the driver does not show")
    if not found:
        raise NoGpu(f"{VISIBLE}={visible} hides all GPUs")
    return list(found.values())


def _known(library: Any, partly: bool) -> tuple[list[Any], list[str]]:
    """Return NVML's handles of all GPUs and their UUIDs; ``partly``: without those that do not answer, which CUDA does
    not touch either where UUIDs name others. Raises NoGpu if there is none at all."""
    handles, uuids = [], []
    count = library.nvmlDeviceGetCount()
    if not count and not partly:
        raise NoGpu("the NVIDIA driver shows no GPU")
    for index in range(count):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            uuids.append(str(library.nvmlDeviceGetUUID(handle)))
        except library.NVMLError:
            if not partly:
                raise
        else:
            handles.append(handle)
    return handles, uuids


def _named(library: Any, name: str, handles: list[Any], uuids: list[str]) -> Any:
    """Return the handle of the GPU called ``name``: a number, the beginning of a UUID that only one GPU has, or the
    UUID of a part of a GPU (MIG). None if there is no such GPU."""
    if match := _ORDINAL.match(name):
        return handles[int(match[0])] if int(match[0]) < len(handles) else None
    if name.startswith("GPU-"):
        alike = [index for index, uuid in enumerate(uuids) if uuid.startswith(name)]
        return handles[alike[0]] if len(alike) == 1 else None
    if name.startswith("MIG-"):
        with contextlib.suppress(library.NVMLError):
            return library.nvmlDeviceGetHandleByUUID(name)
    return None


def _describe(library: Any, index: int, handle: Any) -> Gpu:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    whole = handle
    with contextlib.suppress(library.NVMLError):  # only a part of a GPU (MIG) belongs to another handle
        whole = library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    major, minor = library.nvmlDeviceGetCudaComputeCapability(whole)
    return Gpu(
        index=index,
        uuid=str(library.nvmlDeviceGetUUID(handle)),
        name=str(library.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        capability=(int(major), int(minor)),
        number=int(library.nvmlDeviceGetIndex(whole)),
    )
