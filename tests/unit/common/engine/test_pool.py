"""The pool of an engine on a GPU: tensors over memory that hand-offs export."""

from __future__ import annotations

import pytest
import torch

from common.core.errors import StartError
from common.engine.pool import cuda_store, make_store
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.cuda import CudaMemory
from common.kv.storage.device_calls import DeviceBuffer, DeviceFailed
from common.kv.storage.slab import SlabStore
from common.kv.storage.tensors import KvStore
from common.platform.device import probe_cpu
from tests.fakes.device_calls import FakeDevice
from tests.fakes.stand_in_gpu import stand_in

LAYOUT, CPU = KvLayout((LayerLayout(2, 8, 4),) * 2, "float32", 16), torch.device("cpu")


def test_tensors_lie_over_the_memory_that_is_handed_over() -> None:
    device = FakeDevice()
    store = cuda_store(LAYOUT, 4, CPU, device)
    memory = store.memory
    assert isinstance(memory, CudaMemory) and (store.blocks, store.layout) == (memory.blocks, memory.layout)
    slots = torch.tensor([3, 3]), torch.tensor([0, 1])
    key, value = torch.ones(2, 2, 8), torch.full((2, 2, 4), 2.0)
    store.write(1, key, value, slots)
    bytes_of = device.array(memory.slab).view("float32").reshape(4, -1)
    assert bytes_of[3].sum() == 2 * 16 + 2 * 8 * 2 and not bytes_of[:3].any()
    del bytes_of
    store.close()
    assert not device.allocated


def test_too_little_memory_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeDevice, size: int) -> DeviceBuffer:
        raise DeviceFailed("cuMemCreate: out of memory (2)")

    monkeypatch.setattr(FakeDevice, "allocate", refuse)
    with pytest.raises(StartError, match="out of memory"):
        cuda_store(LAYOUT, 4, CPU, FakeDevice())


def test_each_device_has_its_kind_of_pool() -> None:
    for machine, kind in ((probe_cpu(), KvStore), (stand_in(), SlabStore)):
        store = make_store(LAYOUT, 4, machine, CPU)
        assert type(store) is kind and store.blocks == 4
        store.close()
