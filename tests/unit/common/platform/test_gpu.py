"""Which GPUs are visible, for every form of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.platform import gpu
from common.platform.gpu import Gpu, GpuGone, NoGpu, visible_gpus
from tests.fakes import nvml
from tests.fakes.nvml import GIB, FakeGpu, NVMLError, two_gpus

H200 = Gpu(0, "GPU-aaaa-0001", "NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0))


def test_every_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = nvml.install(monkeypatch, two_gpus())
    assert visible_gpus({}) == [H200, Gpu(1, "GPU-aabb-0002", "NVIDIA T4", 16 * GIB, 15 * GIB, (7, 5), 1)]
    assert fake.starts == 0, "NVML is shut down again"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", ["GPU-aaaa-0001"]),
        ("1,0", ["GPU-aabb-0002", "GPU-aaaa-0001"]),
        (" 1 , 0 ", ["GPU-aabb-0002", "GPU-aaaa-0001"]),
        ("1,7,0", ["GPU-aabb-0002"]),  # what is no GPU ends the list
        ("1,-1,0", ["GPU-aabb-0002"]),
        ("0,NoDevFiles", ["GPU-aaaa-0001"]),
        ("GPU-aabb-0002", ["GPU-aabb-0002"]),
        ("GPU-aab,GPU-aaa", ["GPU-aabb-0002", "GPU-aaaa-0001"]),
        ("GPU-aabb,0", ["GPU-aabb-0002", "GPU-aaaa-0001"]),
        ("1,GPU-aa", ["GPU-aabb-0002"]),  # the beginning of two UUIDs names neither
        ("MIG-0001", ["MIG-0001"]),
        ("MIG-0002", None),
        ("GPU-a", None),
        ("", None),
        ("-1", None),
        ("2", None),
        ("0,0", None),
        ("0,GPU-aaaa-0001", None),
    ],
)
def test_cuda_visible_devices_is_obeyed(
    visible: str, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = two_gpus()
    nvml.install(monkeypatch, gpus, [FakeGpu("MIG-0001", "NVIDIA H200 MIG 1g.18gb", 16 * GIB, parent=gpus[0])])
    if expected is None:
        with pytest.raises(NoGpu, match=f"CUDA_VISIBLE_DEVICES={visible}"):
            visible_gpus({"CUDA_VISIBLE_DEVICES": visible})
    else:
        found = visible_gpus({"CUDA_VISIBLE_DEVICES": visible})
        assert [each.uuid for each in found] == expected
        assert [each.index for each in found] == list(range(len(expected)))


def test_a_lost_gpu_hides_the_others_unless_they_are_named_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = two_gpus()
    gpus[0].lost = True
    nvml.install(monkeypatch, gpus)
    for visible in ({}, {"CUDA_VISIBLE_DEVICES": "1"}):
        with pytest.raises(NoGpu, match="GPU is lost"):
            visible_gpus(visible)
    (found,) = visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aabb-0002"})
    assert (found.uuid, found.index, found.number) == ("GPU-aabb-0002", 0, 1)
    with pytest.raises(GpuGone, match="GPU-aaaa-0001 names a GPU that the driver does not show"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aaaa-0001"})


def test_a_part_of_a_gpu_has_the_capability_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = two_gpus()
    nvml.install(monkeypatch, gpus, [FakeGpu("MIG-0001", total=16 * GIB, capability=(0, 0), parent=gpus[0])])
    (part,) = visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-0001"})
    assert part.capability == (9, 0) and part.total_bytes == 16 * GIB


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_DRIVERS", (Path("/no/such/file"),))
    with pytest.raises(NoGpu, match="no NVIDIA driver"):
        visible_gpus({})


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = nvml.install(monkeypatch, two_gpus())

    def mismatch(*_: object) -> None:
        raise NVMLError("Driver/library version mismatch")

    monkeypatch.setattr(fake, "nvmlDeviceGetMemoryInfo", mismatch)
    with pytest.raises(NoGpu, match="version mismatch"):
        visible_gpus({})
    assert fake.starts == 0
    monkeypatch.setattr(fake, "nvmlInit", mismatch)
    with pytest.raises(NoGpu, match="version mismatch"):
        visible_gpus({})


def test_without_a_gpu_or_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch, [])
    with pytest.raises(NoGpu, match="shows no GPU"):
        visible_gpus({})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoGpu, match="nvidia-ml-py"):
        visible_gpus({})


def test_cuda_counts_as_nvidia_smi_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    gpu.number_by_bus()
    assert gpu.os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
