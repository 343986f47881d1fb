"""The machine's resources, and the defaults that follow from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.platform import device
from common.platform.device import GIB, Device, choose_dtype, kv_budget


def machine(*, kind: str = "cpu", bf16: bool = True, fp16: bool = False) -> Device:
    return Device(kind, "test", (0,), bf16, fp16, GIB)


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "where", "expected"),
    [
        ("auto", "bfloat16", machine(), "bfloat16"),
        ("auto", "bfloat16", machine(bf16=False), "float32"),
        ("auto", "float32", machine(), "float32"),
        ("auto", "float16", machine(), "float32"),
        ("auto", "float16", machine(fp16=True), "float16"),
        ("auto", "float16", machine(kind="cuda"), "float16"),
        ("bfloat16", "float32", machine(bf16=False), "bfloat16"),
    ],
)
def test_dtype_follows_the_checkpoint_where_the_machine_can(
    wanted: str, checkpoint: str, where: Device, expected: str
) -> None:
    chosen, reason = choose_dtype(wanted, checkpoint, where)
    assert chosen == expected and reason


def test_kv_budget_is_a_quarter_shared_and_bounded() -> None:
    assert kv_budget(1, 8 * GIB) == 2 * GIB
    assert kv_budget(2, 8 * GIB) == GIB
    assert kv_budget(1, 100 * GIB) == 4 * GIB
    assert 0 < kv_budget(4) <= 4 * GIB


def test_the_machine_is_probed() -> None:
    found = device.probe_cpu()
    assert found.kind == "cpu" and found.name and found.free_bytes > 0
    assert set(found.cpus) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"cpu family": "25", "model": "17", "stepping": "0"}, "cpu family 25, model 17, stepping 0"),
        ({"CPU implementer": "0x41", "CPU part": "0xd40"}, "CPU implementer 0x41, CPU part 0xd40"),
        ({}, ""),
    ],
)
def test_processors_of_one_name_are_told_apart(
    told: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_cpuinfo", told.get)
    assert device.cpu_model() == expected


def test_a_control_group_limits_free_memory(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 5\ninactive_file 50000\n"
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert device._v2_level(tmp_path) == 350_000
    (tmp_path / "memory.max").write_text("max")
    assert device._v2_level(tmp_path) is None
    assert device._v2_level(tmp_path / "nothing") is None


@pytest.mark.processes
def test_a_worker_is_pinned_with_its_threads() -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, torch; from common.platform.device import pin\n"
        f"assert pin([{core}]) == 1 and os.sched_getaffinity(0) == {{{core}}} and torch.get_num_threads() == 1\n"
        "assert pin(threads=2) == 2 and torch.get_num_threads() == 2 and 0 < int(os.environ['GOMP_SPINCOUNT']) < 10000"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
