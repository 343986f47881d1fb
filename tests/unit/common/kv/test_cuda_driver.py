"""The calls into libcuda, made to a stand-in, and the hash that a GPU computes with torch."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from common.kv.device_hash import device_hash
from common.kv.storage import cuda_driver
from common.kv.storage.cuda_driver import CudaDriver, hashed
from common.kv.storage.device_calls import DeviceBuffer, DeviceFailed

READ, READ_WRITE, POSIX_FD = 1, 3, 1
GRANULARITY = 4096


class Libcuda:
    """Records the calls; ``fails`` maps a function to the status that it returns."""

    def __init__(self, **fails: int) -> None:
        self.fails, self.calls = fails, list[tuple[str, tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name == "cuMemcpyBatchAsync_v2":
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name in self.fails:
                return self.fails[name]
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = 1
            elif name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = GRANULARITY
            elif name == "cuMemAddressReserve":
                arguments[0]._obj.value = 0x7000_0000
            elif name == "cuMemExportToShareableHandle":
                arguments[0]._obj.value = 77
            elif name == "cuGetErrorString":
                arguments[1]._obj.value = b"what went wrong"
            return 0

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


def access(library: Libcuda) -> int:
    return int(library.named("cuMemSetAccess")[-1][2]._obj.flags)


def test_a_slab_is_exported_as_a_descriptor_and_attached_read_only() -> None:
    library = Libcuda()
    driver = CudaDriver(0, lambda: 0, library)
    slab = driver.allocate(GRANULARITY + 1)
    assert slab.size == 2 * GRANULARITY and access(library) == READ_WRITE
    assert driver.export(slab) == 77 and library.named("cuMemExportToShareableHandle")[0][2] == POSIX_FD
    attached = driver.attach(77, slab.size)
    assert access(library) == READ, "a receiver cannot write the sender's memory"
    driver.free(attached)
    driver.attach(77, slab.size, writable=True)
    assert access(library) == READ_WRITE, "a rank of the same worker can"
    assert [len(library.named(name)) for name in ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease")] == [1, 1, 1]


@pytest.mark.parametrize("failing", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_what_was_made_before_a_failure_is_released(failing: str) -> None:
    library = Libcuda(**{failing: 2})
    driver = CudaDriver(0, lambda: 0, library)
    with pytest.raises(DeviceFailed, match=rf"{failing}: what went wrong \(2\)"):
        driver.allocate(1)
    steps = ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"].index(failing)
    undone = [len(library.named(name)) for name in ("cuMemRelease", "cuMemAddressFree", "cuMemUnmap")]
    assert undone == [1, int(steps > 0), int(steps > 1)]


def test_copies_wait_for_the_engine_and_events_are_polled() -> None:
    library = Libcuda()
    driver = CudaDriver(0, lambda: 5, library)
    mark = driver.mark()
    assert library.named("cuEventRecord")[0][1].value == 5, "on the engine's stream"
    pieces = np.array([1, 2], np.int64)
    driver.copy_async(pieces, pieces + 10, pieces, mark)
    assert len(library.named("cuStreamWaitEvent")) == 1 and len(library.named("cuMemcpyAsync")) == 2
    copied = library.named("cuMemcpyAsync")[1]
    assert [each.value for each in copied[:3]] == [12, 2, 2], "target, source, size"
    event = driver.record_event()
    library.fails["cuEventQuery"] = 600
    assert not driver.query(event)
    library.fails["cuEventQuery"] = 700
    with pytest.raises(DeviceFailed, match="700"):
        driver.query(event)
    library.fails.clear()
    assert driver.query(event)


class Newer(Libcuda):
    """A driver of CUDA 13, whose call for many copies returns ``status``."""

    def __init__(self, status: int = 0) -> None:
        super().__init__()
        self.status, self.batches = status, list[list[list[int]]]()

    def cuMemcpyBatchAsync_v2(self, *arguments: Any) -> int:
        count = arguments[3].value
        columns = [ctypes.cast(each, ctypes.POINTER(ctypes.c_uint64 * count)).contents for each in arguments[:3]]
        self.batches.append([list(each) for each in columns])
        assert (arguments[4]._obj.source_order, arguments[5]._obj.value, arguments[6].value) == (1, 0, 1)
        return self.status


def test_several_pieces_are_one_call_of_a_newer_driver() -> None:
    library, pieces = Newer(), np.array([1, 2, 3], np.int64)
    driver = CudaDriver(0, lambda: 5, library)
    driver.copy_async(pieces, pieces + 10, pieces + 100)
    assert library.batches == [[[11, 12, 13], [1, 2, 3], [101, 102, 103]]], "targets, sources, sizes"
    assert not library.named("cuMemcpyAsync")


def test_pieces_are_copied_one_by_one_if_the_driver_refuses_them_together(caplog: pytest.LogCaptureFixture) -> None:
    library, pieces = Newer(status=801), np.array([1, 2, 3], np.int64)
    driver = CudaDriver(0, lambda: 5, library)
    for copies in (3, 6):
        driver.copy_async(pieces, pieces + 10, pieces)
        assert len(library.named("cuMemcpyAsync")) == copies
    assert len(library.batches) == 1 and len(caplog.messages) == 1 and "801" in caplog.text


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose streams do nothing, and whose GPU is the CPU."""
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *_, **__: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)


def test_many_aligned_pieces_of_device_memory_are_copied_by_a_kernel(on_cpu: None) -> None:
    library, copied = Libcuda(), list[tuple[torch.Tensor, int]]()
    driver = CudaDriver(0, lambda: 5, library, lambda *given: copied.append(given))
    at = 32 * np.arange(8, dtype=np.int64)
    driver.copy_async(at, at + 4096, np.full(8, 16), driver.mark())
    ((pieces, longest),) = copied
    assert pieces.tolist() == [at.tolist(), (at + 4096).tolist(), [16] * 8] and longest == 16
    assert len(library.named("cuStreamWaitEvent")) == 1 and not library.named("cuMemcpyAsync")


@pytest.mark.parametrize("case", ["few", "an odd address", "an odd size", "into pinned memory", "without Triton"])
def test_other_pieces_are_left_to_the_copy_engines(case: str, on_cpu: None) -> None:
    library = Libcuda()
    kernel = None if case == "without Triton" else lambda *_: pytest.fail("copied by the kernel")
    driver = CudaDriver(0, lambda: 5, library, kernel)
    count = 7 if case == "few" else 8
    sources, sizes = 32 * np.arange(count, dtype=np.int64), np.full(count, 16)
    targets = sources + 4096
    if case == "an odd address":
        sources[3] += 8
    elif case == "an odd size":
        sizes[7] = 12
    elif case == "into pinned memory":
        driver._pinned.add((4096, 8192))
    driver.copy_async(sources, targets, sizes)
    assert len(library.named("cuMemcpyAsync")) == count


def test_a_kernel_that_cannot_be_launched_is_a_failure_of_the_device(on_cpu: None) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    driver, at = CudaDriver(0, lambda: 5, Libcuda(), refused), 16 * np.arange(8, dtype=np.int64)
    with pytest.raises(DeviceFailed, match=r"copy of 8 pieces: .*illegal memory access"):
        driver.copy_async(at, at + 4096, np.full(8, 16))


def test_a_hash_for_which_memory_is_short_is_a_failure_of_the_device(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")

    driver, data = CudaDriver(0, lambda: 5, Libcuda()), np.zeros(64, np.uint8)
    memory = DeviceBuffer(0, 64, data)
    driver.hash_async(memory, 64, memory)
    assert int(data[:8].view(np.uint64)[0]) == device_hash(np.zeros(64, np.uint8))
    monkeypatch.setattr(cuda_driver, "hashed", short)
    with pytest.raises(DeviceFailed, match="hash of 64 bytes: CUDA out of memory"):
        driver.hash_async(memory, 64, memory)


def test_a_gpu_without_shared_memory_is_refused() -> None:
    library = Libcuda()
    find = library.__getattr__

    class Old(Libcuda):
        def __getattr__(self, name: str) -> Any:
            if name == "cuDeviceGetAttribute":
                return lambda *_: 0
            return find(name)

    with pytest.raises(DeviceFailed, match="cannot share memory"):
        CudaDriver(0, lambda: 0, Old())


def test_the_structures_have_the_sizes_of_cuda_h() -> None:
    sizes = [ctypes.sizeof(each) for each in (cuda_driver._AllocationProp, cuda_driver._AccessDesc)]
    assert sizes == [32, 12] and ctypes.sizeof(cuda_driver._CopyAttributes) == 24


@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096, 100_003])
def test_torch_computes_the_hash_that_the_protocol_specifies(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    total = 0
    for index, word in enumerate(np.pad(data, (0, -size % 8)).view("<u8").tolist(), 1):  # as PROTOCOL.md says
        x = word ^ index * 0x9E3779B97F4A7C15 % 2**64
        y = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (y ^ y >> 27) * 0x94D049BB133111EB % 2**64
        total += z ^ z >> 31
    expected = (total + size * 0x9E3779B97F4A7C15) % 2**64 or 1
    assert device_hash(data) == expected
    assert int(hashed(torch.from_numpy(data))) % 2**64 == expected


def test_a_change_anywhere_changes_the_hash() -> None:
    data = np.arange(64, dtype=np.uint8)
    hashes = {device_hash(data), device_hash(data[:-1]), device_hash(data[::-1].copy()), device_hash(data[8:])}
    for at in range(len(data)):
        changed = data.copy()
        changed[at] ^= 1
        hashes.add(device_hash(changed))
    swapped = data.copy()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    assert len(hashes | {device_hash(swapped)}) == 4 + len(data) + 1
