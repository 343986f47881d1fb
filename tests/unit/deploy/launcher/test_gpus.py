"""Which worker gets which GPU, and what a start on GPUs checks."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common.checkpoint.files import open_checkpoint
from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError
from common.platform import device
from common.platform.device import choose
from common.platform.gpu import Gpu
from deploy.cli import main as cli
from deploy.launcher import fleet as planning
from deploy.launcher import preflight, process, supervisor
from deploy.launcher.child import ChildProcess
from deploy.launcher.gpus import Place, deal, deal_ranks
from deploy.launcher.screen import Lines
from tests.fakes import nvml
from tests.fakes.checkpoint import fake_checkpoint
from tests.fakes.nvml import FakeGpu, two_gpus

GIB = 1 << 30


def gpus(count: int, total: int = 80 * GIB, free: int = 79 * GIB) -> list[Gpu]:
    return [Gpu(index, f"GPU-{index}", "test", total, free, (9, 0)) for index in range(count)]


@pytest.mark.parametrize(
    ("there_are", "workers", "expected"),
    [
        (0, 2, [("cpu", 1), ("cpu", 1)]),
        (1, 2, [("cuda:0", 2), ("cuda:0", 2)]),
        (2, 2, [("cuda:0", 1), ("cuda:1", 1)]),
        (2, 3, [("cuda:0", 2), ("cuda:1", 1), ("cuda:0", 2)]),
        (4, 2, [("cuda:0", 1), ("cuda:1", 1)]),
        (2, 0, []),
    ],
)
def test_gpus_are_divided_among_the_workers(there_are: int, workers: int, expected: list[tuple[str, int]]) -> None:
    places = deal(gpus(there_are), workers)
    assert [(place.device, place.sharing) for place in places] == expected
    assert all((place.gpu is None) == (place.device == "cpu") for place in places)


def test_new_workers_go_where_the_fewest_are() -> None:
    places = deal(gpus(3), 3, ["GPU-0", "GPU-0", "GPU-2"])
    assert [(place.device, place.sharing) for place in places] == [("cuda:1", 2), ("cuda:1", 2), ("cuda:2", 2)]


@pytest.mark.parametrize(
    ("there_are", "ranks", "running", "expected"),
    [
        (4, [2, 2], [], ["GPU-0,GPU-1", "GPU-2,GPU-3"]),
        (4, [2, 1, 1], [], ["GPU-0,GPU-1", "GPU-2", "GPU-3"]),
        (4, [1, 2, 1, 1], [], ["GPU-2", "GPU-0,GPU-1", "GPU-3", "GPU-2"]),
        (3, [1, 2], [], ["GPU-2", "GPU-0,GPU-1"]),
        (6, [2, 1], ["GPU-1,GPU-2", "GPU-0"], ["GPU-3,GPU-4", "GPU-5"]),
        (4, [1, 1], ["GPU-0,GPU-1", "GPU-2"], ["GPU-3", "GPU-2"]),
        (2, [1, 1, 1], [], ["GPU-0", "GPU-1", "GPU-0"]),
        (0, [2, 1], [], ["", ""]),
    ],
)
def test_each_rank_has_a_gpu_to_itself(
    there_are: int, ranks: list[int], running: list[str], expected: list[str]
) -> None:
    assert [place.visible for place in deal_ranks(gpus(there_are), ranks, running)] == expected


@pytest.mark.parametrize(
    ("there_are", "ranks", "running", "why"),
    [
        (3, [2, 2], [], "workers of 2 and 2 ranks need 4 GPUs: .* there are 3;"),
        (2, [2, 1], [], "workers of 2 and 1 ranks need 3 GPUs: .* there are 2;"),
        (4, [2], ["GPU-0,GPU-1", "GPU-3"], "need 2 GPUs: .* there are 4, of which 3 have workers already"),
        (2, [1], ["GPU-0,GPU-1"], "need 1 GPUs: .* there are 2, of which 2 have workers already"),
    ],
)
def test_too_few_gpus_for_the_ranks_are_counted_in_words(
    there_are: int, ranks: list[int], running: list[str], why: str
) -> None:
    with pytest.raises(StartError) as caught:
        deal_ranks(gpus(there_are), ranks, running)
    assert re.search(why, f"{caught.value.what}: {caught.value.why}; {caught.value.todo}")


def test_up_gives_each_rank_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--device cuda:N`` names the first GPU to use; the others follow it."""
    nvml.install(monkeypatch, [FakeGpu(f"GPU-{number}") for number in range(4)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    config = UpConfig(model="m", prefill_tensor_parallel_size=2)
    for where, expected in (("auto", ["GPU-0,GPU-1", "GPU-2"]), ("cuda:1", ["GPU-1,GPU-2", "GPU-3"])):
        config = replace(config, device=where)
        fleet = planning.plan(config, planning.allowed_gpus(config)[0])
        assert [member.place.visible for member in fleet] == expected


def test_a_start_of_ranks_checks_each_of_their_gpus(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(fake_checkpoint(tmp_path / "m")))
    config = UpConfig(model="m", max_model_len=64, tensor_parallel_size=2)
    one, other = gpus(2)
    preflight.check_memory(checkpoint, config, 1, [Place("cuda:0", (one, other))])
    full = replace(other, free_bytes=1 << 10)
    with pytest.raises(StartError, match="too little memory for one full-length request"):
        preflight.check_memory(checkpoint, config, 1, [Place("cuda:0", (one, full))])


def test_up_gives_each_worker_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch, two_gpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    config = UpConfig(model="m", prefill=1, decode=2)
    fleet = planning.plan(config, device.usable_gpus(config.device)[0])
    assert [(member.label, member.place.device, member.place.sharing) for member in fleet] == [
        ("prefill-0", "cuda:0", 2), ("decode-0", "cuda:1", 1), ("decode-1", "cuda:0", 2)
    ]  # fmt: skip
    one = replace(config, device="cuda:1")
    assert {member.place.device for member in planning.plan(one, device.usable_gpus(one.device)[0])} == {"cuda:1"}
    assert {member.place.device for member in planning.plan(replace(config, device="cpu"))} == {"cpu"}


@pytest.fixture
async def workers(monkeypatch: pytest.MonkeyPatch) -> list[ChildProcess]:
    """The workers of a supervisor of a machine with two GPUs, one on each; none is started."""
    nvml.install(monkeypatch, two_gpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    config = UpConfig(model="m", lend_cores=False)
    running = supervisor.Supervisor(config, planning.plan(config, device.usable_gpus("auto")[0]), Lines())
    running._prepare()
    return running._children.workers


@pytest.mark.processes
async def test_a_restarted_worker_gets_the_same_gpu(
    workers: list[ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def start(spec: process.ChildSpec) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        seen.put_nowait((spec.config.device, spec.environment["CUDA_VISIBLE_DEVICES"]))
        reports = asyncio.StreamReader()
        reports.feed_data(b'{"ready": {}}\n{"error": {"what": "the GPU has failed", "why": "", "todo": ""}}\n')
        reports.feed_eof()
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", "raise SystemExit(71)", stdout=asyncio.subprocess.PIPE
        )
        return child, reports

    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr("deploy.launcher.child.BACKOFF_S", 0.01)
    for worker, uuid in zip(workers, ("GPU-aaaa-0001", "GPU-aabb-0002"), strict=True):
        keeping = asyncio.create_task(worker.keep())
        for _ in range(3):
            assert await seen.get() == ("cuda", uuid)
        worker.leave()
        await keeping
        while not seen.empty():
            seen.get_nowait()


@pytest.mark.parametrize("wanted", ["cuda", "auto"])
def test_a_worker_whose_gpu_is_gone_does_not_compute_elsewhere(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the GPU that has the number now, nor on the CPU. The worker on the other GPU does not notice."""
    there = two_gpus()
    nvml.install(monkeypatch, there)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aabb-0002")
    assert choose(wanted)[0].shown == "GPU 1 (NVIDIA T4)"
    there[0].lost = True
    assert choose(wanted)[0].shown == "GPU 1 (NVIDIA T4)"
    del there[0]
    assert choose(wanted)[0].shown == "GPU 0 (NVIDIA T4)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa-0001")
    with pytest.raises(StartError, match=r"the GPU of this process is gone: .*GPU-aaaa-0001") as caught:
        choose(wanted)
    assert "nvidia-smi" in caught.value.todo


async def test_scaling_on_a_machine_that_has_lost_its_gpus_does_not_use_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml.install(monkeypatch, two_gpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    config, there = UpConfig(model="m", lend_cores=False), device.usable_gpus("auto")[0]
    running = supervisor.Supervisor(config, planning.plan(config, there), Lines())
    running._prepare()
    scaling = running._scaling
    (coming,), leaving = scaling._difference({"prefill": 1, "decode": 2}, there)
    assert (coming.label, coming.visible_gpus, leaving) == ("decode-1", "GPU-aaaa-0001", [])
    assert isinstance(coming.config, WorkerConfig) and coming.config.workers_on_gpu == 2
    with pytest.raises(StartError, match="no GPU for more workers"):
        scaling._difference({"prefill": 1, "decode": 2}, [])
    assert scaling._difference({"prefill": 1, "decode": 0}, [])[1][0].label == "decode-0"


@pytest.mark.parametrize("wanted", ["cuda:9999", "gpu", "cuda:", "cuda:-1", ""])
def test_a_device_that_cannot_be_is_refused(wanted: str) -> None:
    from common.config.engine import DEVICE

    with pytest.raises(ValueError):
        DEVICE.parse(wanted)
    assert DEVICE.parse("CUDA:3") == "cuda:3"


def test_a_start_on_gpus_checks_their_memory_not_this_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(fake_checkpoint(tmp_path / "m")))
    config = UpConfig(model="m", max_model_len=64)
    monkeypatch.setattr("common.platform.memory.free_memory", lambda: 1)
    preflight.check_memory(checkpoint, config, 2, deal(gpus(1), 2))
    with pytest.raises(StartError, match="too little GPU memory for weights"):
        preflight.check_memory(checkpoint, config, 2, deal(gpus(1, total=1 << 20), 2))
    with pytest.raises(StartError, match="cannot start 2 workers"):
        preflight.check_memory(checkpoint, replace(config, kv_cache_memory=1 << 20), 2, [Place()] * 2)


def test_a_worker_by_itself_checks_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(fake_checkpoint(tmp_path / "m")))
    small = two_gpus()
    small[1].total = small[1].free = 1 << 20
    nvml.install(monkeypatch, small)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    config = WorkerConfig(model="m", role="prefill", max_model_len=64)
    preflight.check_worker(checkpoint, config)
    with pytest.raises(StartError, match="too little GPU memory"):
        preflight.check_worker(checkpoint, replace(config, device="cuda:1"))
    with pytest.raises(StartError, match="there is no cuda:2"):
        preflight.check_worker(checkpoint, replace(config, device="cuda:2"))


@pytest.mark.parametrize("command", ["up", "prefill"])
def test_a_gpu_that_is_demanded_and_not_there_is_refused_in_words(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("common.platform.gpu._DRIVERS", (tmp_path / "none",))
    assert cli.main([command, str(fake_checkpoint(tmp_path / "m")), "--device", "cuda"]) == 1
    said = capsys.readouterr().err
    assert "error: --device cuda cannot be used" in said and "why: no NVIDIA driver is loaded" in said
    assert "Traceback" not in said
