"""The endpoints under /admin: workers, drains, the spans of requests, and the feed of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.net.messages import Drain, Goodbye, Measure, Measured, PromptChunk, Timing
from coordinator.cluster import link_trials
from coordinator.http.admin import MAX_REQUESTS
from coordinator.live import feed as feeds
from coordinator.requests import waterfall
from tests.leaked_keys import new_key, register
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, open_cluster, until
from tests.unit.coordinator.requests.test_timeline import Story


async def test_a_worker_is_drained_by_name(model: Path) -> None:
    async with open_cluster(model, "prefill", "decode") as cluster:
        other = await cluster.add("decode")
        response, body = await cluster.post("/admin/drain", {"worker": "decode-2", "timeout": 2.5})
        assert response.status == 202 and body == {"worker": "decode-2", "timeout": 2.5}
        await until(lambda: other.got(Drain), "it hears of it")
        assert other.got(Drain) == [Drain(2500)]
        for wrong, code in ({"worker": "decode-7"}, 404), ({}, 400), ({"worker": "decode-2", "timeout": -1}, 400):
            response, body = await cluster.post("/admin/drain", wrong)
            assert response.status == code, body


async def test_workers_as_they_see_themselves(cluster: FakeCluster) -> None:
    await until(lambda: all(worker.beat for worker in cluster.services.registry), "heartbeats")
    await until(lambda: cluster.dispatcher.link_stats.of(next(iter(cluster.services.registry))), "the link is measured")
    _, body = await cluster.get("/admin/workers")
    assert body["model"] == "tiny" and body["expected"] == {"prefill": 0, "decode": 0, "colocated": 0}
    for worker in body["workers"]:
        blocks = worker["kv_blocks"]
        assert blocks["free"] + blocks["cached"] + blocks["held"] == blocks["total"] == 256
        assert worker["state"] == "ready" and worker["incarnation"]
        assert worker["waiting_tokens"] == 7 and worker["turn_ms"] is None
    prefill, decode = body["workers"]
    assert prefill["links"] == [{"to": "decode-1", "transport": "shm", "gb_per_s": 1.024, "latency_us": 1000.0}]
    assert decode["links"] == [] and prefill["transports"] == decode["transports"] == ["shm", "zmq"]


async def test_all_links_are_measured_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are measured one at a time. A worker that sends no result is skipped; two clients share a measurement."""
    monkeypatch.setattr(link_trials, "PATIENCE_S", 0.2)
    async with open_cluster(model, "prefill", "decode", "decode") as cluster:
        silent = await cluster.add("prefill", drop={Measured})
        stats, (first, *_) = cluster.dispatcher.link_stats, cluster.services.registry
        await until(lambda: len(stats.of(first)) == 2, "the links of the first are measured")
        await until(lambda: len(silent.got(Measure)) == 2, "those of the other have been tried")
        before = {worker.name: len(worker.got(Measure)) for worker in cluster.workers}
        answers = await asyncio.gather(*(cluster.post("/admin/links", {}) for _ in range(2)))
        for response, body in answers:
            assert response.status == 200
            assert {(each["from"], each["to"]) for each in body["links"]} >= {
                ("prefill-0", "decode-1"), ("prefill-0", "decode-2"),
            }  # fmt: skip
        after = {worker.name: len(worker.got(Measure)) for worker in cluster.workers}
        assert after["prefill-0"] - before["prefill-0"] == 4, "a rate and a latency with each of two"
        assert after[silent.name] - before[silent.name] == 2, "a first trial with each of two"


async def test_without_pairs_there_is_nothing_to_measure(model: Path) -> None:
    async with open_cluster(model, "colocated") as cluster:
        response, body = await cluster.post("/admin/links", {})
        assert response.status == 200 and body == {"links": []}
    async with open_cluster(model, "prefill", "decode", admin_api_key=new_key()) as cluster:
        response, _ = await cluster.post("/admin/links", {})
        assert response.status == 401


# -- requests ---------------------------------------------------------------------------------------------------------


async def test_the_spans_of_a_request_add_up_to_its_times(cluster: FakeCluster) -> None:
    response, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 20, "return_metrics": True})
    shown = (await cluster.get(f"/admin/requests/{body['id']}"))[1]
    assert (await cluster.get(f"/admin/requests/{response.headers['x-request-id']}"))[1] == shown
    assert shown["id"] == body["id"] and shown["endpoint"] == CHAT and not shown["stream"]
    assert (shown["state"], shown["path"], shown["finish"]) == ("done", "disagg", ["length"])
    assert shown["output_tokens"] == 20 and shown["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert shown["ttft_ms"] == pytest.approx(body["tandem"]["ttft_ms"], abs=0.01)
    parts = {span["name"]: span["end_ms"] - span["start_ms"] for span in shown["spans"]}
    assert list(parts) == ["tokenize", "queue", "place", "prefill", "transfer", "decode"]
    assert parts["tokenize"] + parts["queue"] + parts["prefill"] == pytest.approx(shown["ttft_ms"], abs=2)
    exposed_ms = next(span["detail"]["exposed_ms"] for span in shown["spans"] if span["name"] == "transfer")
    assert shown["ttft_ms"] + exposed_ms + parts["decode"] == pytest.approx(shown["total_ms"], abs=2)
    place = next(span["detail"] for span in shown["spans"] if span["name"] == "place")
    assert (place["prefill"], place["decode"], place["why"]) == ("prefill-0", "decode-1", body["tandem"]["why"])


async def test_a_request_is_shown_while_it_runs(model: Path) -> None:
    async with open_cluster(model, "prefill") as cluster:
        await cluster.add("decode", step_s=0.01)
        ids = {"X-Request-Id": "mine"}
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 30}, headers=ids))
        timelines = cluster.dispatcher.timelines
        await until(lambda: (found := timelines.find("mine")) and found.facts().output_tokens > 3, "it runs")
        _, shown = await cluster.get("/admin/requests/mine")
        assert shown["state"] == "decoding" and shown["total_ms"] is None and shown["finish"] == [None]
        assert shown["spans"][-1]["name"] == "decode" and shown["spans"][-1]["end_ms"] is None
        assert shown["now_ms"] > shown["spans"][-1]["start_ms"]
        await asked
        assert "now_ms" not in (await cluster.get("/admin/requests/mine"))[1]


async def test_a_migrated_request_shows_both_workers_and_the_gap(model: Path) -> None:
    async with open_cluster(model, "prefill", "decode") as cluster:
        dying = cluster.workers[1]
        dying.step_s = 0.02
        asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 40}))
        await until(lambda: any(record.output_length > 3 for record in cluster.dispatcher.records.values()), "it runs")
        await cluster.add("decode")
        dying.stop()
        response, body = await asked
        assert response.status == 200, body
        _, shown = await cluster.get(f"/admin/requests/{body['id']}")
    assert (shown["migrations"], shown["retries"], shown["output_tokens"]) == (1, 0, 40)
    decodes = [span for span in shown["spans"] if span["name"] == "decode"]
    assert [span["worker"] for span in decodes] == ["decode-1", "decode-2"]
    (gap,) = [span for span in shown["spans"] if span["name"] == "migration"]
    assert gap["detail"]["from"] == "decode-1" and "connection broke" in gap["detail"]["why"]
    assert decodes[0]["end_ms"] == gap["start_ms"] and gap["end_ms"] <= decodes[1]["start_ms"]
    inside = [span["name"] for span in shown["spans"] if span["parent"] == shown["spans"].index(gap)]
    assert inside[-2:] == ["place", "prefill"] and set(inside[:-2]) == {"queue"}


async def test_a_failed_request_shows_its_error(model: Path) -> None:
    async with open_cluster(model, "prefill", "decode", request_timeout=0.3) as cluster:
        cluster.workers[0].delay_s = 5.0
        response, body = await cluster.post(CHAT, HELLO, headers={"X-Request-Id": "late"})
        assert response.status == 504
        _, shown = await cluster.get("/admin/requests/late")
        assert shown["state"] == "failed" and shown["error"] == body["error"]["message"]
        cluster.workers[0].delay_s = 0.0


async def test_requests_are_listed_the_latest_first(cluster: FakeCluster) -> None:
    for number in range(4):
        await cluster.post(CHAT, {**HELLO, "max_tokens": 2}, headers={"X-Request-Id": f"r{number}"})
    _, body = await cluster.get("/admin/requests?limit=3")
    assert [each["request_id"] for each in body["requests"]] == ["r3", "r2", "r1"]
    assert "spans" not in body["requests"][0]
    assert len((await cluster.get("/admin/requests"))[1]["requests"]) == 4
    for wrong in ("0", "-1", "x", str(MAX_REQUESTS + 1), "9" * 9, "²"):
        response, body = await cluster.get(f"/admin/requests?limit={wrong}")
        assert response.status == 400 and body["error"]["param"] == "limit"
    await cluster.post(CHAT, {**HELLO, "max_tokens": 2}, headers={"X-Request-Id": "tenant/a:7"})
    _, body = await cluster.get("/admin/requests/tenant%2Fa:7")
    assert body["request_id"] == "tenant/a:7"
    response, body = await cluster.get("/admin/requests/nothing")
    assert response.status == 404 and body["error"]["code"] == "not_found"


async def test_each_of_several_prompts_has_a_timeline(cluster: FakeCluster) -> None:
    _, body = await cluster.post(TEXT, {"prompt": ["a", "bc"], "max_tokens": 2})
    for id, tokens in (body["id"], 1), (f"{body['id']}.1", 2):
        assert (await cluster.get(f"/admin/requests/{id}"))[1]["prompt_tokens"] == tokens


async def test_chunks_that_a_worker_reports_are_spans(cluster: FakeCluster) -> None:
    worker = cluster.workers[0]
    worker.delay_s = 0.05
    asked = asyncio.create_task(cluster.post(CHAT, {**HELLO, "max_tokens": 2}))
    await until(lambda: cluster.dispatcher.records, "it runs")
    (record,) = cluster.dispatcher.records.values()
    chunks = PromptChunk(0.0, 0.2, 8), PromptChunk(0.5, 0.5, 4)
    worker.say(Timing(record.id, 0, {}, chunks=chunks))
    _, body = await asked
    _, shown = await cluster.get(f"/admin/requests/{body['id']}")
    found = [span for span in shown["spans"] if span["name"] == "prefill_chunk"]
    assert [span["detail"] for span in found] == [{"tokens": 8}, {"tokens": 4}]
    assert {shown["spans"][span["parent"]]["name"] for span in found} == {"prefill"}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_time_for_a_grammar_is_a_part_of_its_own(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Compiling a grammar may take most of the time until the prompt is tokenized."""
    body = {CHAT: HELLO, TEXT: {"prompt": "x"}}[path] | {"max_tokens": 2}
    compile_grammar = cluster.services.model.grammar

    async def slowly(wanted: Any) -> Any:
        if wanted is not None:
            await asyncio.sleep(2 * waterfall.GRAMMAR_SHOWN_S)
        return await compile_grammar(wanted)

    monkeypatch.setattr(type(cluster.services.model), "grammar", lambda _, wanted: slowly(wanted))
    details = []
    for fields in {}, {"structured_outputs": {"choice": ["a", "b"]}}:
        response, answered = await cluster.post(path, body | fields)
        assert response.status == 200, answered
        span = (await cluster.get(f"/admin/requests/{answered['id']}"))[1]["spans"][0]
        assert span["name"] == "tokenize"
        details.append(span["detail"])
    assert details[0] == {}
    assert 2000 * waterfall.GRAMMAR_SHOWN_S <= details[1]["grammar_ms"] <= span["end_ms"]


# -- events -----------------------------------------------------------------------------------------------------------


class Page:
    """A client of /admin/events, and what it has received."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def of(self, kind: str) -> list[Any]:
        return [data for name, data in self.events if name == kind]

    async def read(self, content: Any) -> None:
        while line := (await content.readline()).decode().strip():
            name = line.removeprefix("event: ")
            data = (await content.readline()).decode().removeprefix("data: ")
            assert (await content.readline()) == b"\n"
            self.events.append((name, json.loads(data)))


@contextlib.asynccontextmanager
async def page(cluster: FakeCluster) -> AsyncIterator[Page]:
    async with cluster.client.get(f"{cluster.url}/admin/events") as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        made = Page()
        reading = asyncio.create_task(made.read(response.content))
        try:
            await until(lambda: made.of("system"), "the first snapshot")
            yield made
        finally:
            reading.cancel()


async def test_a_page_gets_the_system_and_each_request(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "SYSTEM_S", 0.05)
    async with page(cluster) as watching:
        first = watching.of("system")[0]
        assert first["model"] == "tiny" and first["history"] == [] and not first["draining"]
        assert [each["state"] for each in first["worker_events"]] == ["joined", "joined"]
        _, body = await cluster.post(CHAT, {**HELLO, "max_tokens": 5})
        await until(
            lambda: any(each["state"] == "done" for each in watching.of("request")), "the end of the request is seen"
        )
        seen = watching.of("request")
        assert {each["id"] for each in seen} == {body["id"]} and len(seen) <= 4
        assert seen[-1] == (await cluster.get(f"/admin/requests/{body['id']}"))[1]
        await until(lambda: watching.of("system")[-1]["ttft_ms"], "the next snapshot has its time to first token")
        last = watching.of("system")[-1]
        assert {each["id"] for each in last["workers"]} == {"prefill-0", "decode-1"} and last["absent"] == []
        assert last["queue"] == {"requests": 0, "tokens": 0} and "history" not in last
        assert last["ttft_ms"]["p50"] == pytest.approx(seen[-1]["ttft_ms"], abs=1)
        assert last["itl_ms"]["p99"] > 0


async def test_a_page_sees_that_requests_are_refused(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of overload: not that a request is wrong, nor that an operator's page is one too many."""
    monkeypatch.setattr(feeds, "SYSTEM_S", 0.05)
    async with page(cluster) as watching:
        response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": "many"})
        assert response.status == 400
        monkeypatch.setattr(feeds, "MAX_LISTENERS", 1)
        response, _ = await cluster.get("/admin/events")
        assert response.status == 429
        before = len(watching.of("system"))
        await until(lambda: len(watching.of("system")) > before + 1, "two more snapshots")
        assert {each["rates"]["refused_s"] for each in watching.of("system")} == {0.0}
        monkeypatch.setattr(cluster.dispatcher, "draining", True)
        response, _ = await cluster.post(CHAT, HELLO)
        assert response.status == 503
        await until(lambda: watching.of("system")[-1]["rates"]["refused_s"] > 0, "it is counted")


async def test_a_page_sees_workers_come_and_go(cluster: FakeCluster) -> None:
    async with page(cluster) as watching:
        killed, leaving = cluster.workers
        leaving.rejoins = False
        killed.stop()
        leaving.say(Goodbye(leaving.hello.incarnation, "drained"))
        await until(lambda: len(watching.of("worker")) >= 3, "a death and a farewell")
        await cluster.add("prefill", name=killed.name)
        await until(lambda: watching.of("worker")[-1]["state"] == "back", "another of that name")
        changes = {(each["name"], each["state"]) for each in watching.of("worker")}
        assert changes == {("prefill-0", "lost"), ("prefill-0", "dead"), ("decode-1", "left"), ("prefill-0", "back")}
        assert watching.of("worker")[-1]["role"] == "prefill"


async def test_nothing_is_computed_while_nobody_listens(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def count(*_: Any, **__: Any) -> dict[str, Any]:
        nonlocal made
        made += 1
        return {}

    monkeypatch.setattr(feeds, "SYSTEM_S", 0.02)
    monkeypatch.setattr(feeds, "worker_rows", count)
    monkeypatch.setattr(feeds, "shown", count)
    feed, timelines = cluster.services.feed, cluster.dispatcher.timelines
    async with page(cluster):
        await until(lambda: made > 2, "snapshots are made")
        assert len(timelines.listeners) == 2
    await until(lambda: not feed._listeners, "the page is closed")
    before = made
    await cluster.post(CHAT, {**HELLO, "max_tokens": 5})
    assert made == before and len(timelines.listeners) == 1
    assert feed._snapshots is feed._flushes is None and not feed._encoded


async def test_too_many_pages_are_refused(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MAX_LISTENERS", 2)
    async with page(cluster), page(cluster):
        response, body = await cluster.get("/admin/events")
        assert response.status == 429 and body["error"]["code"] == "too_many_listeners"
        assert "Retry-After" in response.headers
    await until(lambda: not cluster.services.feed._listeners, "the pages are closed")
    async with page(cluster):
        pass


class SlowSink:
    """A connection whose client reads nothing while ``unread_bytes`` is large."""

    def __init__(self) -> None:
        self.unread_bytes = 0
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)


async def test_a_page_that_does_not_read_misses_snapshots_and_gets_the_latest_of_requests(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "SYSTEM_S", 0.01)
    feed, sink = cluster.services.feed, SlowSink()
    listener = feed.join(sink)
    try:
        sink.unread_bytes = feeds.MAX_UNREAD_BYTES + 1
        sink.sent.clear()
        monkeypatch.setattr(feeds, "FLUSHED", 3)
        for _ in range(5):
            await cluster.post(CHAT, {**HELLO, "max_tokens": 5})
        assert len(listener.requests) == 5 and not sink.sent
        sink.unread_bytes = 0
        await until(lambda: not listener.requests, "it catches up")
        writes = [data for data in sink.sent if data.startswith(b"event: request")]
        assert [data.count(b"event: request") for data in writes] == [3, 2], "requests are written together"
        assert b"".join(writes).count(b'"state":"done"') == 5
    finally:
        listener.requests.clear()
        feed.leave(listener)


async def test_the_loss_of_a_worker_does_not_wait_for_requests(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "FLUSH_S", 600.0)
    feed, sink = cluster.services.feed, SlowSink()
    listener = feed.join(sink)
    try:
        await cluster.post(CHAT, {**HELLO, "max_tokens": 5})
        await until(lambda: listener.requests and feed._flushes is not None, "the end of the request waits")
        cluster.workers[0].stop()
        await until(lambda: any(b'"state":"lost"' in data for data in sink.sent), "the loss is sent")
    finally:
        feed.leave(listener)


async def test_intervals_of_a_running_request_are_not_in_events(cluster: FakeCluster) -> None:
    story, feed = Story(), cluster.services.feed
    story.place(5)
    story.first_token(20)
    story.timeline.land(story.at(25))
    story.record.intervals.extend([0.01] * 50)
    story.tokens(50, 520)
    event = feed._shown(story.timeline)
    assert b'"itl_ms":null' in event and b'"output_tokens":51' in event and b'"name":"decode"' in event
    assert waterfall.shown(story.timeline)["itl_ms"] is not None
    story.end(530)
    assert b'"itl_ms":{"mean":10.0' in feed._shown(story.timeline)


async def test_open_pages_do_not_delay_the_end_of_the_server(model: Path) -> None:
    async with open_cluster(model, "colocated") as cluster:
        response = await cluster.client.get(f"{cluster.url}/admin/events")
        assert response.status == 200
        cluster.services.feed.close()
        data = await response.content.read()
        assert data.startswith(b"event: system") and response.content.at_eof()
        response, body = await cluster.get("/admin/events")
        assert response.status == 503 and body["error"]["code"] == "server_shutting_down"


async def test_only_the_admin_key_opens_requests_and_events(model: Path) -> None:
    key, admin_key = register("key-of-a-reader"), register("key-of-an-operator")
    async with open_cluster(model, "colocated", api_key=key, admin_api_key=admin_key) as cluster:
        for path in ("/admin/requests", "/admin/requests/x", "/admin/events"):
            assert (await cluster.get(path))[0].status == 401
            response, body = await cluster.get(path, headers={"Authorization": f"Bearer {key}"})
            assert response.status == 403 and body["error"]["code"] == "insufficient_permissions"
        response, _ = await cluster.get("/admin/requests", headers={"Authorization": f"Bearer {admin_key}"})
        assert response.status == 200
