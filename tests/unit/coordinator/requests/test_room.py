"""Requests that need more blocks than any worker has, from the start or since a worker was lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.core.ids import RequestId, new_incarnation, pack_tokens
from common.core.request import FinishReason, SamplingParams
from common.net.messages import Generate, Reserve
from coordinator.cluster.registry import WorkerHandle
from coordinator.requests import wait_limits
from coordinator.requests.record import RequestRecord
from coordinator.routing.router import HORIZON_TOKENS, Router
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, letters, open_cluster, prefilled, until


async def test_more_blocks_than_any_worker_has(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        await cluster.add("decode", changes={"kv_blocks": 20})
        response, body = await cluster.post(CHAT, {**HELLO, "n": 8, "max_tokens": 100})
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert "20" in body["error"]["message"]


@pytest.mark.parametrize("n", [1, 4])
async def test_unlimited_request_gets_pool_capacity(model: Path, n: int) -> None:
    async with open_cluster(model) as cluster:
        await cluster.add("prefill", script=letters("hi"))
        await cluster.add("decode", script=letters("hi"), changes={"kv_blocks": 40})
        response, _ = await cluster.post(CHAT, {**HELLO, "n": n})
        assert response.status == 200
        (request,) = await prefilled(cluster, 1)
        assert 0 <= 40 * 16 - request.prompt_length - n * request.sampling.max_tokens < n * 16


async def asked_until_one_token(cluster: FakeCluster, body: Any) -> asyncio.Task[Any]:
    """Start a stream and return its task once the first token has come."""
    stream = asyncio.create_task(cluster.stream(TEXT, {**body, "stream_options": {"include_usage": True}}))
    records = cluster.dispatcher.records
    await until(lambda: any(each.output_length > 1 for each in records.values()), "it has begun")
    return stream


async def test_a_stream_without_a_limit_goes_on_where_less_fits(model: Path) -> None:
    """The decode worker comes back with one block less, as pools sized by a share of the free memory do."""
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        first = await cluster.add("decode", step_s=0.01, changes={"kv_blocks": 20})
        body = {"messages": HELLO["messages"], "ignore_eos": True, "stream_options": {"include_usage": True}}
        stream = asyncio.create_task(cluster.stream(CHAT, body))
        await until(lambda: any(each.output_length > 1 for each in cluster.dispatcher.records.values()), "it has begun")
        first.stop()
        await cluster.add("decode", changes={"kv_blocks": 19})
        _, events = await stream
        usage = events[-1]["usage"]
        assert usage["total_tokens"] == 19 * 16
        assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_with_a_limit_waits_for_a_worker_that_holds_all_of_it(model: Path) -> None:
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        first = await cluster.add("decode", step_s=0.01)
        body = {"prompt": [50] * 16, "max_tokens": 300, "ignore_eos": True}
        stream = await asked_until_one_token(cluster, body)
        short = await cluster.add("decode", changes={"max_model_len": 200})
        first.stop()
        await until(
            lambda: any(each.unplaceable_since for each in cluster.dispatcher.records.values()),
            "no worker has room for it",
        )
        await cluster.add("decode")
        _, events = await stream
        assert events[-1]["usage"]["completion_tokens"] == 300 and not short.got(Reserve) and not short.got(Generate)


async def test_stream_too_large_for_remaining_workers_ends_with_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_limits, "WORKERLESS_WAIT_S", 0.3)
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        first = await cluster.add("decode", step_s=0.01)
        stream = await asked_until_one_token(cluster, {"prompt": [50] * 16, "max_tokens": 300, "ignore_eos": True})
        await cluster.add("decode", changes={"kv_blocks": 10})
        first.stop()
        _, events = await stream
        assert events[-1]["error"]["code"] == "worker_lost" and "316 tokens" in events[-1]["error"]["message"]


async def test_open_ended_request_is_truncated_to_remaining_capacity(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If much less than half of an unlimited answer fits, it waits for a larger worker, then is truncated."""
    monkeypatch.setattr(wait_limits, "WORKERLESS_WAIT_S", 0.3)
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        first = await cluster.add("decode", step_s=0.01, changes={"kv_blocks": 40})
        stream = asyncio.create_task(cluster.stream(CHAT, {"messages": HELLO["messages"], "ignore_eos": True}))
        records = cluster.dispatcher.records
        await until(lambda: any(each.output_length > 1 for each in records.values()), "it has begun")
        (record,) = records.values()
        blocks = -(-record.prompt_length // 16) + 3
        await cluster.add("decode", changes={"kv_blocks": blocks})
        first.stop()
        await until(lambda: record.unplaceable_since, "no worker has room for it")
        _, events = await stream
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert record.prompt_length + record.output_length == 16 * blocks


async def test_suspects_too_large_for_remaining_workers_end_with_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream has already met a worker's death, so the two are suspects and are tried one at a time."""
    monkeypatch.setattr(wait_limits, "WORKERLESS_WAIT_S", 0.3)
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        first = await cluster.add("decode", step_s=0.02)
        asked = {"prompt": [50] * 16, "max_tokens": 300, "ignore_eos": True}
        streams = [asyncio.create_task(cluster.stream(TEXT, asked)) for _ in range(2)]
        records = cluster.dispatcher.records
        await until(lambda: [each.output_length > 1 for each in records.values()] == [True] * 2, "both have begun")
        for record in records.values():
            record.progress.crashes.add(new_incarnation())
        await cluster.add("decode", changes={"kv_blocks": 10})
        first.stop()
        for stream in streams:
            _, events = await stream
            assert events[-1]["error"]["code"] == "worker_lost"


async def test_a_worker_that_is_only_busy_is_waited_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that a busy worker could serve is not truncated; if that worker is lost too, the wait starts anew."""
    monkeypatch.setattr(wait_limits, "WORKERLESS_WAIT_S", 0.3)
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        first = await cluster.add("decode", step_s=0.01, changes={"kv_blocks": 40})
        stream = asyncio.create_task(cluster.stream(CHAT, {"messages": HELLO["messages"], "ignore_eos": True}))
        records, router = cluster.dispatcher.records, cluster.dispatcher.router
        await until(lambda: any(each.output_length > 1 for each in records.values()), "it has begun")
        (record,) = records.values()
        await cluster.add("decode", changes={"kv_blocks": -(-record.prompt_length // 16) + 3})
        first.stop()
        await until(lambda: record.unplaceable_since, "no worker has room for it")
        fits = Router._fits

        def full(self: Router, demand: Any, worker: WorkerHandle) -> bool:
            return worker.hello.kv_blocks < 30 and fits(self, demand, worker)

        monkeypatch.setattr(Router, "_fits", full)
        busy = await cluster.add("decode", changes={"kv_blocks": 30})
        assert router.could_serve(record.demand())
        await until(lambda: record.unplaceable_since is None, "it waits for that one")
        await asyncio.sleep(cluster.dispatcher.times.lease_s + 0.6)  # longer than an unplaceable request waits
        assert record.queued and not record.accepts_truncation
        busy.stop()
        await until(lambda: record.unplaceable_since, "no worker has room for it again")
        monkeypatch.setattr(Router, "_fits", fits)
        await cluster.add("decode", changes={"kv_blocks": 30})
        _, events = await stream
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert record.prompt_length + record.output_length == 16 * 30


@pytest.mark.parametrize("policy", ["wait", "reject"])
async def test_a_prompt_that_only_decode_could_compute_is_refused_where_it_may_not(model: Path, policy: str) -> None:
    async with open_cluster(model, no_prefill_policy=policy) as cluster:
        await cluster.add("prefill", changes={"kv_blocks": 4})
        await cluster.add("decode")
        response, body = await cluster.post(TEXT, {"prompt": [50] * 65, "max_tokens": 3})
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert body["error"]["param"] == "prompt" and "64" in body["error"]["message"]
        assert (await cluster.post(TEXT, {"prompt": [50] * 64, "max_tokens": 3}))[0].status == 200


def test_demand_counts_unfinished_choices_only() -> None:
    def record(**changes: Any) -> RequestRecord:
        sampling = SamplingParams(2000, 1, min_tokens=changes.pop("min_tokens", 0))
        client: Any = None
        return RequestRecord(
            RequestId(bytes(16)), pack_tokens([1] * 16), sampling, 2, "", 0, {}, client, 0, 0, 1, **changes
        )

    limited, free = record(), record(open_ended=True)
    assert (limited.demand().least, free.demand().least) == (2000, HORIZON_TOKENS)
    for each in (limited, free):
        each.progress.output = [[1] * 1000, [1] * 20]
        assert each.demand().tokens == 1016 and each.demand().choices == 2
        each.progress.finish[0] = FinishReason.LENGTH
        assert each.demand().tokens == 36 and each.demand().choices == 1
    assert (limited.demand().least, free.demand().least) == (1980, HORIZON_TOKENS)
    assert record(open_ended=True, min_tokens=900).demand().least == 900, "what the client wants at least"
    free.accepts_truncation = True
    assert free.demand().least == 1


async def test_unplaceable_request_does_not_block_queue(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.requests.wait_limits.WORKERLESS_WAIT_S", 0.3)
    async with open_cluster(model, "prefill") as cluster:
        large = await cluster.add("decode", step_s=0.02, changes={"kv_blocks": 20})
        await cluster.add("decode", changes={"kv_blocks": 3})
        asked = {"prompt": [50] * 16, "max_tokens": 240, "ignore_eos": True}
        running = [asyncio.create_task(cluster.post(TEXT, asked)) for _ in range(2)]
        await until(lambda: cluster.dispatcher.admission.requests == 1, "one waits")
        behind = asyncio.create_task(cluster.post(TEXT, {**asked, "max_tokens": 4}))
        await until(lambda: cluster.dispatcher.admission.requests == 2, "two wait")
        large.stop()
        assert (await behind)[0].status == 200
        (refused,), (started,) = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        response, body = refused.result()
        assert response.status == 400 and body["error"]["code"] == "context_length_exceeded"
        await cluster.add("decode", changes={"kv_blocks": 20})  # the started request continues there
        response, body = await started
        assert response.status == 200 and body["usage"]["completion_tokens"] == 240


async def test_unstreamed_request_fails_and_stream_waits_for_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.requests.wait_limits.WORKERLESS_WAIT_S", 0.3)
    async with open_cluster(model, "prefill", failure_timeout=0.5) as cluster:
        only = await cluster.add("decode", step_s=0.02)
        asked = {"prompt": [50] * 16, "max_tokens": 100, "ignore_eos": True}
        whole = asyncio.create_task(cluster.post(TEXT, asked))
        stream = asyncio.create_task(cluster.stream(TEXT, {**asked, "stream_options": {"include_usage": True}}))
        records = cluster.dispatcher.records
        await until(lambda: [each.progress.started for each in records.values()] == [True] * 2, "both have begun")
        only.stop()
        response, body = await whole
        assert response.status == 503 and body["error"]["code"] == "no_decode_workers"
        assert len(records) == 1, "the stream waits"
        await cluster.add("decode")
        _, events = await stream
        assert events[-1]["usage"]["completion_tokens"] == 100
        assert events[-2]["choices"][0]["finish_reason"] == "length"
