"""The KV pools of a tensor-parallel worker on GPUs: one slab per rank, on its GPU, with the rank's heads.

Rank 0 maps the slabs of all ranks, so that hand-offs see one pool (:mod:`common.kv.storage.cuda`). In steps each rank
uses its own slab only. What changes whole blocks is sent to all ranks, each of which does it in the order of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from common.core.errors import StartError
from common.engine.pool import device_calls, too_little_memory
from common.engine.rank_messages import Channel, Slab
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout
from common.kv.storage.cuda import CudaMemory, OutOfReach, RankSlab
from common.kv.storage.device_calls import DeviceFailed
from common.kv.storage.fp8 import Fp8Codec
from common.kv.storage.slab import SlabStore


class LeadingStore(SlabStore):
    """Rank 0's slab, whose blocks are copied and zeroed together with those of the other ranks. ``layout`` is that of
    the whole pool."""

    def __init__(
        self,
        layout: KvLayout,
        blocks: int,
        device: torch.device,
        slab: torch.Tensor,
        memory: Any,
        channel: Channel,
        codec: Fp8Codec | None = None,
    ) -> None:
        super().__init__(layout.one_shard(), blocks, device, slab, memory, codec)
        self.layout, self._channel = layout, channel

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        if copies := list(copies):
            self._channel.copy_blocks(copies)
            super().copy_blocks(copies)

    def clear(self, blocks: Iterable[int]) -> None:
        if blocks := list(blocks):
            self._channel.clear_blocks(blocks)
            super().clear(blocks)


def leading_store(
    layout: KvLayout, blocks: int, where: torch.device, channel: Channel, codec: Fp8Codec | None
) -> LeadingStore:
    """Return rank 0's slab of a pool of ``blocks`` blocks, once every rank has made its own. ``codec`` is that of its
    heads, for a pool in fp8. Raises StartError if this GPU has too little memory, or cannot reach that of another
    rank's."""
    calls = device_calls(where)
    slabs = channel.make_slabs(blocks)
    try:
        memory = CudaMemory(layout, blocks, calls, slabs)
    except OutOfReach as error:
        raise StartError(
            f"the GPUs of this worker cannot share a KV pool of {len(slabs) + 1} slabs",
            str(error),
            "use GPUs that can access each other's memory (nvidia-smi topo -p2p r), or --tensor-parallel-size 1",
        ) from None
    except DeviceFailed as error:
        raise too_little_memory(layout.shard_bytes * blocks, where, error) from None
    tensor = calls.tensor(memory.slab, layout.shard_bytes * blocks)
    return LeadingStore(layout, blocks, where, tensor, memory, channel, codec)


def rank_store(layout: KvLayout, blocks: int, where: torch.device, codec: Fp8Codec | None) -> tuple[SlabStore, Slab]:
    """Return the slab of another rank on ``where``, and what rank 0 needs to map it. ``codec`` is that of its heads,
    for a pool in fp8. Raises StartError if the GPU has too little memory."""
    calls, own = device_calls(where), layout.one_shard()
    try:
        memory = RankSlab(own, blocks, calls)
    except DeviceFailed as error:
        raise too_little_memory(own.block_bytes * blocks, where, error) from None
    tensor = calls.tensor(memory.buffer, own.block_bytes * blocks)
    return SlabStore(own, blocks, where, tensor, memory, codec), Slab(*memory.export())
