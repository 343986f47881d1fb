"""The pool of a tensor-parallel worker on GPUs, one slab per rank, over every link that can carry it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from common.core.errors import StartError
from common.core.ids import new_incarnation
from common.kv.convert import Bytes, converted
from common.kv.layout import KvDtype, KvLayout, LayerLayout
from common.kv.storage.base import Places, Table, canonical_rows
from common.kv.storage.cuda import AttachedCudaBlocks, CudaMemory, DeviceDescriptors, OutOfReach, RankSlab
from common.kv.storage.device_calls import DeviceFailed
from common.kv.storage.host import KvMemory
from kvtransfer.frames import FrameHeader, Rectangle
from kvtransfer.links.choice import SendLinks
from kvtransfer.links.shm import PoolConnection, PoolEndpoint
from tests.fakes.device_calls import FakeDevice
from tests.unit.kvtransfer.links.test_links import CELLS, LAYERS, SOURCE_TABLE, TARGET_TABLES, TRANSFER, halves

BLOCKS = 8


class GroupPool(CudaMemory):
    """A pool in the memory of fake GPUs, one per rank, which tests can also read and write at once."""

    def __init__(self, layout: KvLayout, ranks: int) -> None:
        self.device = FakeDevice()
        self.slabs_of_others = [RankSlab(layout.one_shard(), BLOCKS, FakeDevice()) for _ in range(1, ranks)]
        super().__init__(layout, BLOCKS, self.device, [each.export() for each in self.slabs_of_others])
        copies = max(1, ranks // layout.head_shards)
        addresses = [slab.address for slab in self._ranks]
        self.everywhere = [Places.of(layout, addresses[first::copies]) for first in range(copies)]
        """The places of all heads, and of their copies."""

    def read(self, table: Table, tokens: range, layers: range) -> Bytes:
        (same, *copies) = [self._bytes(places, table, tokens, layers) for places in self.everywhere]
        assert all((each == same).all() for each in copies), "ranks with the same heads differ"
        return same

    def write(self, table: Table, tokens: range, layers: range, data: Bytes) -> None:
        for places in self.everywhere:
            addresses, sizes = canonical_rows(self.layout, places, self.blocks, table, tokens, layers)
            ends = np.cumsum(sizes)
            for address, size, end in zip(addresses.tolist(), sizes.tolist(), ends.tolist(), strict=True):
                ctypes.memmove(address, data.ctypes.data + end - size, size)

    def _bytes(self, places: Places, table: Table, tokens: range, layers: range) -> Bytes:
        addresses, sizes = canonical_rows(self.layout, places, self.blocks, table, tokens, layers)
        pieces = zip(addresses.tolist(), sizes.tolist(), strict=True)
        return np.frombuffer(b"".join(ctypes.string_at(*piece) for piece in pieces), np.uint8)

    def close(self) -> None:
        super().close()
        assert not self.device.allocated, "memory of the device, pinned or attached, was not freed"
        for each in self.slabs_of_others:
            each.close()


def make_pool(ranks: int, on_gpu: bool, dtype: KvDtype, block_size: int, shards: int) -> Any:
    layout = KvLayout(LAYERS, dtype, block_size, shards)
    return GroupPool(layout, ranks) if on_gpu else KvMemory(layout, BLOCKS)


PAIRS = {
    "cuda-ipc": ((2, True, 2), (2, True, 2)),
    "cuda-ipc, 2 to 1": ((2, True, 2), (1, True, 1)),
    "cuda-ipc, 1 to 4": ((1, True, 1), (4, True, 2)),
    "cuda-ipc, whole heads on both": ((2, True, 1), (2, True, 1)),
    "pinned, 2 to 4": ((2, True, 2), (4, True, 2)),
    "from-gpu": ((2, True, 2), (1, False, 2)),
    "to-gpu": ((1, False, 1), (2, True, 2)),
    "shm-to-gpu": ((1, False, 2), (4, True, 2)),
}
"""Ranks, whether they are on GPUs, and shards of the sender's and of the receiver's pool, by link."""


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, ...]]:
    link = request.param.partition(",")[0]
    (ranks, on_gpu, shards), receiver = PAIRS[request.param]
    source = make_pool(ranks, on_gpu, "float32", 16, shards)
    target = make_pool(*receiver[:2], "float32" if link == "cuda-ipc" else "bfloat16", 32, receiver[2])
    with contextlib.ExitStack() as closing:
        closing.callback(target.close)
        closing.callback(source.close)
        yield source, target, *halves(link, source, target, closing)


@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_exactly_the_named_cells_arrive_in_every_slab(pair: tuple[Any, ...], cells: Rectangle) -> None:
    source, target, sending, receiving = pair
    table, layers = TARGET_TABLES[32], range(len(LAYERS))
    data = np.random.default_rng(7).integers(0, 256, source.layout.range_bytes(0, 3, 96), np.uint8)
    source.write(SOURCE_TABLE, range(96), layers, data)
    source.generations[:] = 5
    blank = np.full(target.layout.range_bytes(0, 3, 96), 0xEE, np.uint8)
    target.write(table, range(96), layers, blank)
    while (made := sending.payload(TRANSFER, SOURCE_TABLE, cells)) is None:
        pass
    payload, size, checksum = made
    header = FrameHeader(TRANSFER, 0, cells, size, checksum)
    while receiving.place(header, memoryview(bytes(payload)), table) is None:
        pass
    sent = source.read(SOURCE_TABLE, cells.tokens, cells.layers)
    wanted = converted(sent, source.layout.dtype, target.layout.dtype)
    assert (target.read(table, cells.tokens, cells.layers) == wanted).all()
    target.write(table, cells.tokens, cells.layers, np.full(wanted.nbytes, 0xEE, np.uint8))
    assert (target.read(table, range(96), layers) == 0xEE).all(), "something else was written, too"


def test_every_slab_of_a_pool_is_handed_out() -> None:
    """A rank whose heads another rank has, too, is not: a receiver reads each head once."""
    layout = KvLayout(LAYERS, "float32", 16, 2)
    pool, reader = GroupPool(layout, 4), FakeDevice()
    endpoint = PoolEndpoint(pool, new_incarnation())
    connection = PoolConnection(endpoint.address)
    while (handed := connection.answer()) is None:
        pass
    assert isinstance(handed, DeviceDescriptors) and len(handed.slabs) == 2
    there = AttachedCudaBlocks(handed, layout, BLOCKS, reader)
    pool.write(SOURCE_TABLE, range(90), range(3), np.arange(layout.range_bytes(0, 3, 90)).astype(np.uint8))
    landing = reader.allocate(layout.range_bytes(0, 3, 90))
    there.gather(SOURCE_TABLE, range(90), range(3), landing)
    reader.wait(reader.record_event())
    assert (reader.array(landing) == pool.read(SOURCE_TABLE, range(90), range(3))).all()
    reader.free(landing)
    there.close()
    for each in (connection, endpoint, pool):
        each.close()
    assert not reader.allocated


@pytest.mark.parametrize("wrong", ["count", "size"])
def test_slabs_that_cannot_be_right_are_not_attached(wrong: str) -> None:
    layout = KvLayout(LAYERS, "float32", 16, 2)
    pool, reader = GroupPool(layout, 2), FakeDevice()
    handed = pool.descriptors()
    if wrong == "count":
        layout = KvLayout((LayerLayout(6, 4, 4),) * 3, "float32", 16, 3)
    with pytest.raises(ValueError, match="slab"):
        AttachedCudaBlocks(handed, layout, BLOCKS if wrong == "count" else BLOCKS + 1, reader)
    assert not reader.allocated
    pool.close()


def test_a_gpu_that_is_out_of_reach_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise DeviceFailed("peer access is not supported")

    layout, device = KvLayout(LAYERS, "float32", 16, 2), FakeDevice()
    other = RankSlab(layout.one_shard(), BLOCKS, FakeDevice())
    monkeypatch.setattr(device, "attach", refuse)
    with pytest.raises(OutOfReach, match="cuda:fake cannot reach the memory of the GPU of rank 1"):
        CudaMemory(layout, BLOCKS, device, [other.export()])
    assert not device.allocated
    other.close()


def test_nccl_between_workers_is_refused_where_ranks_use_it() -> None:
    pool = GroupPool(KvLayout(LAYERS, "float32", 16, 2), 2)
    with pytest.raises(StartError, match="cannot carry the KV of a tensor-parallel worker"):
        SendLinks(pool, new_incarnation(), "nccl", "127.0.0.1")
    pool.close()
