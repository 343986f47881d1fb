"""A pool as one tensor holds what the pool in shared memory holds after the same calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.core.ids import BlockId
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.interface import KvStorage
from common.kv.storage.slab import SlabStore
from common.kv.storage.tensors import KvStore

LAYOUT = KvLayout((LayerLayout(2, 8, 4), LayerLayout(1, 4, 4)), "bfloat16", 16)
BLOCKS = 6


@pytest.fixture
def stores() -> Iterator[tuple[KvStorage, KvStorage]]:
    both = KvStore(KvMemory(LAYOUT, BLOCKS)), SlabStore(LAYOUT, BLOCKS, torch.device("cpu"))
    yield both
    for store in both:
        store.close()


def test_the_same_calls_leave_the_same_keys_and_values(stores: tuple[KvStorage, KvStorage]) -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([5, 5, 0, 3]), torch.tensor([15, 0, 7, 7])
    rows = [
        [torch.randn(4, layer.kv_heads, dim, generator=generator).bfloat16() for dim in (layer.k_dim, layer.v_dim)]
        for layer in LAYOUT.layers
    ]
    for store in stores:
        assert store.blocks == BLOCKS and store.device.type == "cpu" and store.dtype == torch.bfloat16
        for layer, (key, value) in enumerate(rows):
            store.write(layer, key, value, slots)
        store.copy_blocks([BlockCopy(BlockId(5), BlockId(1)), BlockCopy(BlockId(1), BlockId(2))])
        store.clear([3])
    shared, slab = stores
    for layer in range(len(LAYOUT.layers)):
        assert torch.equal(shared.k(layer), slab.k(layer)) and torch.equal(shared.v(layer), slab.v(layer))
        assert slab.k(layer)[2, 15].any() and not slab.k(layer)[3].any()
        blocks = torch.tensor([2, 4])
        for one, other in zip(shared.gather(layer, blocks), slab.gather(layer, blocks), strict=True):
            assert torch.equal(one, other) and one.shape[0] == 32


def test_a_slab_of_other_memory_is_zeroed_used_in_place_and_closed_with_the_store() -> None:
    closed: list[bool] = []

    class Memory:
        def close(self) -> None:
            closed.append(True)

    slab = torch.full((BLOCKS * LAYOUT.block_bytes,), 255, dtype=torch.uint8)
    store = SlabStore(LAYOUT, BLOCKS, torch.device("cpu"), slab, Memory())
    assert not slab.any()
    store.k(1)[2].fill_(1)
    assert slab.view(BLOCKS, -1)[2].any() and not slab.view(BLOCKS, -1)[3].any()
    store.close()
    assert closed == [True]
