"""The dispatcher: which worker gets a request, which requests wait and for how long, and clients that leave."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from common.core.errors import RequestError
from common.net.messages import Abort, Generate, Goodbye, Prefill
from coordinator.app import drain
from coordinator.http import sse
from coordinator.http.middleware import error_response
from coordinator.requests.residence import ASSUMED_S, ENOUGH
from tests.fakes.worker import FakeWorker
from tests.pace import scaled
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, open_cluster, until, valid


async def test_colocated_workers_do_it_all(model: Path) -> None:
    async with open_cluster(model, "colocated") as cluster:
        response, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 3, "n": 3})
        assert response.headers["x-tandem-path"] == "colocated" and len(body["choices"]) == 3
        assert len(cluster.workers[0].got(Generate)) == 1


async def test_a_decode_worker_alone_prefills_by_itself(model: Path) -> None:
    async with open_cluster(model, "decode") as cluster:
        response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": 3})
        assert response.headers["x-tandem-path"] == "local"


@pytest.mark.parametrize(
    ("roles", "options", "role"),
    [((), {}, "decode"), (("prefill",), {}, "decode"), (("decode",), {"no_prefill_policy": "reject"}, "prefill")],
)
async def test_no_worker_of_a_role_is_said_at_once(model: Path, roles: Any, options: Any, role: str) -> None:
    async with open_cluster(model, *roles, starting_wait=0.0, **options) as cluster:
        started = time.monotonic()
        response, body = await cluster.post(CHAT, HELLO)
        assert response.status == 503 and time.monotonic() - started < scaled(1.0)
        assert body["error"]["code"] == f"no_{role}_workers" and f"tandem {role}" in body["error"]["message"]
        assert response.headers["Retry-After"]
        valid("ErrorResponse", body)


async def test_dispatcher_queues_by_priority(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        await cluster.add("decode", step_s=0.02, changes={"kv_blocks": 3})
        asked = {"prompt": [50] * 16, "max_tokens": 16}
        running = asyncio.create_task(cluster.post(TEXT, asked))
        await until(lambda: cluster.dispatcher.records, "the first is placed")
        done: list[str] = []

        async def later(name: str, priority: int) -> None:
            await cluster.post(TEXT, {**asked, "priority": priority})
            done.append(name)

        tasks = [asyncio.create_task(later("late", 5)), asyncio.create_task(later("early", -5))]
        await until(lambda: cluster.dispatcher.admission.requests == 2, "two wait")
        await asyncio.gather(running, *tasks)
        assert done == ["early", "late"]


async def test_of_many_prompts_decode_takes_some_and_the_rest_goes_where_one_is_done_first(model: Path) -> None:
    async with open_cluster(model) as cluster:
        await cluster.add("prefill", delay_s=0.05, changes={"max_num_batched_tokens": 2})
        await cluster.add("decode", delay_s=0.05)
        asked = {"prompt": [50] * 16, "max_tokens": 4, "return_metrics": True}
        tasks = [asyncio.create_task(cluster.post(TEXT, asked)) for _ in range(12)]
        await until(lambda: cluster.dispatcher.admission.requests, "some wait with the coordinator")
        assert len(cluster.workers[0].got(Prefill)) <= 4, "of 24 steps"
        paths = Counter([body["tandem"]["path"] for _, body in await asyncio.gather(*tasks)])
        assert paths["local"] >= 2 and paths["disagg"] >= 4 and paths.total() == 12, paths


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("colocated",)])
async def test_requests_wait_for_the_workers_of_a_coordinator_that_has_just_started(model: Path, roles: Any) -> None:
    async with open_cluster(model) as cluster:
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "n": 2, "max_tokens": 4}))
        await until(lambda: cluster.dispatcher.records, "it waits")
        assert (await cluster.get("/ready"))[0].status == 503
        for role in roles:
            await cluster.add(role)
        assert (await asked)[0].status == 200


@pytest.mark.parametrize("expected", [{}, {"decode": 2}, {"colocated": 1}])
async def test_they_wait_a_bounded_time_and_later_ones_not_at_all(model: Path, expected: dict[str, int]) -> None:
    options = {f"expect_{role}": count for role, count in expected.items()}
    async with open_cluster(model, max_queued_requests=1, starting_wait=1.0, **options) as cluster:
        for later in (False, True):
            began = time.monotonic()
            first = asyncio.create_task(cluster.post(CHAT, HELLO))
            if not later:
                await until(lambda: cluster.dispatcher.records, "it waits")
                assert (await cluster.post(CHAT, HELLO))[0].status == 429, "no more than may queue"
            response, body = await first
            assert response.status == 503 and body["error"]["code"] == "no_decode_workers"
            assert ("still starting" in body["error"]["message"]) == bool(expected)
            assert time.monotonic() - began < (scaled(0.5) if later else 1.0 + scaled(0.25))


async def test_a_drain_does_not_wait_for_workers_that_may_join(model: Path) -> None:
    async with open_cluster(model) as cluster:
        asked = asyncio.create_task(cluster.post(CHAT, HELLO))
        await until(lambda: cluster.dispatcher.records, "it waits")
        began = time.monotonic()
        await drain(cluster.services, asyncio.Event())
        assert (await asked)[0].status == 503 and time.monotonic() - began < scaled(2.0)


async def test_a_client_that_hangs_up_while_it_waits_for_workers_leaves_the_queue(model: Path) -> None:
    async with open_cluster(model, max_queued_requests=1) as cluster:
        asked = asyncio.create_task(cluster.post(CHAT, HELLO))
        await until(lambda: cluster.dispatcher.records, "it waits")
        asked.cancel()
        await until(lambda: not cluster.dispatcher.records, "its place is free")
        assert cluster.dispatcher.admission.requests == 0


async def test_dispatcher_does_not_wait_for_departed_worker(model: Path) -> None:
    async with open_cluster(model, starting_wait=60.0) as cluster:
        worker = await cluster.add("colocated", rejoins=False)
        worker.say(Goodbye(worker.hello.incarnation, "drained"))
        await until(lambda: not len(cluster.dispatcher.registry), "it has left")
        async with asyncio.timeout(scaled(5)):
            response, body = await cluster.post(CHAT, HELLO)
        assert response.status == 503 and body["error"]["code"] == "no_decode_workers"


async def test_request_deadline_applies_while_waiting_for_start(model: Path) -> None:
    async with open_cluster(model, request_timeout=0.3) as cluster:
        response, body = await cluster.post(CHAT, HELLO)
        assert response.status == 504 and body["error"]["code"] == "request_timeout"


async def test_a_full_queue_says_when_to_come_back(model: Path) -> None:
    async with open_cluster(model, "prefill", max_queued_requests=1) as cluster:
        await cluster.add("decode", step_s=0.05, changes={"kv_blocks": 3})
        asked = {"prompt": [50] * 16, "max_tokens": 16}
        tasks = [asyncio.create_task(cluster.post(TEXT, asked)) for _ in range(2)]
        await until(lambda: cluster.dispatcher.admission.requests == 1, "one waits")
        response, body = await cluster.post(TEXT, asked)
        assert response.status == 429 and body["error"]["code"] == "server_is_overloaded"
        delay_ms = int(response.headers["retry-after-ms"])
        assert delay_ms >= 1000 * ASSUMED_S / 2, "nothing was measured yet"
        assert int(response.headers["Retry-After"]) == math.ceil(delay_ms / 1000)
        await asyncio.gather(*tasks)


async def test_full_queue_derives_retry_time_from_service_times(model: Path) -> None:
    async with open_cluster(model, "prefill", max_queued_requests=1) as cluster:
        await cluster.add("decode", step_s=0.05, changes={"kv_blocks": 3})
        asked = {"prompt": [50] * 16, "max_tokens": 8}
        for _ in range(ENOUGH):
            assert (await cluster.post(TEXT, asked))[0].status == 200
        running = asyncio.create_task(cluster.post(TEXT, {**asked, "max_tokens": 16}))
        await until(lambda: len(list(cluster.dispatcher.admission.running())) == 1, "one runs")
        waiting = asyncio.create_task(cluster.post(TEXT, asked))
        await until(lambda: cluster.dispatcher.admission.requests == 1, "one waits")
        response, _ = await cluster.post(TEXT, asked)
        assert response.status == 429 and int(response.headers["retry-after-ms"]) < 1000 * ASSUMED_S / 2
        await asyncio.gather(running, waiting)
        assert not list(cluster.dispatcher.admission.running())


def test_retry_times_are_spread() -> None:
    error = RequestError("later", status=429, retry_after_s=2.0)
    delays_ms = [int(error_response(error).headers["retry-after-ms"]) for _ in range(200)]
    assert 1600 <= min(delays_ms) < 1800 and 2200 < max(delays_ms) <= 2400


async def test_a_deadline_is_kept(model: Path) -> None:
    async with open_cluster(model, "prefill", request_timeout=0.2) as cluster:
        await cluster.add("decode", step_s=0.05)
        response, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 100})
        assert response.status == 504 and body["error"]["code"] == "request_timeout"
        _, events = await cluster.stream(CHAT, {**HELLO, "max_tokens": 100})
        assert events[-1]["error"]["code"] == "request_timeout"
        valid("ErrorResponse", events[-1])


def _aborted(worker: FakeWorker, times: int) -> bool:
    return len(worker.got(Abort)) >= times


@pytest.mark.alone
async def test_a_client_that_leaves_stops_the_work(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.http")
    async with open_cluster(model, "prefill") as cluster:
        decode = await cluster.add("decode", step_s=0.05)
        for stream in (True, False):
            aborts = len(decode.got(Abort)) + 1
            asked = {**HELLO, "max_tokens": 1000, "stream": stream}
            response = asyncio.create_task(cluster.client.post(f"{cluster.url}{CHAT}", json=asked))
            await until(lambda: decode.busy, "it runs")
            if stream:
                (await response).close()
            else:
                response.cancel()
            started = time.monotonic()
            await until(functools.partial(_aborted, decode, aborts), "decode gets the Aborts")
            assert time.monotonic() - started < scaled(0.2)
        await until(lambda: not decode.busy, "decode is free")
    assert caplog.messages.count("499 POST /v1/chat/completions: the client disconnected") == 1
    more = "1 more clients disconnected before they were answered: 1 POST /v1/chat/completions"
    assert caplog.messages.count(more) == 1


async def test_a_client_that_has_read_its_stream_to_the_end_leaves_without_a_word(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many clients close the connection after the last event, before the end of the response."""
    caplog.set_level(logging.INFO, "tandem.http")
    at_its_end = asyncio.Event()

    async def never_ends(*_: object) -> web.StreamResponse:
        at_its_end.set()
        return await asyncio.get_running_loop().create_future()

    async with open_cluster(model, "colocated") as cluster:
        monkeypatch.setattr(sse, "deliver", never_ends)
        async with cluster.client.post(
            f"{cluster.url}{CHAT}", json={**HELLO, "max_tokens": 3, "stream": True}
        ) as response:
            while b"[DONE]" not in await response.content.readany():
                pass
            await at_its_end.wait()
            response.close()
        await until(lambda: not cluster.services.answers.count, "it has left")
    assert not [line for line in caplog.messages if "499" in line]
