"""Makes the KV pool of an engine, on the device that it computes on."""

from __future__ import annotations

from functools import cache

import torch

from common.core.errors import StartError
from common.engine.faults import memory_of
from common.kv.budget import human_bytes
from common.kv.layout import KvLayout
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.cuda_driver import torch_driver
from common.kv.storage.device_calls import DeviceCalls, DeviceFailed
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage
from common.kv.storage.slab import SlabStore
from common.kv.storage.tensors import KvStore
from common.platform.device import Device


def make_store(
    layout: KvLayout, blocks: int, machine: Device, where: torch.device, codec: Fp8Codec | None = None
) -> KvStorage:
    """Return a pool of ``blocks`` blocks on ``where``, the device of ``machine``, in fp8 with ``codec``. Raises
    StartError if a GPU has too little memory."""
    if machine.gpu is None:
        return KvStore(KvMemory(layout, blocks), codec=codec)
    if where.type != "cuda":
        return SlabStore(layout, blocks, where, codec=codec)
    return cuda_store(layout, blocks, where, device_calls(where), codec)


def cuda_store(
    layout: KvLayout, blocks: int, where: torch.device, calls: DeviceCalls, codec: Fp8Codec | None = None
) -> KvStorage:
    """Return tensors on ``where`` over a pool that ``calls`` allocates there, and that hand-offs can export. Raises
    StartError if there is too little memory."""
    size = layout.block_bytes * blocks
    try:
        memory = CudaMemory(layout, blocks, calls)
    except DeviceFailed as error:
        raise too_little_memory(size, where, error) from None
    return SlabStore(layout, blocks, where, calls.tensor(memory.slab, size), memory, codec)


def too_little_memory(size: int, where: torch.device, error: DeviceFailed) -> StartError:
    """Return the error for ``size`` bytes of KV that could not be allocated."""
    return StartError(
        f"cannot allocate {human_bytes(size)} of KV on {where}",
        f"{error}; {memory_of(where)}",
        "lower --kv-cache-memory, --num-kv-blocks or --gpu-memory-utilization, or free the GPU",
    )


@cache
def device_calls(where: torch.device) -> DeviceCalls:
    """Return the driver of a GPU, opened once per process."""
    return torch_driver(where.index or 0)
