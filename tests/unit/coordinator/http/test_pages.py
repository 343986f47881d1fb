"""Pages besides the answers: models, tokens, readiness, workers, metrics."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from yarl import URL

from common.core.ids import RequestId
from common.net.messages import Role, Timing
from coordinator.app import LAG_EVERY_S
from coordinator.metrics import FRESH_PAGES, PAGE_S
from tests.fakes.checkpoint import POSITIONS, VOCAB
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, FakeCluster, open_cluster, until, valid


async def test_root_page_lists_endpoints(cluster: FakeCluster) -> None:
    response, body = await cluster.get("/")
    assert response.status == 200 and body["server"] == "tandem" and body["model"] == "tiny"
    assert {"POST /v1/chat/completions", "GET /v1/models", "GET /health", "GET /metrics"} <= set(body["endpoints"])
    assert "GET /" not in body["endpoints"]
    assert (await cluster.get("/nowhere"))[0].status == 404


async def test_a_browser_gets_a_page_whose_links_lead_somewhere(model: Path) -> None:
    async with open_cluster(model, "colocated", served_model_name="<b>&co") as cluster:
        async with cluster.client.get(cluster.url, headers={"Accept": "text/html,*/*;q=0.8"}) as response:
            page = await response.text()
        assert response.content_type == "text/html" and response.headers["Vary"] == "Accept"
        assert "serves &lt;b&gt;&amp;co<" in page and "<b>" not in page
        assert "POST /v1/chat/completions" in page
        links = re.findall(r'href="([^"]+)"', page)
        assert {"ui", "v1/models", "health", "metrics", "admin/workers"} <= set(links)
        for link in links:
            async with cluster.client.get(f"{cluster.url}/{link}") as response:
                assert response.status == 200, link


@pytest.mark.parametrize("path", ["/", "/docs", "/docs/"])
async def test_links_stay_below_the_path_at_which_a_proxy_serves(cluster: FakeCluster, path: str) -> None:
    async with cluster.client.get(cluster.url + path, headers={"Accept": "text/html"}) as response:
        links = re.findall(r'href="([^"]+)"', await response.text())
    found = {URL(f"https://example.com/x{path}").join(URL(link)).path for link in links}
    assert "/x/openapi.json" in found and all(each.startswith("/x/") for each in found), found


async def test_models(cluster: FakeCluster) -> None:
    _, body = await cluster.get("/v1/models")
    valid("ListModelsResponse", body)
    assert body["data"][0]["id"] == "tiny" and body["data"][0]["max_model_len"] == POSITIONS
    valid("Model", (await cluster.get("/v1/models/tiny"))[1])
    assert (await cluster.get("/v1/models/other"))[0].status == 404


async def test_models_in_the_form_of_anthropics_clients(cluster: FakeCluster) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    _, listed = await cluster.get("/v1/models", headers=headers)
    _, one = await cluster.get("/v1/models/tiny", headers=headers)
    assert listed == {"data": [one], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert (one["id"], one["type"], one["display_name"], one["max_input_tokens"]) == (
        "tiny",
        "model",
        "tiny",
        POSITIONS,
    )
    assert datetime.fromisoformat(one["created_at"]).timestamp() == cluster.services.model.created


async def test_tokens_there_and_back(cluster: FakeCluster) -> None:
    _, body = await cluster.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == POSITIONS
    _, back = await cluster.post("/detokenize", {"tokens": body["tokens"]})
    assert back == {"prompt": "héllo"}
    _, body = await cluster.post("/tokenize", HELLO)
    assert (await cluster.post("/detokenize", {"tokens": body["tokens"]}))[1]["prompt"].endswith("<|assistant|>")
    assert (await cluster.post("/tokenize", {}))[0].status == 400
    for wrong in ({"prompt": "x"}, {"prompt": 5}, {"add_special_tokens": 1}):
        response, body = await cluster.post("/tokenize", {**HELLO, **wrong})
        assert (response.status, body["error"]["param"]) == (400, next(iter(wrong)))
    assert (await cluster.post("/detokenize", {"tokens": [VOCAB]}))[0].status == 400


async def test_ready_requires_all_expected_workers(model: Path) -> None:
    async with open_cluster(model, expect_prefill=1, expect_decode=2) as cluster:
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            response, body = await cluster.get("/ready")
            assert response.status == 503 and "0 of" in body["error"]["message"]
            await cluster.add(role)
        assert "1 of 2 decode" in (await cluster.get("/ready"))[1]["error"]["message"]
        await cluster.add("decode")
        assert (await cluster.get("/ready"))[0].status == 200


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 200),
        ({"local_prefill": "never"}, 200),
        ({"no_prefill_policy": "wait", "request_timeout": 0.5}, 503),
        ({"no_prefill_policy": "reject"}, 503),
        ({"no_prefill_policy": "reject", "local_prefill": "always"}, 200),
    ],
)
async def test_ready_without_a_prefill_worker_follows_the_policy(
    model: Path, options: dict[str, Any], status: int
) -> None:
    """/ready answers 200 exactly where a request is served: one is sent for comparison."""
    async with open_cluster(model, "prefill", "decode", expect_prefill=1, expect_decode=1, **options) as cluster:
        assert (await cluster.get("/ready"))[0].status == 200
        cluster.workers[0].stop()
        await until(lambda: not cluster.services.registry.ready("prefill"), "the coordinator notices")
        response, body = await cluster.get("/ready")
        assert response.status == status, body
        served, answer = await cluster.post(CHAT, {**HELLO, "max_tokens": 4})
        assert (served.status == 200) == (status == 200), answer
        if status == 200:
            assert served.headers["x-tandem-path"] == "local"


async def test_metrics_have_vllms_names(cluster: FakeCluster) -> None:
    await cluster.post(CHAT, {**HELLO, "max_tokens": 4})
    await until(lambda: all(worker.beat for worker in cluster.services.registry), "heartbeats")
    async with cluster.client.get(f"{cluster.url}/metrics") as response:
        page = await response.text()
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        'vllm:cache_config_info{block_size="16",engine="0",model_name="tiny",num_gpu_blocks="256"}',
        "vllm:time_to_first_token_seconds_bucket",
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.001"',
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_sum",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:request_prompt_tokens_count",
        "vllm:request_generation_tokens_count",
        "vllm:prompt_tokens_total",
        'vllm:generation_tokens_total{engine="0",model_name="tiny"} 4.0',
        'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 20.0',
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0',
        'vllm:request_params_max_tokens_sum{engine="0",model_name="tiny"} 4.0',
        'vllm:request_params_n_sum{engine="0",model_name="tiny"} 1.0',
        'vllm:request_max_num_generation_tokens_sum{engine="0",model_name="tiny"} 4.0',
        "vllm:request_prefill_kv_computed_tokens_count",
        "vllm:request_inference_time_seconds_count",
        'vllm:iteration_tokens_total_bucket{engine="0",le="16.0",model_name="tiny"} 10.0',
        'vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 240.0',
        "vllm:lora_requests_info",
        'tandem_stage_seconds_bucket{le="0.01",stage="transfer"}',
        'tandem_kv_transfer_bytes_total{transport="shm"} 4096.0',
        "tandem_kv_transfer_seconds_count",
        'tandem_kv_blocks{role="decode",state="free",worker="decode-1"}',
        'tandem_requests_total{outcome="done",path="disagg"} 1.0',
        'tandem_http_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0',
        'tandem_key_requests_total{key_name="none",outcome="done"} 1.0',
        'tandem_key_output_tokens_total{key_name="none"} 4.0',
        "tandem_ready 1.0",
        'tandem_worker_busy_seconds_total{role="decode",worker="decode-1"} 2.5',
        'tandem_worker_waiting_tokens{role="prefill",worker="prefill-0"} 7.0',
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
        'tandem_workers{role="prefill",state="ready"} 1.0',
        "tandem_migrations_total",
        "tandem_event_loop_lag_seconds_count",
        'tandem_bad_messages_total{source="coordinator"} 0.0',
        'tandem_bad_messages_total{source="workers"} 4.0',
        'tandem_cut_off_peers_total{source="coordinator"} 0.0',
        'tandem_cut_off_peers_total{source="workers"} 2.0',
        "tandem_stale_frames_total 6.0",
        "tandem_reaped_requests_total 10.0",
        "tandem_borrowed_core_seconds_total 3.0",
        'tandem_leaked_kv_blocks{role="decode",worker="decode-1"} 1.0',
        "tandem_open_breakers 0.0",
        'tandem_stage_seconds_sum{stage="transfer_exposed"} 0.0005',
        'tandem_stage_seconds_count{stage="transfer_exposed"} 1.0',
    ):
        assert name in page, name


async def test_a_flood_of_scrapes_makes_few_pages(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first few scrapes after a pause show the newest counts; more of them share a page per PAGE_S."""
    metrics, now, made = cluster.services.metrics, 100.0, 0

    def make(registry: CollectorRegistry) -> bytes:
        nonlocal made
        made += 1
        return generate_latest(registry)

    async def scrape() -> float:
        async with cluster.client.get(f"{cluster.url}/metrics") as response:
            found = re.search(r'^tandem_clients_cut_off_total\{while="reading"\} (\S+)', await response.text(), re.M)
            return float(found[1]) if found else 0.0

    monkeypatch.setattr(metrics, "_clock", lambda: now)
    monkeypatch.setattr("coordinator.metrics.generate_latest", make)
    for number in range(FRESH_PAGES):
        assert await scrape() == number
        metrics.cut_off("reading")
    assert await asyncio.gather(*(scrape() for _ in range(64))) == [FRESH_PAGES - 1] * 64
    assert made == FRESH_PAGES
    now += PAGE_S
    assert await scrape() == FRESH_PAGES


async def test_event_loop_lag_metric_measures_blocking_call(cluster: FakeCluster) -> None:
    """A delay that is over before the watchdog looks is measured too."""
    lag = functools.partial(cluster.services.metrics.registry.get_sample_value, "tandem_event_loop_lag_seconds_sum")
    before, began = lag(), time.monotonic()
    assert before is not None
    time.sleep(0.2)  # noqa: ASYNC251 - this is what holds it up
    await until(lambda: (lag() or 0.0) - before > 0.195 - LAG_EVERY_S, "it is seen")  # timers count milliseconds
    assert (lag() or 0.0) - before <= time.monotonic() - began + LAG_EVERY_S, "no more than the time that passed"


async def test_a_hand_off_counts_though_its_answer_has_ended_before(cluster: FakeCluster) -> None:
    """Decode may send the last token of a short answer before prefill learns that all of its KV was accepted."""
    prefill = next(worker for worker in cluster.workers if worker.hello.role == "prefill")
    values = {"transfer_ms": 4.0, "transfer_exposed_ms": 2.0, "kv_bytes": 4096.0}
    prefill.say(Timing(RequestId(bytes(16)), 1, values, "shm"))
    metrics = cluster.services.metrics
    shown = functools.partial(metrics.registry.get_sample_value, "tandem_stage_seconds_sum")
    await until(lambda: shown({"stage": "transfer_exposed"}), "it is counted")
    assert shown({"stage": "transfer_exposed"}) == 0.002 and shown({"stage": "transfer"}) == 0.004
