"""``tandem doctor``: exit codes, JSON, and advice about a workload from saved costs of steps."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.simulate.cost import CostModel, source
from common import builtin
from common.checkpoint.files import open_checkpoint
from common.config.doctor import DoctorConfig, parse_workload
from common.platform.gpu import Gpu
from deploy.cli import main as cli
from deploy.doctor import machine, workload
from deploy.launcher import cores

PORTS = ("--port", "0", "--control-port", "0")
COST = CostModel(
    streams=((0, 0.002), (64, 0.02)), context=0.0, token=0.0005, square=0.0, kv_bytes=1000, layers=10, threads=1,
    dtype="float32", error=0.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait to see whether this machine is busy (it is, with tests), and simulate few requests."""
    monkeypatch.setattr(machine, "busy_share", lambda _: 0.0)
    monkeypatch.setattr(workload, "ROUNDS", 1)
    monkeypatch.setattr(workload, "REQUESTS", 40)


@pytest.fixture
def costs(tmp_path: Path) -> str:
    """Return a file of costs of the built-in model."""
    path = tmp_path / "cost.json"
    origin = source(builtin.NAME, open_checkpoint(str(builtin.path())).fingerprint)
    path.write_text(json.dumps(origin | COST.as_json()))
    return str(path)


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["doctor", "--json", *PORTS, *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["bad"] + found["warnings"] + found["good"] == len(found["findings"])
    assert (code == 1) == (found["bad"] > 0)
    return code, found


def test_text_and_json_have_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys)
    assert code == 0 and found["workload"] is None
    subjects = list(dict.fromkeys(each["subject"] for each in found["findings"]))
    assert subjects == [
        "software", "processor", "numa", "memory", "shared memory", "open files", "real time", "kernels", "load", "gpu",
        "checkpoint", "cache", "addresses", "ports", "keys", "clock", "system",
    ]  # fmt: skip
    assert cli.main(["doctor", *PORTS]) == 0
    text = capsys.readouterr().out
    assert all(subject in text for subject in subjects) and " bad, " in text.splitlines()[-1]


def test_something_bad_ends_in_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, found = doctor(capsys, "--control-port", str(taken.getsockname()[1]))
    assert code == 1 and [each["subject"] for each in found["findings"] if each["level"] == "bad"] == ["ports"]
    code, found = doctor(capsys, str(tmp_path / "no-model"))
    assert [each["subject"] for each in found["findings"] if each["level"] == "bad"] == ["checkpoint"]
    code, found = doctor(capsys, "--url", "http://127.0.0.1:9")
    assert [each["subject"] for each in found["findings"] if each["level"] == "bad"] == ["system"]


def test_disaggregation_is_advised_where_it_pays(
    capsys: pytest.CaptureFixture[str], costs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1,000 tokens take half a second: on colocated workers they stall the streams."""
    monkeypatch.setattr(cores, "usable_cores", lambda: (0, 1, 2, 3))
    words = ("--cost", costs, "--no-lend-cores", "--goodput", "ttft:4000,tpot:10")
    code, found = doctor(capsys, "--workload", "1000:50@7", *words)
    advice = found["workload"]
    assert code == 0 and advice["disaggregate"] is True and advice["pools"] in ("3p1d", "2p2d")
    assert set(advice["systems"]) == {"1p3d", "2p2d", "3p1d", "4c"}
    assert advice["systems"][advice["pools"]]["inside"] > advice["systems"]["4c"]["inside"]
    texts = [each["text"] for each in found["findings"] if each["subject"] == "workload"]
    assert texts[0].startswith(f"4 workers: Disaggregate, as {advice['pools']}")
    code, found = doctor(capsys, "--workload", "10:50@0.2", *words)
    assert code == 0 and found["workload"]["disaggregate"] is False and found["workload"]["pools"] == "4c"


def test_a_load_that_is_too_high_is_a_warning(capsys: pytest.CaptureFixture[str], costs: str) -> None:
    code, found = doctor(capsys, "--workload", "1000:100@100", "--cost", costs, "--goodput", "ttft:1,tpot:1")
    assert code == 0 and found["workload"]["pools"] is None
    (warned,) = [each for each in found["findings"] if each["subject"] == "workload" and each["level"] == "warning"]
    assert "too high for these cores" in warned["text"]


def test_what_cannot_be_simulated(
    capsys: pytest.CaptureFixture[str], costs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = doctor(capsys, "--workload", "1m:1@1", "--cost", costs)
    assert code == 1 and "nothing to plan for" in found["findings"][-1]["text"]
    config, console = DoctorConfig(model=""), Console(quiet=True)
    gpus = [Gpu(0, "GPU-1", "H100", 1, 1, (9, 0))]
    (said,) = workload.advise(config, parse_workload("1:1@1"), gpus, console).findings
    assert said.level == "warning" and "tandem bench compare" in said.do
    monkeypatch.setattr(cores, "usable_cores", lambda: (0,))
    (said,) = workload.advise(config, parse_workload("1:1@1"), [], console).findings
    assert said.level == "good" and "one core" in said.text


def test_the_plan_is_that_of_this_configuration() -> None:
    config = DoctorConfig(model="", num_kv_blocks=77, block_size=32, max_num_seqs=3, lend_cores=False)
    shape = parse_workload("100:10@2")
    plan = workload.plan_of(config, shape, 9, None)  # type: ignore[arg-type]
    assert (plan.threads, plan.systems) == (2, "1p3d,2p2d,3p1d,4c")
    assert (plan.num_kv_blocks, plan.block_size, plan.max_num_seqs, plan.lend_cores) == (77, 32, 3, False)
    assert (plan.random_input_len, plan.random_output_len, plan.request_rate) == (100, 10, 2.0)
    assert len(os.sched_getaffinity(0)) >= 1


@pytest.mark.parametrize("word", ["1:1", "x", "1:1@0"])
def test_a_workload_that_is_none(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--workload", word]) == 1
    assert "such as 1024:128@2" in capsys.readouterr().err
