"""The queue between ended requests and the OTLP receiver of their traces.

Owns a bounded queue and one task. A request that ends is only put into the queue; the task encodes it later, one trace
per turn of the event loop, so that no stream waits for more than one trace. If the receiver is slow or dead, the queue
fills up, and further traces are dropped and counted: nothing waits for it, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from coordinator.telemetry.otlp import Sent

log = logging.getLogger("tandem.telemetry")

MAX_QUEUED = 1024
"""Traces that may wait to be sent."""
BATCH_SPANS = 512
"""An export request gets no more traces once it has this many spans."""
DELAY_S = 1.0
"""How long a trace may wait for others to be sent with it."""
CLOSING_S = 1.5
"""Longest time to send what is queued when the process ends. With the time for metrics it must be shorter than what a
launcher allows for an exit."""

Ended = TypeVar("Ended")


class Client(Protocol):
    """Sends export requests; :class:`coordinator.telemetry.otlp.OtlpClient`."""

    url: str

    async def send(self, body: bytes, closing: asyncio.Event) -> Sent:
        """Send a serialized export request."""


class TraceExporter(Generic[Ended]):
    """Sends the traces of requests that have ended; ``encode`` adds the spans of one to a message. ``tally`` is called
    with an outcome and a number of traces: ``sent``, ``dropped`` (the queue was full, or the process has ended) or
    ``failed`` (the receiver did not take all of their spans)."""

    def __init__(
        self,
        client: Client,
        encode: Callable[[Ended, ScopeSpans], None],
        resource: Resource,
        scope: InstrumentationScope,
        tally: Callable[[str, int], None],
        delay_s: float = DELAY_S,
    ) -> None:
        self._client, self._encode, self._tally, self._delay_s = client, encode, tally, delay_s
        self._resource, self._scope = resource, scope
        self._queue: deque[Ended] = deque()
        self._some, self._many, self._closing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._well = True
        self._task = asyncio.create_task(self._run())

    def offer(self, ended: Ended) -> None:
        """Queue a request that has ended; drop it if the queue is full."""
        if len(self._queue) >= MAX_QUEUED or self._closing.is_set():
            self._tally("dropped", 1)
            return
        self._queue.append(ended)
        self._some.set()
        if len(self._queue) >= MAX_QUEUED // 8:
            self._many.set()

    async def close(self) -> None:
        """Send what is queued, for at most CLOSING_S; the rest is dropped."""
        self._closing.set()
        self._some.set()
        self._many.set()
        try:
            async with asyncio.timeout(CLOSING_S):
                await self._task
        except TimeoutError:  # the task has been cancelled
            pass
        self._tally("dropped", len(self._queue))
        self._queue.clear()

    async def _run(self) -> None:
        while not self._closing.is_set() or self._queue:
            await self._some.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._delay_s):
                    await self._many.wait()
            while self._queue:
                try:
                    await self._export()
                except Exception:  # the next batch may be sent all the same
                    log.exception("a batch of traces is lost")
            if not self._closing.is_set():
                self._some.clear()
                self._many.clear()

    async def _export(self) -> None:
        """Send one batch of the queue."""
        message = ExportTraceServiceRequest()
        of_resource = message.resource_spans.add(resource=self._resource)
        spans, traces = of_resource.scope_spans.add(scope=self._scope), 0
        try:
            while self._queue and len(spans.spans) < BATCH_SPANS:
                traces += self._encoded(self._queue.popleft(), spans)
                await asyncio.sleep(0)
            sent = await self._client.send(message.SerializeToString(), self._closing)
        except BaseException:
            self._tally("failed", traces)
            raise
        lost = min(traces, sent.rejected) if sent.rejected else traces if sent.failure else 0
        self._tally("failed", lost)
        self._tally("sent", traces - lost)
        self._report(sent.failure)

    def _encoded(self, ended: Ended, spans: ScopeSpans) -> int:
        """Add the spans of one request. Return the number of traces added, 0 if they could not be encoded."""
        before = len(spans.spans)
        try:
            self._encode(ended, spans)
        except Exception:  # one request must not stop the traces of all others
            del spans.spans[before:]
            self._tally("failed", 1)
            log.exception("the trace of a request could not be encoded")
            return 0
        return 1

    def _report(self, failure: str) -> None:
        """Log when the receiver stops to take spans, and when it takes them again."""
        if failure and self._well:
            log.warning("traces cannot be sent to %s and are lost: %s", self._client.url, failure)
        elif not failure and not self._well:
            log.info("traces are sent to %s again", self._client.url)
        self._well = not failure
