"""Traces of a real system at a real OTLP receiver: one trace per request, whose times are those of the answer."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from tests.e2e.system import RunningSystem
from tests.fakes.otlp import ReceivedSpan, otlp_receiver

pytestmark = pytest.mark.e2e
T = TypeVar("T")
TRACE, UNSAMPLED, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
WITHIN_MS = 2.0


@asynccontextmanager
async def in_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave ``manager`` in a thread, while the receiver answers in this one."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, *sys.exc_info())


async def ask(url: str, prompt: list[int], parent: str = "") -> tuple[dict[str, str], dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0, "return_metrics": True}
    headers = {"traceparent": parent, "tracestate": "vendor=1"} if parent else {}
    async with (
        aiohttp.ClientSession(url) as session,
        session.post("/v1/completions", json=body, headers=headers) as got,
    ):
        assert got.status == 200, await got.text()
        return {name.lower(): value for name, value in got.headers.items()}, await got.json()


def by_name(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


async def test_a_request_of_a_pair_is_one_trace(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    prompt = [10 + index % 50 for index in range(300)]
    async with otlp_receiver() as receiver:
        to = ["--otlp-traces-endpoint", receiver.url, "--otlp-metrics-endpoint", receiver.url]
        flags = [
            *to,
            "--max-num-batched-tokens",
            "64",
            "--local-prefill",
            "never",
            "--access-log",
            "--log-format",
            "json",
        ]
        async with in_thread(RunningSystem.up(tmp_path, checkpoint("llama"), *flags)) as system:
            headers, body = await ask(system.url, prompt, f"00-{TRACE}-{SPAN}-01")
            dark, _ = await ask(system.url, prompt[1:], f"00-{UNSAMPLED}-{SPAN}-00")
            own, _ = await ask(system.url, prompt[2:])
            await receiver.until(lambda: len(receiver.traces_of()) == 2, "the traces of two requests")
            log = system.process.text
        await receiver.until(lambda: len(receiver.metrics) == 3, "the metrics of the process that has ended")

    traces = receiver.traces_of()
    own_trace = own["traceparent"].split("-")[1]
    assert set(traces) == {TRACE, own_trace}, "a request that its caller does not sample is not exported"
    assert dark["traceparent"].startswith(f"00-{UNSAMPLED}-") and dark["traceparent"].endswith("-00")
    spans = traces[TRACE]
    (root,) = [span for span in spans if span.parent_id == SPAN]
    assert headers["traceparent"] == f"00-{TRACE}-{root.span_id}-01" and headers["tracestate"] == "vendor=1"
    assert len(spans) >= 6 and all(span.state == "vendor=1" for span in spans)

    inside = {span.span_id: span for span in spans}
    for span in spans:
        if span is not root:
            parent = inside[span.parent_id]
            assert parent.start <= span.start <= span.end <= parent.end, f"{span.name} in {parent.name}"
    names = [span.name for span in spans if span.parent_id == root.span_id]
    assert names == ["tokenize", "queue", "prefill", "transfer", "decode"]
    prefill, decode = by_name(spans, "prefill"), by_name(spans, "decode")
    chunks = [span for span in spans if span.parent_id == prefill.span_id]
    assert {span.name for span in chunks} == {"prefill_chunk"} and len(chunks) >= 300 // 64
    assert sum(span.attributes["tandem.tokens"] for span in chunks) == 300
    assert (prefill.attributes["tandem.worker"], decode.attributes["tandem.worker"]) == ("prefill-0", "decode-0")

    told = body["tandem"]
    before = [by_name(spans, name) for name in ("tokenize", "queue", "prefill")]
    transfer = by_name(spans, "transfer")
    assert sum(span.ms for span in before) == pytest.approx(told["ttft_ms"], abs=WITHIN_MS)
    assert root.attributes["gen_ai.response.time_to_first_chunk"] * 1000 == pytest.approx(
        told["ttft_ms"], abs=WITHIN_MS
    )
    exposed_ms = transfer.attributes["tandem.exposed_ms"]
    assert sum(span.ms for span in before) + exposed_ms + decode.ms == pytest.approx(root.ms, abs=WITHIN_MS)

    said = root.attributes
    assert root.name == "text_completion model" and root.kind == 2  # a server span
    assert said["gen_ai.usage.input_tokens"] == 300 and said["gen_ai.usage.output_tokens"] == 12
    assert said["gen_ai.response.id"] == body["id"] and said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["gen_ai.request.max_tokens"] == 12 and said["gen_ai.request.temperature"] == 0
    assert root.resource["service.name"] == "tandem" and root.scope == "tandem"

    lines = [json.loads(line[line.index("{") :]) for line in log.splitlines() if '"tandem.access"' in line]
    assert [line["trace_id"] for line in lines if line["route"] == "/v1/completions"] == [TRACE, UNSAMPLED, own_trace]

    unit, (duration,) = receiver.metrics["gen_ai.server.request.duration"]
    assert unit == "s" and duration.count == 3 and len(duration.explicit_bounds) == 14
    assert receiver.metrics["gen_ai.server.time_to_first_token"][1][0].count == 3
    assert receiver.metrics["gen_ai.server.time_per_output_token"][1][0].count == 3
