"""Draining a coordinator: running requests end, new ones are refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from coordinator.app import drain
from tests.pace import scaled
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, FakeCluster, _ask_and_read_no_more, open_cluster, until


async def test_drain_finishes_running_requests_and_refuses_new_ones(model: Path) -> None:
    async with open_cluster(model, "prefill", drain_timeout=60.0) as cluster:
        await cluster.add("decode", step_s=0.02)
        asked = asyncio.create_task(cluster.stream(CHAT, {**HELLO, "max_tokens": 20}))
        await until(lambda: cluster.workers[1].busy, "it runs")
        draining = asyncio.create_task(drain(cluster.services, asyncio.Event()))
        await until(lambda: cluster.dispatcher.draining, "it drains")
        response, body = await cluster.post(CHAT, HELLO)
        assert response.status == 503 and body["error"]["code"] == "server_shutting_down"
        assert response.headers["Connection"] == "close"
        assert (await cluster.get("/ready"))[0].status == 503
        _, events = await asked
        assert len(events) == 21
        await draining


async def test_a_drain_that_takes_too_long_ends_streams_with_an_error(model: Path) -> None:
    async with open_cluster(model, "prefill", drain_timeout=0.1) as cluster:
        await cluster.add("decode", step_s=0.02)
        asked = asyncio.create_task(cluster.stream(CHAT, {**HELLO, "max_tokens": 500}))
        await until(lambda: cluster.workers[1].busy, "it runs")
        await drain(cluster.services, asyncio.Event())
        _, events = await asked
        assert events[-1]["error"]["code"] == "server_shutting_down"


async def _leave_unread(cluster: FakeCluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request whose answer is larger than the socket buffers; return when it is computed, with nothing read."""
    asked = {"prompt": ["x"] * 3, "n": 16, "logprobs": 20, "max_tokens": 900, "ignore_eos": True, "seed": 1}
    connection = await _ask_and_read_no_more(cluster, asked)
    await until(lambda: cluster.workers[0].busy, "it runs")
    await until(lambda: not cluster.dispatcher.records, "it is computed", 20)
    return connection


async def test_a_drain_waits_for_an_answer_that_is_still_read(model: Path) -> None:
    async with open_cluster(model, drain_timeout=60.0) as cluster:
        await cluster.add("colocated", step_s=0.0, changes={"kv_blocks": 8192})
        reader, writer = await _leave_unread(cluster)
        draining = asyncio.create_task(drain(cluster.services, asyncio.Event()))
        done, _ = await asyncio.wait([draining], timeout=0.3)
        assert not done
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.findall(rb"Content-Length: (\d+)", head)[0]))
        await draining
        writer.close()


async def test_drain_timeout_closes_unread_connections(model: Path) -> None:
    async with open_cluster(model, drain_timeout=0.1) as cluster:
        await cluster.add("colocated", step_s=0.0, changes={"kv_blocks": 8192})
        reader, writer = await _leave_unread(cluster)
        async with asyncio.timeout(scaled(5)):
            await drain(cluster.services, asyncio.Event())
        assert cluster.services.answers.count == 1
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # the connections are closed
        await reader.readexactly(64 << 20)
    writer.close()
