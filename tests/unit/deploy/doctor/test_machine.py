"""The checks of a machine say what is missing for speed or for many clients, and what to do."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.config.doctor import DoctorConfig
from common.core.errors import StartError
from common.platform import memory, threads
from common.platform.gpu import Gpu
from deploy.doctor import machine
from deploy.doctor.finding import Finding, bad, good, lines, run, warning
from deploy.launcher import cores

CONFIG = DoctorConfig(model="")


def levels(findings: Iterable[Finding]) -> list[str]:
    found = list(findings)
    assert all(each.do for each in found if each.level != "good"), "each problem comes with what to do"
    return [each.level for each in found]


def test_the_checks_of_this_machine_find_nothing_bad() -> None:
    checks = (
        machine.software, machine.processor, machine.ram, lambda: machine.numa(CONFIG),
        lambda: machine.shared_memory(()), lambda: machine.real_time(CONFIG), lambda: machine.clock(False),
    )  # fmt: skip
    for check in checks:
        found = levels(check())
        assert found and "bad" not in found


@pytest.mark.parametrize(("hard", "level"), [(100, "bad"), (1024, "warning"), (65536, "good"), (-1, "good")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, hard: int, level: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, hard))
    assert levels(machine.files()) == [level]


def test_a_processor_without_vectors_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.device, "cpu_flags", lambda: frozenset(("fpu", "sse2")))
    monkeypatch.setattr(cores, "core_quota", lambda: 0)
    found = list(machine.processor())
    assert levels(found) == ["warning", "good", "warning"]
    assert "no bfloat16" in found[1].text and "may use 0 of" in found[2].text


def test_cores_of_several_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for node, listed in enumerate(("0-1,4", "2-3", "9")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{listed}\n")
    (tmp_path / "node7").mkdir()  # without memory or cores
    monkeypatch.setattr(cores, "usable_cores", lambda: (0, 1, 2, 3, 4))
    assert machine.numa_nodes(tmp_path) == {0: (0, 1, 4), 1: (2, 3)}
    monkeypatch.setattr(machine, "numa_nodes", lambda: {0: (0, 1), 1: (2, 3)})
    monkeypatch.setattr(cores, "usable_cores", lambda: (0, 1, 2, 3))
    assert levels(machine.numa(CONFIG)) == ["good"], "two workers with two cores each"
    monkeypatch.setattr(machine, "numa_nodes", lambda: {0: (0, 2), 1: (1, 3)})
    (found,) = machine.numa(CONFIG)
    assert found.level == "warning" and "prefill-0, decode-0 would compute on several" in found.text


def test_real_time_threads_are_needed_where_processes_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for may, count, level in ((True, 2, "good"), (False, 2, "warning"), (False, 3, "good")):
        monkeypatch.setattr(threads, "may_be_real_time", lambda may=may: may)
        monkeypatch.setattr(cores, "usable_cores", lambda count=count: tuple(range(count)))
        assert levels(machine.real_time(CONFIG))[0] == level


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"MemTotal": 8 << 30, "SwapTotal": 1 << 30, "SwapFree": 1 << 30}
    monkeypatch.setattr(machine, "memory_sizes", lambda: sizes)
    monkeypatch.setattr(memory, "free_memory", lambda: 4 << 30)
    monkeypatch.setattr(machine, "_LARGE_PAGES", Path("/nowhere"))
    assert levels(machine.ram())[0] == "good"
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 20)
    sizes["SwapFree"] = 0
    found = list(machine.ram())
    assert levels(found)[:2] == ["warning", "warning"] and "swapped out" in found[1].text


@pytest.mark.torch
def test_kernels_that_are_not_compiled_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.kernels import cpu

    assert "bad" not in levels(machine.kernels())
    monkeypatch.setattr(cpu, "library", lambda: None)
    monkeypatch.setattr(machine.pieces, "are_compiled", lambda: False)
    assert levels(machine.kernels()) == ["warning", "warning"]


def test_a_clock_matters_among_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.is_clock_synchronised() in (True, False, None)
    monkeypatch.setattr(machine, "is_clock_synchronised", lambda: False)
    assert levels(machine.clock(True)) == ["warning"] and levels(machine.clock(False)) == ["good"]


def gpu(**changes: Any) -> Gpu:
    known: dict[str, Any] = {
        "index": 0, "uuid": "GPU-1", "name": "H100", "total_bytes": 80 << 30, "free_bytes": 79 << 30,
        "capability": (9, 0),
    }  # fmt: skip
    return Gpu(**known | changes)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their health is unknown here, where no driver is loaded."""
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: None)
    found = list(machine.graphics([gpu(free_bytes=10 << 30, capability=(7, 5))], ""))
    assert levels(found) == ["bad", "good", "warning", "warning"]
    assert "triton" in found[0].text and "no bfloat16" in found[1].text and "70.0 GiB" in found[2].text
    assert "health is unknown" in found[3].text
    monkeypatch.setattr(machine, "is_driver_loaded", lambda: True)
    assert levels(machine.graphics([], "torch is built without CUDA")) == ["warning"]
    assert levels(machine.graphics([], "")) == ["good"]


def test_a_check_that_fails_is_a_finding_and_the_others_run() -> None:
    def broken() -> Iterator[Finding]:
        yield good("disk", "so far")
        raise PermissionError(13, "denied")

    def refused() -> Iterator[Finding]:
        raise StartError("cannot", "because", "do this")
        yield

    assert [each.level for each in run("disk", broken)] == ["good", "warning"]
    assert list(run("disk", refused)) == [bad("disk", "cannot: because", "do this")]


def test_findings_are_printed_with_what_to_do() -> None:
    found = [good("a", "fine"), warning("a", "slow", "faster"), bad("b", "broken", "mend it")]
    assert list(lines(found)) == [
        "ok    a              fine",
        "warn                 slow",
        "                     -> faster",
        "BAD   b              broken",
        "                     -> mend it",
    ]
