"""What workers report of their GPUs, as /metrics, /admin/workers and tandem status show it, and who leaves for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.config.status import StatusConfig
from common.core.errors import StartError
from common.core.gpu import GpuState
from common.core.ids import WorkerName
from common.net.messages import MAX_TEXT, Generate, Goodbye, Gpus
from coordinator.cluster.absent_workers import MOST, AbsentWorkers
from coordinator.cluster.registry import WorkerState
from deploy.cli import status
from tests.unit.coordinator.fake_cluster import FakeCluster, open_cluster, until

H100 = GpuState(
    0, "GPU-0123", "H100", 87, 60 << 30, 80 << 30, 412_000, 700_000, 64, 1755, 2619, 4, 18, 1 << 20, 1 << 21, 3, 0, 1,
    0, False, False, None, None, 0, {31: 2},
)  # fmt: skip
BARE = GpuState(1, "GPU-4567", "GeForce", temperature=40)
FAULT = "GPU 0 (H100) reports Xid 79: it has fallen off the bus; restart the machine"


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[FakeCluster]:
    async with open_cluster(model, "colocated", "colocated") as running:
        yield running


async def report(cluster: FakeCluster, gpus: Gpus, worker: int = 0) -> None:
    """Let a worker send a report, and wait until it is recorded."""
    said = cluster.workers[worker]
    handle = cluster.services.registry.get(said.hello.incarnation)
    assert handle is not None
    said.say(gpus)
    await until(lambda: handle.gpus == gpus.gpus, "the report arrives")


async def samples(cluster: FakeCluster) -> dict[str, float]:
    async with cluster.client.get(f"{cluster.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("tandem_gpu_"))
    return {name.removeprefix("tandem_gpu_"): float(value) for name, value in pairs}


async def shown(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and the output of tandem status."""
    code = await asyncio.to_thread(status.run, StatusConfig(url=cluster.url))
    return code, " ".join(capsys.readouterr().out.split())


async def test_every_reading_is_a_gauge_and_what_a_card_lacks_is_absent(cluster: FakeCluster) -> None:
    await report(cluster, Gpus((H100, BARE)))
    found = await samples(cluster)
    at = 'gpu="0",worker="colocated-0"'
    assert found == {
        'info{gpu="0",name="H100",uuid="GPU-0123",worker="colocated-0"}': 1,
        'info{gpu="1",name="GeForce",uuid="GPU-4567",worker="colocated-0"}': 1,
        f"utilization_ratio{{{at}}}": 0.87,
        f"memory_used_bytes{{{at}}}": 60 << 30,
        f"memory_total_bytes{{{at}}}": 80 << 30,
        f"power_watts{{{at}}}": 412,
        f"power_limit_watts{{{at}}}": 700,
        f"temperature_celsius{{{at}}}": 64,
        'temperature_celsius{gpu="1",worker="colocated-0"}': 40,
        f'clock_hertz{{clock="sm",{at}}}': 1755e6,
        f'clock_hertz{{clock="memory",{at}}}': 2619e6,
        'throttled{gpu="0",reason="power_cap",worker="colocated-0"}': 1,
        **{
            f'throttled{{gpu="0",reason="{reason}",worker="colocated-0"}}': 0
            for reason in ("hardware_slowdown", "sync_boost", "software_thermal", "hardware_thermal", "power_brake")
        },
        f"nvlinks_active{{{at}}}": 18,
        f'nvlink_bytes{{direction="sent",{at}}}': 1 << 20,
        f'nvlink_bytes{{direction="received",{at}}}': 1 << 21,
        'ecc_errors{gpu="0",kind="corrected",worker="colocated-0"}': 3,
        'ecc_errors{gpu="0",kind="uncorrected",worker="colocated-0"}': 0,
        'remapped_rows{gpu="0",kind="corrected",worker="colocated-0"}': 1,
        'remapped_rows{gpu="0",kind="uncorrected",worker="colocated-0"}': 0,
        f"row_remap_pending{{{at}}}": 0,
        f"row_remap_failed{{{at}}}": 0,
        'xid_errors{gpu="0",worker="colocated-0",xid="31"}': 2,
    }


async def test_without_a_report_there_is_no_sample_and_nothing_about_gpus(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await samples(cluster) == {}
    code, text = await shown(cluster, capsys)
    assert code == 0 and "colocated-0 colocated ready cpu 0% of 4,096 tokens 0 0" in text and "GPU" not in text


async def test_status_shows_what_is_known_of_each_gpu(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    await report(cluster, Gpus((H100, BARE, GpuState(2, "GPU-89ab", "blind"))))
    code, text = await shown(cluster, capsys)
    assert code == 0
    assert (
        "colocated-0: GPU 0 H100: 87 % busy, 60.0 GiB of 80.0 GiB, 412 of 700 W, 64 °C, clocks sm 1755, memory 2619 "
        "MHz, throttled by power_cap, 18 NVLinks, ECC errors 3 corrected, 0 uncorrected, Xid errors 31 (2 x)"
    ) in text
    assert "colocated-0: GPU 1 GeForce: 40 °C" in text
    assert "colocated-0: GPU 2 blind: no readings, NVML is silent" in text


async def test_a_worker_with_an_unhealthy_gpu_gets_no_new_requests(cluster: FakeCluster) -> None:
    """Even while its loop is stuck in a step, and it cannot say Goodbye."""
    await report(cluster, Gpus((H100,), FAULT))
    handle = cluster.services.registry.get(cluster.workers[0].hello.incarnation)
    assert handle is not None and handle.state is WorkerState.DRAINING
    for _ in range(4):
        response, _ = await cluster.post("/v1/completions", {"prompt": [9, 8, 7], "max_tokens": 2})
        assert response.status == 200
    assert not cluster.workers[0].got(Generate) and len(cluster.workers[1].got(Generate)) == 4


async def test_a_worker_that_left_its_gpu_is_absent_in_words_until_it_is_back(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    left = cluster.workers[0]
    left.rejoins = False
    left.say(Goodbye(left.hello.incarnation, FAULT))
    absent = cluster.services.registry.absent
    await until(lambda: dict(absent), "its Goodbye arrives")
    code, text = await shown(cluster, capsys)
    assert code == 1 and re.search(rf"colocated-0 is absent for \d s: {re.escape(FAULT)}", text)
    assert "restarted" not in text
    absent.reported(cluster.dispatcher.gateway.clock)(left.hello.name, f"exited ({FAULT})", 80.0)
    _, body = await cluster.get("/admin/workers")
    (shown_as,) = body["absent"]
    assert shown_as["id"] == "colocated-0" and FAULT in shown_as["why"] and 60 < shown_as["restart_in_s"] <= 80
    _, text = await shown(cluster, capsys)
    assert re.search(rf"exited \({re.escape(FAULT)}\), restarted in \d\d s", text)
    left.stop()
    await cluster.add("colocated", name="colocated-0")
    assert not dict(absent) and (await shown(cluster, capsys))[0] == 0


async def test_status_says_why_it_cannot_show_anything(model: Path) -> None:
    async with open_cluster(model, "colocated", admin_api_key="a" * 32) as cluster:
        with pytest.raises(StartError) as refused:
            await asyncio.to_thread(status.run, StatusConfig(url=cluster.url, api_key="b" * 32))
    assert "another key" in refused.value.why and "admin key" in refused.value.todo
    with pytest.raises(StartError, match="cannot reach"):
        status.run(StatusConfig(url=cluster.url))


def test_usual_goodbyes_are_not_listed_and_the_list_is_bounded() -> None:
    absent = AbsentWorkers()
    for why in ("drained", "stopped"):
        absent.left(WorkerName("decode-0"), why, 0.0)
    assert not dict(absent)
    for number in range(MOST + 5):
        absent.left(WorkerName(f"decode-{number}"), "x" * MAX_TEXT, float(number))
    assert next(iter(dict(absent))) == "decode-5" and len(dict(absent)) == MOST
    absent.ended(WorkerName("decode-9"), "exited", 1.0, 100.0)
    assert dict(absent)[WorkerName("decode-9")].since_s == 9.0, "it has been absent since it left"
    absent.reported(lambda: 0.0)(WorkerName("decode-9"), "", 0.0)
    assert WorkerName("decode-9") not in dict(absent)
