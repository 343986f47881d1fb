"""A stand-in for pynvml with GPUs of a test's choice."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from common.platform import gpu

GIB = 1 << 30


class NVMLError(Exception):
    """What the fake raises where NVML would."""


@dataclass
class FakeGpu:
    """A GPU, or with ``parent`` a part of one (MIG)."""

    uuid: str
    name: str = "NVIDIA H200"
    total: int = 140 * GIB
    free: int = 139 * GIB
    capability: tuple[int, int] = (9, 0)
    parent: FakeGpu | None = field(default=None, repr=False)
    apart: tuple[str, ...] = ()
    """UUIDs of GPUs whose memory it cannot write."""
    lost: bool = False
    """Whether it has fallen off the bus: the driver still counts it."""


def two_gpus() -> list[FakeGpu]:
    return [FakeGpu("GPU-aaaa-0001"), FakeGpu("GPU-aabb-0002", "NVIDIA T4", 16 * GIB, 15 * GIB, (7, 5))]


def install(patch: pytest.MonkeyPatch, gpus: list[FakeGpu], parts: list[FakeGpu] | None = None) -> ModuleType:
    """Make ``common.platform.gpu`` find ``gpus`` and, by UUID only, the MIG ``parts``; return the fake module."""
    module: Any = ModuleType("pynvml")

    def by_index(index: int) -> FakeGpu:
        if gpus[index].lost:
            raise NVMLError("GPU is lost")
        return gpus[index]

    def by_uuid(uuid: str) -> FakeGpu:
        for each in (*gpus, *(parts or ())):
            if each.uuid == uuid:
                return each
        raise NVMLError("Not Found")

    def whole_of(part: FakeGpu) -> FakeGpu:
        if part.parent is None:
            raise NVMLError("Invalid Argument")
        return part.parent

    def capability(handle: FakeGpu) -> tuple[int, int]:
        if handle.parent is not None:
            raise NVMLError("Not Supported")
        return handle.capability

    def p2p_status(one: FakeGpu, other: FakeGpu, kind: int) -> int:
        return int(kind == module.NVML_P2P_CAPS_INDEX_WRITE and other.uuid in one.apart)

    module.NVMLError, module.starts = NVMLError, 0
    module.cuda = 13020
    """What the driver says of the newest CUDA that it serves: 13.2."""
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: module.cuda
    module.NVML_P2P_CAPS_INDEX_READ, module.NVML_P2P_CAPS_INDEX_WRITE = 0, 1
    module.NVML_P2P_STATUS_OK, module.NVML_P2P_STATUS_UNKNOWN = 0, 6
    module.nvmlDeviceGetP2PStatus = p2p_status

    def start() -> None:
        module.starts += 1

    def stop() -> None:
        module.starts -= 1

    module.nvmlInit, module.nvmlShutdown = start, stop
    module.nvmlDeviceGetCount = lambda: len(gpus)
    module.nvmlDeviceGetHandleByIndex = by_index
    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetUUID = lambda handle: handle.uuid
    module.nvmlDeviceGetIndex = gpus.index
    module.nvmlDeviceGetName = lambda handle: handle.name
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=handle.total, free=handle.free)
    module.nvmlDeviceGetCudaComputeCapability = capability
    module.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = whole_of
    patch.setitem(sys.modules, "pynvml", module)
    patch.setattr(gpu, "_DRIVERS", (Path("/"),))
    return module
