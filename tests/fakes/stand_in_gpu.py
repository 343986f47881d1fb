"""A GPU whose tensors are on the CPU: an engine on it runs all that one on a GPU runs, but for CUDA."""

from __future__ import annotations

import pytest
import torch

from common.engine import loading
from common.kv.layout import KvLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage
from common.kv.storage.slab import SlabStore
from common.platform.device import Device, probe_gpu
from common.platform.gpu import Gpu

MIB = 1 << 20


class StandIn(Device):
    """A GPU as :func:`common.platform.device.choose` returns it, but with the CPU's address."""

    address = "cpu"  # type: ignore[assignment]


def stand_in(total: int = 2048 * MIB, free: int = 2000 * MIB, uuid: str = "GPU-1") -> Device:
    gpu = Gpu(0, uuid, "NVIDIA H200", total, free, (9, 0))
    return StandIn(**vars(probe_gpu(gpu)))


def share_pools(patch: pytest.MonkeyPatch) -> None:
    """Put the pools of stand-ins into shared memory, from which hand-offs take them."""

    def make(layout: KvLayout, blocks: int, machine: Device, where: torch.device, codec: object) -> KvStorage:
        memory = KvMemory(layout, blocks)
        return SlabStore(layout, blocks, where, torch.from_numpy(memory.raw).view(-1), memory)

    patch.setattr(loading, "make_store", make)
