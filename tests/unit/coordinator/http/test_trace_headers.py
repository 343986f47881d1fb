"""Trace contexts over HTTP: headers in and out, and the trace id in log lines and access lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from common.platform.log import JsonFormatter, TextFormatter
from coordinator.http.reply import WholeReply
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, open_cluster

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-00", "tracestate": "vendor=1"}


async def test_a_response_names_the_trace_that_the_caller_sent(cluster: FakeCluster) -> None:
    for path, body, status in (
        (CHAT, {**HELLO, "max_tokens": 2}, 200),
        (TEXT, {"prompt": "x", "max_tokens": 2, "stream": True}, 200),
        (CHAT, {}, 400),
        ("/nowhere", {}, 404),
    ):
        async with cluster.client.post(f"{cluster.url}{path}", json=body, headers=PARENT) as response:
            await response.read()
        assert response.status == status
        version, trace_id, span_id, flags = response.headers["traceparent"].split("-")
        assert (version, trace_id, flags) == ("00", TRACE, "00") and span_id != SPAN
        assert response.headers["tracestate"] == "vendor=1"


async def test_without_a_trace_of_the_caller_a_response_names_none(cluster: FakeCluster) -> None:
    for headers in ({}, {"traceparent": "nonsense", "tracestate": "vendor=1"}):
        response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": 2}, headers=headers)
        assert "traceparent" not in response.headers and "tracestate" not in response.headers


async def test_log_lines_about_a_request_name_its_trace(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(WholeReply, "_feed", broken)
    response, _ = await cluster.post(CHAT, HELLO, headers=PARENT)
    assert response.status == 500
    (record,) = [each for each in caplog.records if each.message == "an answer could not be written"]
    assert f"[trace_id={TRACE}]" in TextFormatter("coordinator").format(record).splitlines()[0]
    assert json.loads(JsonFormatter("coordinator").format(record))["trace_id"] == TRACE


async def test_access_lines(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.access")
    async with open_cluster(model, "prefill", "decode", access_log=True) as cluster:
        await cluster.post(CHAT, {**HELLO, "max_tokens": 3}, headers={**PARENT, "X-Request-Id": "mine"})
        await cluster.stream(TEXT, {"prompt": ["x", "y"], "max_tokens": 4})
        await cluster.post(CHAT, {})
        await cluster.get("/health")
        await cluster.post("/health", {})
    lines = [each for each in caplog.records if each.name == "tandem.access"]
    fields = [json.loads(JsonFormatter("coordinator").format(each)) for each in lines]
    assert [(each["method"], each["route"], each["status"]) for each in fields] == [
        ("POST", CHAT, 200), ("POST", TEXT, 200), ("POST", CHAT, 400), ("POST", "/health", 405),
    ]  # fmt: skip
    chat, texts, refused, _ = fields
    assert (chat["request_id"], chat["trace_id"], chat["client"]) == ("mine", TRACE, "127.0.0.1")
    assert chat["key_name"] == "none"
    assert (chat["output_tokens"], texts["output_tokens"]) == (3, 8) and chat["prompt_tokens"] > 3
    assert 0 < chat["ttft_ms"] <= chat["duration_ms"] < 60_000
    assert "ttft_ms" not in refused and refused["request_id"].startswith("req-")
    text = TextFormatter("coordinator").format(lines[0])
    assert f"127.0.0.1 POST {CHAT} 200 in " in text and text.endswith(f"[trace_id={TRACE}]")


async def test_no_access_lines_unless_wanted(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.access")
    await cluster.post(CHAT, {**HELLO, "max_tokens": 2})
    assert not [each for each in caplog.records if each.name == "tandem.access"]
