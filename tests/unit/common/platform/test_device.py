"""The device that a worker computes on, its element type, and its cores."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.core.errors import StartError
from common.platform import device, gpu
from common.platform.device import Device, choose, choose_dtype, choose_ranks, probe_gpu, usable_gpus
from common.platform.gpu import Gpu
from common.platform.memory import GIB
from tests.fakes import nvml
from tests.fakes.nvml import GIB as NVML_GIB
from tests.fakes.nvml import FakeGpu, two_gpus
from tests.pace import scaled


def machine(*, bf16: bool = True, fp16: bool = False) -> Device:
    return Device("cpu", "test", (0,), bf16, fp16, GIB)


def on_gpu(*capability: int) -> Device:
    return probe_gpu(Gpu(0, "GPU-1", "test", 16 * GIB, 15 * GIB, (capability[0], capability[1])))


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "where", "expected"),
    [
        ("auto", "bfloat16", machine(), "bfloat16"),
        ("auto", "bfloat16", machine(bf16=False), "float32"),
        ("auto", "float32", machine(), "float32"),
        ("auto", "float16", machine(), "float32"),
        ("auto", "float16", machine(fp16=True), "float16"),
        ("bfloat16", "float32", machine(bf16=False), "bfloat16"),
        ("auto", "float16", on_gpu(9, 0), "float16"),
        ("auto", "bfloat16", on_gpu(9, 0), "bfloat16"),
        ("auto", "bfloat16", on_gpu(8, 0), "bfloat16"),
        ("auto", "bfloat16", on_gpu(7, 5), "float16"),
        ("auto", "float32", on_gpu(7, 5), "float32"),
    ],
)
def test_dtype_follows_the_checkpoint_where_the_machine_can(
    wanted: str, checkpoint: str, where: Device, expected: str
) -> None:
    chosen, reason = choose_dtype(wanted, checkpoint, where)
    assert chosen == expected and reason


def test_the_machine_is_probed() -> None:
    found = device.probe_cpu()
    assert found.kind == found.address == "cpu" and found.name and found.free_bytes > 0
    assert set(found.cpus) == os.sched_getaffinity(0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, and a torch with CUDA."""
    nvml.install(monkeypatch, two_gpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)


@pytest.mark.parametrize(
    ("wanted", "visible", "expected"),
    [
        ("auto", None, "cuda:0 NVIDIA H200"),
        ("cuda", None, "cuda:0 NVIDIA H200"),
        ("cuda:1", None, "cuda:1 NVIDIA T4"),
        ("auto", "1", "cuda:0 NVIDIA T4"),
        ("cuda:0", "GPU-aabb-0002", "cuda:0 NVIDIA T4"),
    ],
)
def test_a_gpu_is_chosen(
    gpus: None, wanted: str, visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, reason = choose(wanted)
    assert f"{found.address} {found.name}" == expected and found.kind == "cuda" and reason
    assert found.free_bytes == (139 if "H200" in expected else 15) * GIB
    assert found.has_bf16 == ("H200" in expected) and found.has_fp16


def test_all_visible_gpus_are_usable_or_the_one_that_is_named(gpus: None) -> None:
    assert [each.index for each in usable_gpus("cuda")[0]] == [0, 1]
    assert [each.index for each in usable_gpus("cuda:1")[0]] == [1]
    assert usable_gpus("cpu") == ([], "")


def test_a_gpu_that_is_not_there_is_refused_in_words(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError) as caught:
        choose("cuda:2")
    assert "cuda:2" in caught.value.what and "cuda:0 (NVIDIA H200), cuda:1 (NVIDIA T4)" in caught.value.why
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartError, match="hides all GPUs"):
        choose("cuda")
    found, reason = choose("auto")
    assert found.kind == "cpu" and "hides all GPUs" in reason


def test_a_torch_without_cuda_computes_on_the_cpu_or_is_refused(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    found, reason = choose("auto")
    assert found.kind == "cpu" and "NVIDIA H200" in reason and "without CUDA" in reason
    with pytest.raises(StartError, match="without CUDA"):
        choose("cuda:0")


@pytest.mark.parametrize(("built", "served", "fits"), [(13, 12080, False), (13, 13000, True), (None, 12080, True)])
def test_a_driver_too_old_for_torch_is_told_from_one_that_serves_it(
    gpus: None, built: int | None, served: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cuda_of_torch", lambda: built)
    monkeypatch.setattr(sys.modules["pynvml"], "cuda", served)
    found, reason = choose("auto")
    assert found.kind == ("cuda" if fits else "cpu")
    if fits:
        return
    assert "CUDA 13, and the NVIDIA driver serves CUDA 12 at most" in reason
    with pytest.raises(StartError) as caught:
        choose("cuda:0")
    assert "newer driver" in caught.value.todo and "--device cpu" in caught.value.todo


def test_without_a_driver_the_cpu_needs_no_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_DRIVERS", (Path("/no/such/file"),))
    found, reason = choose("auto")
    assert (found.kind, reason) == ("cpu", "")
    with pytest.raises(StartError, match="no NVIDIA driver"):
        choose("cuda")


def test_a_torch_with_cuda_is_recognised_by_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert not device.has_cuda()
    (package / "lib" / "libtorch_cuda.so").touch()
    assert device.has_cuda()
    assert device.cuda_of_torch() is None
    version = package / "version.py"
    version.write_text("__all__ = ['cuda']\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    assert device.cuda_of_torch() == 13
    version.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert device.cuda_of_torch() is None


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ({"cpu family": "25", "model": "17", "stepping": "0"}, "cpu family 25, model 17, stepping 0"),
        ({"CPU implementer": "0x41", "CPU part": "0xd40"}, "CPU implementer 0x41, CPU part 0xd40"),
        ({}, ""),
    ],
)
def test_cpu_model_distinguishes_processors_of_same_name(
    cpuinfo: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_cpuinfo", cpuinfo.get)
    assert device.cpu_model() == expected


@pytest.mark.processes
def test_a_worker_is_pinned_with_its_threads() -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, torch; from common.platform.device import pin\n"
        f"assert pin([{core}]) == 1 and os.sched_getaffinity(0) == {{{core}}} and torch.get_num_threads() == 1\n"
        "assert pin(threads=2) == 2 and torch.get_num_threads() == 2 and 0 < int(os.environ['GOMP_SPINCOUNT']) < 10000"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))


def install_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu) -> None:
    nvml.install(monkeypatch, list(gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)


@pytest.mark.parametrize(
    ("wanted", "visible", "expected"),
    [
        ("auto", None, ["GPU-0", "GPU-2"]),  # something computes on the second one
        ("cuda", "3,2,0", ["GPU-3", "GPU-2"]),
        ("cuda", "1,2", ["GPU-1", "GPU-2"]),
        ("cuda:1", None, ["GPU-1", "GPU-2"]),
        ("cuda:2", None, ["GPU-2", "GPU-3"]),
    ],
)
def test_each_rank_gets_a_gpu(
    monkeypatch: pytest.MonkeyPatch, wanted: str, visible: str | None, expected: list[str]
) -> None:
    used = FakeGpu("GPU-1", free=20 * NVML_GIB)
    install_gpus(monkeypatch, FakeGpu("GPU-0"), used, FakeGpu("GPU-2"), FakeGpu("GPU-3"))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machines, _ = choose_ranks(wanted, 2)
    assert [each.gpu.uuid for each in machines if each.gpu is not None] == expected
    assert choose_ranks(wanted, 1)[0] == [choose(wanted)[0]]


@pytest.mark.parametrize(
    ("wanted", "ranks", "words"),
    [
        ("auto", 3, "3 ranks need 3 GPUs: visible are 2: cuda:0 .NVIDIA H200., cuda:1 .NVIDIA T4.; .*size 2 or less"),
        ("cuda:1", 2, "2 ranks need 2 GPUs: visible from cuda:1 on are 1: cuda:1 .NVIDIA T4."),
        ("cuda:2", 2, "there is no cuda:2"),
        ("cuda", 2, "the ranks of a worker need GPUs of one kind: it would get cuda:0 .NVIDIA H200., cuda:1"),
    ],
)
def test_gpus_that_are_too_few_or_differ_are_refused_in_words(gpus: None, wanted: str, ranks: int, words: str) -> None:
    with pytest.raises(StartError) as caught:
        choose_ranks(wanted, ranks)
    assert re.search(words, f"{caught.value.what}: {caught.value.why}; {caught.value.todo}")


def test_gpus_that_do_not_reach_each_other_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(monkeypatch, FakeGpu("GPU-0", apart=("GPU-2",)), FakeGpu("GPU-1"), FakeGpu("GPU-2"))
    assert len(choose_ranks("cuda", 2)[0]) == 2
    with pytest.raises(StartError, match="GPU 0 cannot access the memory of GPU 2") as caught:
        choose_ranks("cuda", 3)
    assert "nvidia-smi topo -p2p r" in caught.value.todo


def test_what_the_driver_does_not_say_about_reach_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> int:
        raise nvml.NVMLError("Not Supported")

    module = nvml.install(monkeypatch, [FakeGpu("GPU-0"), FakeGpu("GPU-1")])
    monkeypatch.setattr(module, "nvmlDeviceGetP2PStatus", unknown)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert len(choose_ranks("cuda", 2)[0]) == 2


def test_ranks_on_parts_of_gpus_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakeGpu("GPU-0")
    nvml.install(monkeypatch, [whole], [FakeGpu(f"MIG-{number}", parent=whole) for number in range(2)])
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0,MIG-1")
    with pytest.raises(StartError, match=r"need whole GPUs: MIG-0, MIG-1 are parts of GPUs \(MIG\)"):
        choose_ranks("cuda", 2)


def test_all_ranks_are_on_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "_DRIVERS", (tmp_path / "none",))
    assert [each.kind for each in choose_ranks("auto", 4)[0]] == ["cpu"]
