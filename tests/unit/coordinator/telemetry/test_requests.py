"""Traces and metrics of requests to a coordinator with fake workers, at a receiver that speaks real OTLP."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.core.errors import StartError
from common.core.ids import RequestId
from common.net.messages import Generate, RequestFailed, Role
from coordinator.telemetry import otlp
from deploy.launcher.scaling import LEAVE_GRACE_S
from tests.fakes.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.leaked_keys import new_key
from tests.pace import scaled
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, open_cluster, until

SERVER, INTERNAL = 2, 1
ERROR = 2
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PAIR: tuple[Role, ...] = ("prefill", "decode")


@contextlib.asynccontextmanager
async def traced(model: Path, *roles: Role, **options: Any) -> AsyncIterator[tuple[FakeCluster, OtlpReceiver]]:
    async with otlp_receiver() as receiver:
        options = {"otlp_traces_endpoint": receiver.url, **options}
        async with open_cluster(model, *roles, **options) as cluster:
            yield cluster, receiver


def parent(sampled: bool, trace: str = TRACE) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{SPAN}-0{int(sampled)}"}


def tree(spans: list[ReceivedSpan]) -> tuple[ReceivedSpan, dict[str, list[str]]]:
    """Return the server span, and the names of the children of each span that has some; checks that children lie inside
    their parents."""
    (root,) = [span for span in spans if span.kind == SERVER]
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    children: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span is not root:
            above = by_id[span.parent_id]
            assert span.kind == INTERNAL and above.start <= span.start <= span.end <= above.end, span
            children.setdefault(above.name if above is not root else "", []).append(span.name)
    return root, children


async def test_a_chat_is_a_trace(model: Path) -> None:
    async with traced(model, *PAIR) as (cluster, receiver):
        asked = {**HELLO, "max_tokens": 6, "temperature": 0.5, "seed": 7, "n": 2, "return_metrics": True}
        response, body = await cluster.post(CHAT, asked, headers=parent(True) | {"X-Request-Id": "mine"})
        await receiver.until(lambda: receiver.spans, "a trace")
    root, children = tree(receiver.spans)
    assert (root.trace_id, root.parent_id, root.name) == (TRACE, SPAN, "chat tiny")
    assert response.headers["traceparent"] == f"00-{TRACE}-{root.span_id}-01"
    assert [name for name in children[""] if name != "transfer"] == ["tokenize", "queue", "prefill", "decode"]
    said = root.attributes
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.provider.name"] == "tandem"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert said["gen_ai.response.id"] == body["id"] and said["tandem.request_id"] == "mine"
    assert said["gen_ai.response.finish_reasons"] == ["length", "length"] and said["gen_ai.request.stream"] is False
    assert said["gen_ai.request.choice.count"] == 2 and said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.usage.input_tokens"] == body["usage"]["prompt_tokens"]
    assert (
        said["gen_ai.usage.output_tokens"] == 12 and said["tandem.path"] == "disagg" and said["tandem.state"] == "done"
    )
    assert said["http.route"] == CHAT and "error.type" not in said and root.status == (0, "")
    assert said["http.response.status_code"] == response.status == 200
    assert [name for name, _, _ in root.events] == ["place", "first_token"]
    place = root.events[0][2]
    assert (place["tandem.prefill"], place["tandem.decode"]) == ("prefill-0", "decode-1") and place["tandem.why"]
    before = [span for span in receiver.spans if span.name in ("tokenize", "queue", "prefill")]
    assert sum(span.ms for span in before) == pytest.approx(body["tandem"]["ttft_ms"], abs=2)
    assert said["gen_ai.response.time_to_first_chunk"] == pytest.approx(body["tandem"]["ttft_ms"] / 1000, abs=0.002)
    assert root.flags == 0x301 and {span.flags for span in receiver.spans if span is not root} == {0x101}


async def test_nothing_of_what_is_written_or_answered_is_in_a_trace(model: Path) -> None:
    async with traced(model, *PAIR) as (cluster, receiver):
        asked = {
            "messages": [{"role": "user", "content": "my secret prompt"}], "stop": ["my secret stop"],
            "user": "my secret name", "max_tokens": 4, "cache_salt": "my secret salt",
        }  # fmt: skip
        _, body = await cluster.post(CHAT, asked, headers={"Authorization": "Bearer my-secret-key"})
        await receiver.until(lambda: receiver.spans, "a trace")
    assert "secret" not in str(receiver.spans) and body["choices"][0]["message"]["content"] not in str(receiver.spans)


async def test_the_callers_flag_wins_over_the_ratio(model: Path) -> None:
    async with traced(model, "colocated", trace_sample_ratio=0.0) as (cluster, receiver):
        await cluster.post(CHAT, HELLO | {"max_tokens": 2}, headers=parent(False, "a" * 32))
        await cluster.post(CHAT, HELLO | {"max_tokens": 2})
        response, _ = await cluster.post(CHAT, HELLO | {"max_tokens": 2}, headers=parent(True))
        assert response.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert set(receiver.traces_of()) == {TRACE}
    async with traced(model, "colocated") as (cluster, receiver):
        await cluster.post(CHAT, HELLO | {"max_tokens": 2}, headers=parent(False))
        response, _ = await cluster.post(CHAT, HELLO | {"max_tokens": 2})
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", response.headers["traceparent"])
    assert set(receiver.traces_of()) == {response.headers["traceparent"].split("-")[1]}


async def test_each_prompt_of_a_request_has_a_server_span(model: Path) -> None:
    async with traced(model, *PAIR) as (cluster, receiver):
        asked = {"prompt": ["a", "b", "c"], "max_tokens": 3}
        response, _ = await cluster.post(TEXT, asked, headers=parent(True))
    roots = [span for span in receiver.spans if span.kind == SERVER]
    assert {(span.trace_id, span.parent_id, span.name) for span in roots} == {(TRACE, SPAN, "text_completion tiny")}
    assert len({span.span_id for span in roots}) == 3
    assert response.headers["traceparent"].split("-")[2] in {span.span_id for span in roots}
    assert len({span.attributes["gen_ai.response.id"] for span in roots}) == 3


@pytest.mark.parametrize(("failure", "status"), [("too_long", 400), ("engine_error", 500)])
async def test_a_failure_has_the_code_of_its_error(model: Path, failure: str, status: int) -> None:
    refusal = RequestFailed(RequestId(bytes(16)), 0, failure, "9 tokens, 5 fit", retriable=False)
    async with traced(model) as (cluster, receiver):
        await cluster.add("colocated", refuse=refusal)
        response, body = await cluster.post(CHAT, HELLO)
        assert response.status == status
    root, _ = tree(receiver.spans)
    assert root.status == (ERROR if status >= 500 else 0, "")
    assert root.attributes["error.type"] == body["error"]["code"] and root.attributes["tandem.state"] == "failed"
    assert root.attributes["http.response.status_code"] == status and body["error"]["message"] not in str(
        receiver.spans
    )


async def test_a_request_that_is_refused_before_it_is_queued_is_a_trace(model: Path) -> None:
    secret = new_key()
    async with traced(model, api_key=secret) as (cluster, receiver):
        key = {"Authorization": f"Bearer {secret}"}
        for path, body, headers, status in (
            (CHAT, {}, key, 400),
            (CHAT, {}, key | parent(False), 400),
            (CHAT, {}, {}, 401),
            ("/tokenize", {}, key, 400),
            ("/v1/nothing", {}, key, 404),
        ):
            response, _ = await cluster.post(path, body, headers=headers)
            assert response.status == status
        cluster.dispatcher.draining = True
        response, _ = await cluster.post(TEXT, {"prompt": "x"}, headers=key | parent(True))
        assert response.status == 503
    roots = [span for span in receiver.spans if span.kind == SERVER]
    assert [(span.name, span.attributes["error.type"]) for span in roots] == [
        ("chat tiny", "missing_required_parameter"), ("text_completion tiny", "server_shutting_down"),
    ]  # fmt: skip
    assert [span.status for span in roots] == [(0, ""), (ERROR, "")] and roots[1].parent_id == SPAN
    assert [span.attributes["http.response.status_code"] for span in roots] == [400, 503]
    assert len(receiver.spans) == 4 and {span.name for span in receiver.spans if span not in roots} == {"tokenize"}


async def test_a_client_that_leaves_is_no_error(model: Path) -> None:
    async with traced(model) as (cluster, receiver):
        worker = await cluster.add("colocated", step_s=0.05)
        asked = asyncio.create_task(cluster.post(CHAT, HELLO | {"max_tokens": 500}))
        await until(lambda: worker.busy, "it is served")
        asked.cancel()
        await cluster.idle()
    root, _ = tree(receiver.spans)
    assert root.attributes["tandem.state"] == "aborted" and root.status == (0, "")
    assert "http.response.status_code" not in root.attributes


async def test_a_stream_that_breaks_off_had_its_status(model: Path) -> None:
    async with traced(model) as (cluster, receiver):
        worker = await cluster.add("colocated", step_s=0.01)
        asked = HELLO | {"max_tokens": 500, "stream": True}
        async with cluster.client.post(f"{cluster.url}{CHAT}", json=asked) as response:
            assert response.status == 200 and await response.content.readline()
            (began,) = worker.got(Generate)
            worker.say(RequestFailed(began.request.id, 0, "engine_error", "it broke", retriable=False))
            assert "engine_error" in await response.text()
    root, _ = tree(receiver.spans)
    assert root.attributes["tandem.state"] == "failed" and root.attributes["error.type"] == "engine_error"
    assert root.attributes["http.response.status_code"] == 200 and root.status == (ERROR, "")


async def test_a_migration_is_a_span_with_the_next_attempt_in_it(model: Path) -> None:
    async with traced(model, "prefill") as (cluster, receiver):
        first = await cluster.add("decode", step_s=0.02)
        asked = asyncio.create_task(cluster.stream(TEXT, {"prompt": "x", "max_tokens": 30}))
        await until(lambda: any(record.output_length > 5 for record in cluster.dispatcher.records.values()), "tokens")
        await cluster.add("decode")
        first.stop()
        await asked
    root, children = tree(receiver.spans)
    (migration,) = [span for span in receiver.spans if span.name == "migration"]
    assert root.attributes["tandem.migrations"] == 1 and migration.attributes["tandem.from"] == "decode-1"
    assert {"queue", "prefill"} <= set(children["migration"])
    assert [name for name in children[""] if name in ("decode", "migration")] == ["decode", "migration", "decode"]
    again = [span for span in receiver.spans if span.attributes.get("tandem.attempt") == 1 and span.name == "decode"]
    assert [span.attributes["tandem.worker"] for span in again] == ["decode-2"]


async def test_a_dead_receiver_costs_only_traces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with open_cluster(model, *PAIR, otlp_traces_endpoint=url) as cluster:
        for _ in range(3):
            response, _ = await cluster.post(CHAT, HELLO | {"max_tokens": 2})
            assert response.status == 200

        failed = b'tandem_otlp_traces_total{outcome="failed"} 3.0'
        await until(lambda: failed in cluster.services.metrics.page(), "the traces count as failed")


def labels(point: Any) -> tuple[str, ...]:
    """Return the operation of a data point, and the type of error if there is one."""
    found = {each.key: each.value.string_value for each in point.attributes}
    return tuple(found[key] for key in ("gen_ai.operation.name", "error.type") if key in found)


async def test_metrics_are_pushed(model: Path) -> None:
    refusal = RequestFailed(RequestId(bytes(16)), 0, "too_long", "9 tokens, 5 fit", retriable=False)
    async with otlp_receiver() as receiver:
        async with open_cluster(model, otlp_metrics_endpoint=receiver.url) as cluster:
            worker = await cluster.add("colocated")
            response, _ = await cluster.post(CHAT, HELLO | {"max_tokens": 5})
            assert "traceparent" not in response.headers
            await cluster.stream(TEXT, {"prompt": "x", "max_tokens": 1})
            worker.refuse = refusal
            await cluster.post(CHAT, HELLO)
            await cluster.post("/v1/responses", {})
        assert not receiver.spans
    points = {name: {labels(point): point for point in found} for name, (_, found) in receiver.metrics.items()}
    duration = points["gen_ai.server.request.duration"]
    assert {key: point.count for key, point in duration.items()} == {
        ("chat",): 1, ("text_completion",): 1, ("chat", "context_length_exceeded"): 1,
        ("chat", "missing_required_parameter"): 1,
    }  # fmt: skip
    assert {key: point.count for key, point in points["gen_ai.server.time_to_first_token"].items()} == {
        ("chat",): 1, ("text_completion",): 1,
    }  # fmt: skip
    per_token = points["gen_ai.server.time_per_output_token"]
    assert {key: point.count for key, point in per_token.items()} == {("chat",): 1}
    assert 0 < per_token["chat",].sum < duration["chat",].sum
    assert list(duration["chat",].explicit_bounds)[:3] == [0.01, 0.02, 0.04]
    assert {unit for unit, _ in receiver.metrics.values()} == {"s"}


async def test_a_start_without_the_package_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.config.telemetry.PACKAGES", ("no_such_package",))
    with pytest.raises(StartError, match="needs OpenTelemetry"):
        async with open_cluster(model, otlp_traces_endpoint="http://127.0.0.1:1"):
            pass


async def test_bad_settings_of_the_connection_are_start_errors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/no/such/file")
    with pytest.raises(StartError, match="certificate"):
        async with open_cluster(model, otlp_traces_endpoint="https://127.0.0.1:1"):
            pass


async def test_a_receiver_that_hangs_does_not_hold_up_the_end(model: Path) -> None:
    """A launcher kills a process that does not exit in time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with open_cluster(model, "colocated", otlp_traces_endpoint=url, otlp_metrics_endpoint=url) as cluster:
            await cluster.post(CHAT, HELLO | {"max_tokens": 2})
            began = time.monotonic()
        assert time.monotonic() - began < scaled(LEAVE_GRACE_S)
