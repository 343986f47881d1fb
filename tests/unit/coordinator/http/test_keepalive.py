"""Keep-alives: what a stream sends while it waits for a token, and that SSE readers do not take it for an event.

The worker makes a token only after the reader has seen keep-alives, so the tests do not depend on the machine's speed.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator.http import answer, sse
from tests.fakes.checkpoint import fake_checkpoint
from tests.unit.coordinator.fake_cluster import FakeCluster, open_cluster, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
INTERVAL_S = 0.1
TOKENS = 4
WAITS = 2
"""Number of keep-alives that must arrive before each token is made."""
ASKED = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
LINES = re.compile(rb"(?:\n|data: [^\n]*\n)*(?:d[^\n]*)?")
BODIES = {TEXT: {"prompt": "hello", **ASKED}, CHAT: {"messages": [{"role": "user", "content": "hello"}], **ASKED}}


@dataclass
class Gate:
    """A coordinator with one worker that makes one token per :meth:`release`."""

    cluster: FakeCluster
    _permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    async def open(self) -> None:
        worker = await self.cluster.add("colocated", step_s=0.0)
        step = worker._step

        def gated(control: Any, now: float) -> None:
            if worker.busy and self._permits.acquire(blocking=False):
                step(control, now)

        worker._step = gated  # type: ignore[method-assign]

    def release(self, tokens: int = 1) -> None:
        self._permits.release(tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture
async def gate(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Gate]:
    async with open_cluster(model, **getattr(request, "param", {})) as cluster:
        gate = Gate(cluster)
        await gate.open()
        yield gate


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sse, answer):
        monkeypatch.setattr(module, "KEEPALIVE_S", INTERVAL_S)


# -- readers ----------------------------------------------------------------------------------------------------------


class Standard:
    """The algorithm of the WHATWG's "Interpreting an event stream", for ``data`` fields alone."""

    def __init__(self) -> None:
        self._rest, self._data = "", ""

    def feed(self, chunk: bytes) -> list[str]:
        *lines, self._rest = re.split(r"\r\n|\n|\r", self._rest + chunk.decode())
        found = []
        for line in lines:
            if not line:
                if self._data:
                    found.append(self._data.removesuffix("\n"))
                self._data = ""
                continue
            name, _, value = line.partition(":")
            if name == "data":
                self._data += value.removeprefix(" ") + "\n"
        return found


class Stripped:
    """A reader that strips every chunk and splits at two line breaks; a complete rest counts as an event."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, chunk: bytes) -> list[str]:
        *parts, self._rest = (self._rest + chunk.strip().decode()).split("\n\n")
        if _is_whole(self._rest):
            parts.append(self._rest)
            self._rest = ""
        return [part.removeprefix("data: ") for part in map(str.strip, parts) if part and not part.startswith(":")]


def _is_whole(part: str) -> bool:
    if not part.startswith("data: "):
        return False
    try:
        json.loads(part[6:])
    except ValueError:
        return part == "data: [DONE]"
    return True


class Parts:
    """A reader that splits at two line breaks and takes the parts that begin with ``data: ``."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, chunk: bytes) -> list[str]:
        *parts, self._rest = (self._rest + chunk.decode()).split("\n\n")
        return [part[6:] for part in parts if part.startswith("data: ")]


READERS: tuple[Callable[[], Any], ...] = (Standard, Stripped, Parts)


def plain(events: list[str]) -> list[Any]:
    """Return the events without the fields that differ between two requests; the last event must be [DONE]."""
    assert events[-1] == "[DONE]"
    return [{name: value for name, value in json.loads(each).items() if name not in ("id", "created")}
            for each in events[:-1]]  # fmt: skip


async def with_waits(gate: Gate, path: str, reader: Any) -> tuple[list[str], bytes]:
    """Return the events as ``reader`` yields them, and all bytes. A token is made once WAITS keep-alives have followed
    the previous one, which the reader must have yielded by then."""
    url, events, data, released = f"{gate.cluster.url}{path}", [], b"", 0
    async with gate.cluster.client.post(url, json=BODIES[path]) as response:
        async for chunk in response.content.iter_any():
            data += chunk
            events += reader.feed(chunk)
            assert LINES.fullmatch(data), "something else than data and empty lines"
            come, breaks = data.count(b"data: "), len(data) - len(data.rstrip(b"\n"))
            if come == released < TOKENS and breaks >= WAITS * len(sse.KEEPALIVE) + (2 if come else 0):
                assert len(events) == released, "an event was held back"
                released += 1
                gate.release()
    return events, data


async def without_waits(gate: Gate, path: str) -> list[str]:
    gate.release(TOKENS)
    async with gate.cluster.client.post(f"{gate.cluster.url}{path}", json=BODIES[path]) as response:
        return Standard().feed(await response.read())


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("reader", READERS)
async def test_each_reader_has_each_event_at_its_time(
    gate: Gate, path: str, reader: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plain(await without_waits(gate, path))
    for module in (sse, answer):
        monkeypatch.setattr(module, "KEEPALIVE_S", INTERVAL_S)
    events, data = await with_waits(gate, path, reader())
    assert plain(events) == wanted and len(events) == TOKENS + 3
    assert re.fullmatch(rb"(?:\n*data: [^\n]+\n\n)+", data), "an event has an end of its own"
    assert data.count(b"\n") >= TOKENS * WAITS + 2 * len(events)
    for waited in range(4):  # a late or buffered reader gets all keep-alives at once
        late = (sse.KEEPALIVE * waited).join(re.findall(rb"data: [^\n]+\n\n", data))
        assert plain(reader().feed(late)) == wanted


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("gate", [{"request_timeout": 1.0}], indirect=True)
@pytest.mark.parametrize("reader", READERS)
async def test_an_error_after_a_wait_is_an_event_of_its_own(gate: Gate, reader: Callable[[], Any]) -> None:
    reading, events, data = reader(), [], b""
    async with gate.cluster.client.post(f"{gate.cluster.url}{TEXT}", json=BODIES[TEXT]) as response:
        assert response.status == 200
        async for chunk in response.content.iter_any():
            data += chunk
            events += reading.feed(chunk)
    error, end = events
    assert json.loads(error)["error"]["code"] == "request_timeout" and end == "[DONE]"
    assert data.startswith(sse.KEEPALIVE) and not data.partition(b"data")[0].strip()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_waiting_stream_is_never_silent_for_longer_than_the_interval(gate: Gate, version: str) -> None:
    """Headers come after one interval, then keep-alives one by one; the bytes on the wire are checked. HTTP/1.0, which
    nginx speaks, has no chunks."""
    host, port = gate.cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(BODIES[TEXT]).encode()
    head = f"POST {TEXT} HTTP/{version}\r\nHost: {host}\r\nContent-Length: {len(body)}"
    sent = time.monotonic()
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in answer and (b"chunked" in answer) == (version == "1.1")
    times = [time.monotonic() - sent]
    keepalive = sse.KEEPALIVE if version == "1.0" else b"%x\r\n%b\r\n" % (len(sse.KEEPALIVE), sse.KEEPALIVE)
    for _ in range(3):
        assert await reader.readexactly(len(keepalive)) == keepalive
        times.append(time.monotonic() - sent)
    assert all(at >= INTERVAL_S * (index + 1) * 0.9 for index, at in enumerate(times)), times
    gate.release(TOKENS)
    rest = await reader.readuntil(b"data: [DONE]\n\n")
    assert rest.count(b"data: ") == TOKENS + 3
    writer.close()
    await until(lambda: not gate.cluster.dispatcher.records, "the request ends")
