"""The queue of traces and the OTLP client: batches, retries, a receiver that is slow, dead or refuses, and the end."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from common.core.errors import StartError
from coordinator.telemetry import exporter as queue
from coordinator.telemetry import otlp
from coordinator.telemetry.exporter import BATCH_SPANS, MAX_QUEUED, TraceExporter
from coordinator.telemetry.otlp import OtlpClient, OtlpSettings, Sent, endpoint
from tests.fakes.otlp import OtlpReceiver, otlp_receiver, spans_in
from tests.unit.coordinator.fake_cluster import until


def encode(name: str, into: ScopeSpans) -> None:
    """Add two spans, or fail for an empty name."""
    into.spans.add(name=name, trace_id=bytes(16), span_id=bytes(8))
    into.spans.add(name=f"{name}'", trace_id=bytes(16), span_id=bytes(8))
    if not name:
        raise ValueError(name)


class StuckClient:
    """Takes nothing before ``go_on`` is set."""

    url = "http://stuck"

    def __init__(self) -> None:
        self.go_on, self.asked = asyncio.Event(), asyncio.Event()
        self.bodies: list[bytes] = []

    async def send(self, body: bytes, closing: asyncio.Event) -> Sent:
        self.bodies.append(body)
        self.asked.set()
        await self.go_on.wait()
        return Sent()


class Exporting:
    """An exporter with its tally."""

    def __init__(self, client: queue.Client, delay_s: float = 0.0) -> None:
        self.tally: Counter[str] = Counter()
        self.exporter = TraceExporter(client, encode, Resource(), InstrumentationScope(), self._count, delay_s)

    def _count(self, outcome: str, count: int) -> None:
        self.tally[outcome] += count

    def offer(self, *names: str) -> None:
        for name in names:
            self.exporter.offer(name)


@asynccontextmanager
async def real(receiver: OtlpReceiver, **environ: str) -> AsyncIterator[Exporting]:
    """Export to a receiver over HTTP."""
    client = OtlpClient(endpoint(receiver.url, "traces"), OtlpSettings.read(environ))
    exporting = Exporting(client)
    try:
        yield exporting
    finally:
        await exporting.exporter.close()
        await client.close()


async def test_traces_arrive() -> None:
    async with otlp_receiver() as receiver:
        async with real(receiver) as exporting:
            exporting.offer("a", "b")
            await receiver.until(lambda: len(receiver.spans) == 4, "two traces")
        assert [span.name for span in receiver.spans] == ["a", "a'", "b", "b'"]
        assert exporting.tally == {"sent": 2, "failed": 0, "dropped": 0}
        assert receiver.headers[0]["Content-Type"] == "application/x-protobuf"


async def test_what_is_queued_at_the_end_is_sent() -> None:
    async with otlp_receiver() as receiver:
        client = OtlpClient(endpoint(receiver.url, "traces"), OtlpSettings.read({}))
        exporting = Exporting(client, delay_s=60.0)
        exporting.offer("a", "b")
        await exporting.exporter.close()
        exporting.offer("too late")
        await client.close()
        assert len(receiver.spans) == 4 and exporting.tally == {"sent": 2, "failed": 0, "dropped": 1}


async def test_headers_and_compression_come_from_the_environment() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x,other=1",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-key=k%3Dv",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    async with otlp_receiver() as receiver:
        async with real(receiver, **environ) as exporting:
            exporting.offer("a")
            await receiver.until(lambda: receiver.spans, "a trace")
        (headers,) = receiver.headers
        assert headers["x-key"] == "k=v" and headers["Content-Encoding"] == "gzip" and "other" not in headers
    assert OtlpSettings.read({"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}).headers == {"a": "b"}


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_receiver_is_asked_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "BACKOFF_S", 0.01)
    async with otlp_receiver() as receiver, real(receiver) as exporting:
        well, busy = receiver.answer, 2

        def answer() -> web.Response:
            nonlocal busy
            busy -= 1
            return well() if busy < 0 else web.Response(status=status, headers={"Retry-After": "0.01"})

        receiver.answer = answer
        exporting.offer("a")
        await receiver.until(lambda: receiver.spans, "a trace after two refusals")
        assert len(receiver.headers) == 3


async def test_a_refusal_is_final_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.telemetry")
    async with otlp_receiver() as receiver, real(receiver) as exporting:
        well, receiver.answer = receiver.answer, lambda: web.Response(status=400)
        for number in range(3):
            exporting.offer("a")
            await receiver.until(lambda number=number: len(receiver.headers) == number + 1, "an attempt")
        receiver.answer = well
        exporting.offer("b")
        await receiver.until(lambda: receiver.spans, "a trace that is taken")
    assert exporting.tally == {"failed": 3, "sent": 1, "dropped": 0}
    texts = [record.getMessage() for record in caplog.records if record.name == "tandem.telemetry"]
    assert texts == [
        f"traces cannot be sent to {receiver.url}/v1/traces and are lost: HTTP status 400",
        f"traces are sent to {receiver.url}/v1/traces again",
    ]


async def test_rejected_spans_count_as_failed() -> None:
    async with otlp_receiver() as receiver:
        partial = ExportTracePartialSuccess(rejected_spans=1, error_message="too large")
        body = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
        receiver.answer = lambda: web.Response(body=body)
        async with real(receiver) as exporting:
            exporting.offer("a", "b")
        assert exporting.tally == {"failed": 1, "sent": 1, "dropped": 0}


@pytest.mark.parametrize("body", [b"", b"\xff\xff nonsense", b"{}" * 100_000])
async def test_an_answer_that_cannot_be_read_is_no_failure(body: bytes) -> None:
    async with otlp_receiver() as receiver:
        receiver.answer = lambda: web.Response(body=body)
        async with real(receiver) as exporting:
            exporting.offer("a")
        assert exporting.tally["sent"] == 1


async def test_a_redirect_is_not_followed() -> None:
    async with otlp_receiver() as receiver:
        receiver.answer = lambda: web.Response(status=307, headers={"Location": f"{receiver.url}/v1/traces"})
        async with real(receiver) as exporting:
            exporting.offer("a")
        assert exporting.tally["failed"] == 1 and len(receiver.headers) == 1


async def test_a_dead_receiver_loses_traces_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(otlp, "BACKOFF_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with real(OtlpReceiver(url)) as exporting:
        exporting.offer("a")
        await until(lambda: exporting.tally["failed"], "the trace is given up")
    assert exporting.tally["failed"] == 1


async def test_a_receiver_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "CLOSING_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections, and is silent
        async with real(OtlpReceiver(f"http://127.0.0.1:{listener.getsockname()[1]}")) as exporting:
            exporting.offer("a")
    assert exporting.tally == {"failed": 1, "dropped": 0}


async def test_a_full_queue_drops_the_newest_and_counts_them() -> None:
    client = StuckClient()
    exporting = Exporting(client)
    exporting.offer("first")
    await client.asked.wait()
    exporting.offer(*map(str, range(MAX_QUEUED + 7)))
    assert exporting.tally == {"dropped": 7}
    client.go_on.set()
    await exporting.exporter.close()
    assert exporting.tally == {"dropped": 7, "failed": 0, "sent": MAX_QUEUED + 1}
    sizes = [len(spans_in(body)) for body in client.bodies]
    assert sum(sizes) == 2 * (MAX_QUEUED + 1) and max(sizes) <= BATCH_SPANS + 1


async def test_what_a_closing_queue_cannot_send_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "CLOSING_S", 0.05)
    client = StuckClient()
    exporting = Exporting(client)
    exporting.offer("sending")
    await client.asked.wait()
    exporting.offer("a", "b")
    await exporting.exporter.close()
    assert exporting.tally == {"failed": 1, "dropped": 2}


async def test_traces_are_encoded_one_per_turn_of_the_event_loop() -> None:
    client = StuckClient()
    client.go_on.set()
    exporting = Exporting(client)
    turns, loop = 0, asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        if not client.asked.is_set():
            loop.call_soon(turn)

    exporting.offer(*map(str, range(50)))
    loop.call_soon(turn)
    await client.asked.wait()
    assert turns >= 50
    await exporting.exporter.close()


async def test_a_request_that_cannot_be_encoded_costs_only_its_own_trace(caplog: pytest.LogCaptureFixture) -> None:
    async with otlp_receiver() as receiver:
        async with real(receiver) as exporting:
            exporting.offer("a", "", "b")
        assert [span.name for span in receiver.spans] == ["a", "a'", "b", "b'"]
        assert exporting.tally == {"failed": 1, "sent": 2, "dropped": 0}
        assert "the trace of a request could not be encoded" in caplog.text


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otlp", "https://a/otlp"),
        ("https://a?team=b", "https://a/v1/traces?team=b"),
        ("https://a/otlp/v1/traces", "https://a/otlp/v1/traces"),
    ],
)
def test_the_path_of_an_endpoint(url: str, full: str) -> None:
    assert endpoint(url, "traces") == full


def test_bad_settings_are_start_errors() -> None:
    with pytest.raises(StartError, match="COMPRESSION"):
        OtlpSettings.read({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"})
    for text in ("secret", "=secret", "a b=secret", "x=secret%0Ay:z", "x=secret\u00fc", "a=1,secret"):
        for variable in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
            with pytest.raises(StartError, match="HEADERS") as refused:
                OtlpSettings.read({variable: text})
            assert "secret" not in str(refused.value)
    assert OtlpSettings.read({"OTEL_EXPORTER_OTLP_HEADERS": " a=1 , ,b=x=y%2Cz, "}).headers == {"a": "1", "b": "x=y,z"}
    with pytest.raises(StartError, match="certificate"):
        OtlpSettings.read({"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere"}).context()


async def test_gzip_of_a_large_body_is_what_the_receiver_reads() -> None:
    message = ExportTraceServiceRequest()
    for number in range(2000):
        message.resource_spans.add().scope_spans.add().spans.add(name=str(number))
    async with otlp_receiver() as receiver:
        client = OtlpClient(
            endpoint(receiver.url, "traces"), OtlpSettings.read({"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"})
        )
        body = message.SerializeToString()
        assert await client.send(body, asyncio.Event()) == Sent()
        await client.close()
        assert int(receiver.headers[0]["Content-Length"]) == len(gzip.compress(body, 1))
        assert len(receiver.spans) == 2000


async def test_a_batch_that_breaks_the_client_is_the_only_one_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenOnce(StuckClient):
        async def send(self, body: bytes, closing: asyncio.Event) -> Sent:
            if not self.bodies:
                self.bodies.append(body)
                raise ZeroDivisionError
            return await super().send(body, closing)

    client = BrokenOnce()
    client.go_on.set()
    exporting = Exporting(client)
    exporting.offer("a", "b")
    await until(lambda: exporting.tally["failed"] == 2, "the first batch is lost")
    exporting.offer("c")
    await until(lambda: exporting.tally["sent"] == 1, "the next one is sent")
    assert "a batch of traces is lost" in caplog.text
    await exporting.exporter.close()
