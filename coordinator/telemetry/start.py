"""Connects the timelines of requests with the exporters that the configuration names."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
from collections.abc import AsyncIterator, Callable

from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)

from common.config.telemetry import TelemetryOptions
from coordinator.requests.timeline import Event, Timeline, Timelines
from coordinator.telemetry.exporter import TraceExporter
from coordinator.telemetry.otlp import OtlpClient, OtlpSettings, endpoint, read_headers
from coordinator.telemetry.server_metrics import ServerMetrics
from coordinator.telemetry.spans import SpanEncoder, put


def service(version: str) -> Resource:
    """Return the attributes of this process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over ours."""
    ours = {
        SERVICE_NAME: "tandem",
        SERVICE_VERSION: version,
        SERVICE_INSTANCE_ID: secrets.token_hex(16),
    }
    return Resource(ours).merge(OTELResourceDetector().detect())


@contextlib.asynccontextmanager
async def exporting(
    options: TelemetryOptions, model: str, version: str, timelines: Timelines, tally: Callable[[str, int], None]
) -> AsyncIterator[Callable[[Timeline], None]]:
    """Export the requests that end in ``timelines``, for the served ``model``; on exit send the last ones. Yields a
    function that exports another request that has ended. ``version`` is Tandem's; ``tally`` as for
    :class:`~coordinator.telemetry.exporter.TraceExporter`. Raises StartError for settings that are invalid."""
    resource, sinks = service(version), list[Callable[[Timeline], None]]()
    async with contextlib.AsyncExitStack() as stack:
        if options.otlp_traces_endpoint is not None:
            scope = common_pb2.InstrumentationScope(name="tandem", version=version)
            traces = _traces(stack, options.otlp_traces_endpoint, model, resource, scope, tally)
            sinks.append(functools.partial(_offer_sampled, traces))
        if options.otlp_metrics_endpoint is not None:
            read_headers(os.environ, "metrics")  # the SDK reads them itself; it logs those that it cannot read
            url = endpoint(options.otlp_metrics_endpoint, "metrics")
            metrics = ServerMetrics(url, model, resource, version)
            stack.push_async_callback(asyncio.to_thread, metrics.close)
            sinks.append(metrics.observe)

        def export(timeline: Timeline) -> None:
            for sink in sinks:
                sink(timeline)

        def listen(timeline: Timeline, event: Event) -> None:
            if event == "end":
                export(timeline)

        timelines.listeners.append(listen)
        yield export


def _traces(
    stack: contextlib.AsyncExitStack,
    url: str,
    model: str,
    resource: Resource,
    scope: common_pb2.InstrumentationScope,
    tally: Callable[[str, int], None],
) -> TraceExporter[Timeline]:
    """Return an exporter to ``url`` that ends with ``stack``."""
    client = OtlpClient(endpoint(url, "traces"), OtlpSettings.read(os.environ))
    stack.push_async_callback(client.close)
    process = resource_pb2.Resource()
    put({key: value for key, value in resource.attributes.items() if isinstance(value, str)}, process.attributes)
    exporter = TraceExporter(client, SpanEncoder(model).encode, process, scope, tally)
    stack.push_async_callback(exporter.close)
    return exporter


def _offer_sampled(traces: TraceExporter[Timeline], timeline: Timeline) -> None:
    if timeline.trace is not None and timeline.trace.sampled:
        traces.offer(timeline)
