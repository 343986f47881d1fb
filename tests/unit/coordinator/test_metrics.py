"""What the coordinator's metrics count, and that clients cannot make them grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config.coordinator import CoordinatorConfig
from common.core.ids import Incarnation, RequestId
from common.net.messages import STEP_SIZES, Timing
from coordinator.cluster.events import Loss
from coordinator.cluster.registry import Registry
from coordinator.metrics import FRESH_PAGES, MAX_KEY_NAMES, PAGE_S, PATHS, Metrics
from coordinator.pool_metrics import _Sum
from coordinator.routing import paths
from tests.leaked_keys import new_key
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, open_cluster, until


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[FakeCluster]:
    async with open_cluster(model, "prefill", "decode") as running:
        yield running


def value(cluster: FakeCluster, name: str, **labels: str) -> float:
    """Return the present value of a sample; AssertionError if there is none."""
    found = cluster.services.metrics.registry.get_sample_value(name, labels)
    assert found is not None, f"no sample {name} {labels}"
    return found


VLLM = {"model_name": "tiny", "engine": "0"}

# -- requests ---------------------------------------------------------------------------------------------------------


def test_series_of_every_path_exist_from_the_start() -> None:
    assert get_args(paths.Path) == PATHS
    registry = Metrics("tiny", Registry(None)).registry
    for path in PATHS:
        assert registry.get_sample_value("tandem_requests_total", {"outcome": "failed", "path": path}) == 0


async def test_parameters_of_requests_are_observed(cluster: FakeCluster) -> None:
    await cluster.post(CHAT, {**HELLO, "max_tokens": 4, "n": 2})
    await cluster.post(TEXT, {"prompt": "abc", "max_tokens": 6})
    for name, total, count in (
        ("vllm:request_params_n", 3, 2),
        ("vllm:request_params_max_tokens", 10, 2),
        ("vllm:request_generation_tokens", 14, 2),
        ("vllm:request_max_num_generation_tokens", 10, 2),
    ):
        assert (value(cluster, f"{name}_sum", **VLLM), value(cluster, f"{name}_count", **VLLM)) == (total, count), name


async def test_output_tokens_count_before_their_request_ends(model: Path) -> None:
    async with open_cluster(model) as cluster:
        await cluster.add("colocated", step_s=3600.0)  # the second token takes for ever
        asked = asyncio.ensure_future(cluster.post(TEXT, {"prompt": "abc", "max_tokens": 5}))
        await until(lambda: value(cluster, "vllm:generation_tokens_total", **VLLM) == 1, "the first token counts")
        assert not asked.done()
        asked.cancel()
        await cluster.idle()
        assert value(cluster, "vllm:generation_tokens_total", **VLLM) == 1
        assert value(cluster, "vllm:request_generation_tokens_count", **VLLM) == 0


async def test_a_lost_worker_counts(cluster: FakeCluster) -> None:
    lost = {"role": "decode", "how": Loss.MISSING.name.lower()}
    assert value(cluster, "tandem_workers_lost_total", **lost) == 0
    assert value(cluster, "tandem_ready") == 1
    cluster.workers[1].stop()
    await until(lambda: value(cluster, "tandem_workers_lost_total", **lost) == 1, "the loss counts")
    assert value(cluster, "tandem_ready") == 0


def test_links_that_do_not_exist_share_a_label() -> None:
    metrics = Metrics("tiny", Registry(None))
    for link in ("shm", *(f"made-up-{number}" for number in range(100))):
        metrics.transferred(Timing(RequestId(bytes(16)), 1, {"kv_bytes": 2.0}, link))
    sample = metrics.registry.get_sample_value
    assert sample("tandem_kv_transfer_bytes_total", {"transport": "shm"}) == 2
    assert sample("tandem_kv_transfer_bytes_total", {"transport": "other"}) == 200
    assert metrics.page().count(b"tandem_kv_transfer_bytes_total{") == 2


# -- HTTP -------------------------------------------------------------------------------------------------------------


async def test_responses_count_by_endpoint_and_status(cluster: FakeCluster) -> None:
    for path in ("/health", "/health/", "/v1/models/tiny", "/v1/models/other", *(f"/nowhere/{at}" for at in range(20))):
        await cluster.get(path)
    await cluster.post(CHAT, {"messages": 5})
    async with cluster.client.delete(f"{cluster.url}{CHAT}") as response:
        assert response.status == 405
    for endpoint, status, count in (
        ("/health", "200", 2),
        ("/v1/models/{id}", "200", 1),
        ("/v1/models/{id}", "404", 1),
        ("other", "404", 20),
        ("other", "405", 1),
        (CHAT, "400", 1),
    ):
        assert value(cluster, "tandem_http_requests_total", endpoint=endpoint, status=status) == count
    page = cluster.services.metrics.page()
    assert page.count(b"tandem_http_requests_total{") == 6 and b"nowhere" not in page


async def test_a_client_that_leaves_counts_as_499(model: Path) -> None:
    async with open_cluster(model) as cluster:
        await cluster.add("colocated", step_s=3600.0)
        asked = asyncio.ensure_future(cluster.post(CHAT, {**HELLO, "max_tokens": 5}))
        await until(lambda: value(cluster, "vllm:generation_tokens_total", **VLLM) == 1, "it has begun")
        asked.cancel()
        name = "tandem_http_requests_total"
        sample = cluster.services.metrics.registry.get_sample_value
        await until(lambda: sample(name, {"endpoint": CHAT, "status": "499"}) == 1, "it has left")
        assert value(cluster, "tandem_key_requests_total", key_name="none", outcome="aborted") == 1


# -- API keys ---------------------------------------------------------------------------------------------------------


async def test_requests_count_by_the_name_of_their_key(model: Path, tmp_path: Path) -> None:
    first, second, third, flag, admin = (new_key() for _ in range(5))
    file = tmp_path / "keys.txt"
    file.touch(mode=0o600)
    file.write_text(f"# name: team-a\n{first}\n\n# a comment\n{second}\n#name:team-a\n{third}\n")
    keys = {"api_key": flag, "api_key_file": str(file), "admin_api_key": admin}
    async with open_cluster(model, "colocated", **keys) as cluster:
        for key in (first, second, third, flag, admin):
            response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": 2}, headers={"x-api-key": key})
            assert response.status == 200
        response, _ = await cluster.post(CHAT, HELLO, headers={"x-api-key": "unknown"})
        assert response.status == 401
        for name, count in ("team-a", 2), ("key-2", 1), ("api-key", 1), ("admin", 1):
            assert value(cluster, "tandem_key_requests_total", key_name=name, outcome="done") == count
            assert value(cluster, "tandem_key_output_tokens_total", key_name=name) == 2 * count
        page = cluster.services.metrics.page()
        assert page.count(b"tandem_key_requests_total{") == 4
        assert not any(key.encode() in page for key in (first, second, third, flag, admin))


async def test_the_names_of_many_keys_are_bounded(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.touch(mode=0o600)
    keys = [new_key() for _ in range(MAX_KEY_NAMES + 3)]
    file.write_text("\n".join(keys))
    async with open_cluster(model, "colocated", api_key_file=str(file)) as cluster:
        for key in keys:
            await cluster.post(CHAT, {**HELLO, "max_tokens": 1}, headers={"x-api-key": key})
        assert value(cluster, "tandem_key_requests_total", key_name="other", outcome="done") == 3
        assert cluster.services.metrics.page().count(b"tandem_key_requests_total{") == MAX_KEY_NAMES + 1


def test_child_processes_get_the_names(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.touch(mode=0o600)
    key = new_key()
    file.write_text(f"# name: x\n{key}\n")
    config = CoordinatorConfig(model="m", api_key_file=str(file))
    assert config.named_api_keys() == (("x", key),) and config.api_keys() == (key,)


# -- scrapes ----------------------------------------------------------------------------------------------------------


def test_pages_are_generated_at_a_bounded_rate() -> None:
    now = 0.0
    metrics = Metrics("tiny", Registry(None), clock=lambda: now)

    def fresh() -> bool:
        metrics.cut_off("reading")
        count = metrics.registry.get_sample_value("tandem_clients_cut_off_total", {"while": "reading"})
        return f'tandem_clients_cut_off_total{{while="reading"}} {count}'.encode() in metrics.page()

    assert [fresh() for _ in range(FRESH_PAGES + 3)] == [True] * FRESH_PAGES + [False] * 3
    now += PAGE_S
    assert [fresh(), fresh()] == [True, False]
    made = 0
    for _ in range(200):  # ten seconds of an endpoint picker
        now += 0.05
        made += fresh()
    assert 10 / PAGE_S - 1 <= made <= 10 / PAGE_S + 1
    now += 3600
    assert [fresh() for _ in range(FRESH_PAGES + 1)] == [True] * FRESH_PAGES + [False]


async def test_the_page_is_what_an_endpoint_picker_reads(cluster: FakeCluster) -> None:
    """The metric protocol of the Gateway API inference extension, as its reference implementation reads it."""
    await cluster.post(CHAT, {**HELLO, "max_tokens": 4})
    await until(lambda: all(worker.beat for worker in cluster.services.registry), "heartbeats")
    async with cluster.client.get(f"{cluster.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {each.name: each for each in text_string_to_metric_families(await response.text())}
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        (sample,) = families[name].samples
        assert families[name].type == "gauge" and sample.value >= 0 and sample.labels == VLLM
    (cache,) = families["vllm:cache_config_info"].samples
    assert (int(cache.labels["block_size"]), int(cache.labels["num_gpu_blocks"])) == (16, 256)
    (lora,) = families["vllm:lora_requests_info"].samples
    assert lora.labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert abs(lora.value - time.time()) < 60


async def test_sizes_of_steps_are_a_histogram_over_all_workers(cluster: FakeCluster) -> None:
    """Each of the two fake workers reports 2 steps of one token, 3 of up to 16, and 3 of more than all bounds."""
    await until(lambda: all(worker.beat for worker in cluster.services.registry), "heartbeats")
    name = "vllm:iteration_tokens_total"
    counts = [value(cluster, f"{name}_bucket", le=str(float(size)), **VLLM) for size in STEP_SIZES]
    assert counts == [4.0 if size < 16 else 10.0 for size in STEP_SIZES]
    assert value(cluster, f"{name}_bucket", le="+Inf", **VLLM) == value(cluster, f"{name}_count", **VLLM) == 16
    assert value(cluster, f"{name}_sum", **VLLM) == 240


def test_counters_of_gone_workers_count_and_are_few() -> None:
    total, longest = _Sum(), 0
    for number in range(1000):
        assert total.of({Incarnation(f"i{number}"): 1.0, Incarnation("always"): 5.0}) == number + 6
        longest = max(longest, len(total._latest))
    assert total.of({Incarnation("i999"): 3.0}) == 1007, "it was away only"
    assert longest < 300
