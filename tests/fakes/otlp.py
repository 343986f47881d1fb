"""An OTLP receiver over real HTTP: decodes what it is sent and keeps it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDictProxy
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.pace import scaled


@dataclass(frozen=True)
class ReceivedSpan:
    """One span. Ids are hexadecimal, "" for no parent; times are in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    kind: int
    flags: int
    state: str
    status: tuple[int, str]
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    resource: dict[str, Any]
    scope: str

    @property
    def ms(self) -> float:
        return (self.end - self.start) / 1e6


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def plain_dict(attributes: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(attributes)
    assert len({each.key for each in pairs}) == len(pairs), "an attribute is given twice"
    return {each.key: plain(each.value) for each in pairs}


def spans_in(body: bytes) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
            span.start_time_unix_nano, span.end_time_unix_nano, span.kind, span.flags, span.trace_state,
            (span.status.code, span.status.message), plain_dict(span.attributes),
            [(event.name, event.time_unix_nano, plain_dict(event.attributes)) for event in span.events],
            plain_dict(of_resource.resource.attributes), of_scope.scope.name,
        )
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]  # fmt: skip


@dataclass
class OtlpReceiver:
    """What has been received at ``url``, which has no path. ``answer`` makes the response to a request with traces."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    """The data points of each metric as they came last."""
    headers: list[CIMultiDictProxy[str]] = field(default_factory=list)
    answer: Callable[[], web.Response] = field(
        default=lambda: web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )
    )
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def traces(self, request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp has decompressed it
        self.headers.append(request.headers)
        response = self.answer()
        if response.status == 200:
            self.spans += spans_in(body)
        self.news.set()
        return response

    async def measurements(self, request: web.Request) -> web.Response:
        body = await request.read()
        for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for of_scope in of_resource.scope_metrics:
                for metric in of_scope.metrics:
                    self.metrics[metric.name] = (metric.unit, list(metric.histogram.data_points))
        self.news.set()
        return web.Response(content_type="application/x-protobuf")

    async def until(self, condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
        """Wait until what was received makes ``condition`` true."""
        try:
            async with asyncio.timeout(scaled(seconds)):
                while not condition():
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            raise AssertionError(f"{what}: {[span.name for span in self.spans]}, {sorted(self.metrics)}") from None

    def traces_of(self) -> dict[str, list[ReceivedSpan]]:
        """Return the spans of each trace."""
        found: dict[str, list[ReceivedSpan]] = {}
        for span in self.spans:
            found.setdefault(span.trace_id, []).append(span)
        return found


@contextlib.asynccontextmanager
async def otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    """Run a receiver on loopback."""
    receiver = OtlpReceiver()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", receiver.traces)
    app.router.add_post("/v1/metrics", receiver.measurements)
    async with TestServer(app) as server:
        receiver.url = f"http://127.0.0.1:{server.port}"
        yield receiver
