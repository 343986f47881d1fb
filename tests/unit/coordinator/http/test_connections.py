"""API keys, requests from other sites, slow or vanished readers, and connections that are held open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import HttpVersion11, web

from common.net.messages import Abort
from coordinator.http import application
from coordinator.http.application import make_runner
from coordinator.http.context import read_timeout
from coordinator.http.repeats import RateLimitedLog
from coordinator.http.server import MAX_WAITING_BYTES, Connection
from coordinator.http.sse import EventStream, deliver
from tests.leaked_keys import new_key
from tests.pace import scaled
from tests.unit.coordinator.fake_cluster import (
    CHAT,
    HELLO,
    TEXT,
    FakeCluster,
    _ask_and_read_no_more,
    _narrow,
    open_cluster,
    until,
)


async def test_request_ids_are_echoed_if_sane(cluster: FakeCluster) -> None:
    for given, same in (("my-id.1", True), ("x" * 200, False), ("a b", False)):
        response, _ = await cluster.get("/health", headers={"X-Request-Id": given})
        assert (response.headers["x-request-id"] == given) is same


async def test_ignored_fields_are_named(cluster: FakeCluster) -> None:
    response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": 1, "store": True, "foo": 1})
    assert response.headers["x-tandem-ignored"] == "store, foo"


async def test_ignored_fields_are_refused_where_parameters_are_strict(model: Path) -> None:
    own = {"model": "tiny", "max_tokens": 1}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: HELLO,
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {**own, "messages": HELLO["messages"]},
    }
    async with open_cluster(model, "colocated", strict_params=True) as cluster:
        for path, body in bodies.items():
            response, _ = await cluster.post(path, {**body, "max_tokens": 1})
            assert response.status == 200 and "x-tandem-ignored" not in response.headers
            response, answer = await cluster.post(path, {**body, "max_tokens": 1, "foo": 1})
            assert response.status == 400 and "'foo' is not supported" in answer["error"]["message"]
            if path != "/v1/messages":  # whose errors have no such members
                assert (answer["error"]["param"], answer["error"]["code"]) == ("foo", "unsupported")


async def test_other_web_sites_can_neither_post_nor_read_here(cluster: FakeCluster) -> None:
    foreign = [("Host", "evil.example"), ("Origin", "https://evil.example"), ("Origin", "null")]
    for name, value in [*foreign, ("Host", "["), ("Origin", "http://["), ("Origin", "")]:
        response, body = await cluster.post(CHAT, HELLO, headers={name: value})
        assert response.status == 403 and body["error"]["code"] == "forbidden_origin"
        response, _ = await cluster.get("/admin/workers", headers={name: value})
        assert response.status == 403, "nor read"
    response, _ = await cluster.post(CHAT, {**HELLO, "max_tokens": 1}, headers={"Origin": "http://localhost:3000"})
    assert response.status == 200


async def test_with_a_key_everything_is_closed(model: Path) -> None:
    key, root = new_key(), new_key()
    async with open_cluster(model, "colocated", api_key=key, admin_api_key=root) as cluster:
        good, admin = {"Authorization": f"Bearer {key}"}, {"Authorization": f"Bearer {root}"}
        bad = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {key}"}, {"Authorization": "Bearer é"}]
        for path in ("/", "/v1/models", "/version", "/nowhere", "/admin/workers"):
            for headers in bad:
                response, body = await cluster.get(path, headers=headers)
                assert response.status == 401 and body["error"]["code"] == "invalid_api_key"
                assert response.headers["WWW-Authenticate"] == "Bearer"
        assert (await cluster.get("/v1/models", headers=good))[0].status == 200
        assert (await cluster.get("/admin/workers", headers=good))[0].status == 403
        assert (await cluster.get("/admin/workers", headers=admin))[0].status == 200
        assert (await cluster.get("/health"))[0].status == 200
        assert (await cluster.get("/ready"))[0].status == 200


async def _cut_off(cluster: FakeCluster) -> dict[str, float]:
    async with cluster.client.get(f"{cluster.url}/metrics") as response:
        lines = re.findall(r'^tandem_clients_cut_off_total\{while="(\w+)"\} (\S+)', await response.text(), re.MULTILINE)
    return {doing: float(count) for doing, count in lines if float(count)}


async def test_a_reader_that_stopped_reading_is_cut_and_others_feel_nothing(model: Path) -> None:
    asked = {"prompt": "x", "stream": True, "n": 16, "logprobs": 20, "max_tokens": 2000, "ignore_eos": True}
    async with open_cluster(model, client_timeout=0.5) as cluster:
        worker = await cluster.add("colocated", changes={"kv_blocks": 4096})
        _, writer = await _ask_and_read_no_more(cluster, asked)
        other = asyncio.create_task(cluster.stream(TEXT, {"prompt": "y", "max_tokens": 200, "ignore_eos": True}))
        await until(lambda: worker.got(Abort), "it is cut and its work stopped", 20)
        assert len([event for event in (await other)[1] if event["choices"][0]["text"]]) > 100
        assert await _cut_off(cluster) == {"reading": 1}
        writer.close()


async def test_a_reader_of_a_whole_answer_that_takes_nothing_of_it_is_cut() -> None:
    """The answer is larger than the socket buffers, so sending it needs a reader."""
    cut, over = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await deliver(request, web.Response(body=bytes(64 << 20)), 0.3, lambda _: cut.set())
        finally:
            over.set()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        _, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1], limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(scaled(20)):
            await cut.wait()
            await over.wait()
        writer.close()
    finally:
        await runner.cleanup()


async def test_clients_that_are_cut_off_are_counted_in_the_log(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    _, cut = read_timeout(cluster.services)
    for _ in range(1000):
        cut("is too far behind")
    cluster.services.cuts.close()
    assert caplog.messages == [
        "a client is disconnected: it is too far behind",
        "999 more clients were disconnected: 999 (is too far behind)",
    ]


async def test_counted_lines_come_while_it_goes_on_and_then_stop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.http.repeats.LOG_EVERY_S", 0.05)
    many = RateLimitedLog(logging.WARNING, "%d more: %s")
    for number in range(5):
        many.add("even" if number % 2 == 0 else "odd", f"it is {number}")
    await until(lambda: len(caplog.messages) == 2, "they are counted")
    await until(lambda: many._pause is None, "it is over")
    many.add("odd", "it is odd again")
    many.close()
    assert caplog.messages == ["it is 0", "4 more: 2 odd, 2 even", "it is odd again"]


class _Stalls:
    """A transport and a response whose reader takes one byte after ``moves_s`` and then nothing more."""

    def __init__(self, moves_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.left, self.gone = 1_000_000, asyncio.Event()
        self.moved_at = self.cut_at = self.loop.time()
        self.loop.call_later(moves_s, self._move)

    def _move(self) -> None:
        self.left -= 1
        self.moved_at = self.loop.time()

    def get_write_buffer_size(self) -> int:
        return self.left

    def set_write_buffer_limits(self, high: int | None) -> None: ...

    def is_closing(self) -> bool:
        return self.gone.is_set()

    def abort(self) -> None:
        self.cut_at = self.loop.time()
        self.gone.set()

    async def prepare(self, request: object) -> None: ...

    async def write_eof(self) -> None:
        await self.gone.wait()
        raise ConnectionResetError


@pytest.mark.parametrize("moves_s", [0.05, 0.45])
async def test_a_reader_of_a_whole_answer_is_cut_when_it_has_stalled_for_so_long_and_not_twice(moves_s: float) -> None:
    stalls, cuts = _Stalls(moves_s), list[str]()
    request: Any = SimpleNamespace(transport=stalls)
    response: Any = stalls
    with pytest.raises(ConnectionResetError):
        await deliver(request, response, 1.0, cuts.append)
    assert cuts == ["has read nothing of its response for 1 s"]
    assert 1.0 <= stalls.cut_at - stalls.moved_at < 1.0 + scaled(0.6)


class _Takes:
    """A transport whose reader has taken nothing yet and may begin to read at any time."""

    def __init__(self) -> None:
        self.left, self.gone = 0, False

    def write(self, data: bytes) -> None:
        self.left += len(data)

    def get_write_buffer_size(self) -> int:
        return self.left

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True


async def test_a_reader_that_is_slower_than_its_stream_is_cut_before_much_waits_for_it() -> None:
    transport, cuts = _Takes(), list[str]()
    request: Any = SimpleNamespace(transport=transport, version=HttpVersion11)
    stream = EventStream(request, {}, 1000.0, cuts.append)
    sent = 0
    while not cuts and sent < 64 << 20:
        stream.send(bytes(16 << 10))
        sent += 16 << 10
    assert cuts == ["is too far behind"] and transport.gone
    assert 512 << 10 < sent <= 2 << 20


async def test_an_answer_is_delivered_when_the_kernel_has_its_last_byte() -> None:
    """``deliver`` waits for a small answer too, which an event loop would otherwise keep in its own buffer."""
    left: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        response = await deliver(request, web.Response(body=bytes(48 << 10)), 20, lambda _: None)
        left.append(request.transport.get_write_buffer_size())
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(sock=_narrow(runner.addresses[0][1]), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        async with asyncio.timeout(scaled(20)):
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(48 << 10)
        assert left == [0, 0]
        writer.close()
    finally:
        await runner.cleanup()


async def test_a_body_that_does_not_come_is_answered_in_time(model: Path) -> None:
    async with open_cluster(model, "colocated", client_timeout=0.3) as cluster:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rsplit(":", 1)[1]))
        writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(scaled(10)):
            assert b" 408 " in await reader.readline()
        assert await _cut_off(cluster) == {"sending": 1}
        writer.close()


async def test_headers_that_do_not_come_hold_no_connection(model: Path) -> None:
    async with open_cluster(model, "colocated", client_timeout=1.0) as cluster:
        port = int(cluster.url.rsplit(":", 1)[1])
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        (never, _), (slow, dripping), (kept, asking) = lines
        asking.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await kept.readline()
        async with asyncio.timeout(scaled(10)):
            dripping.write(b"GET /health HTTP/1.1\r\n")
            while not slow.at_eof() and not slow.exception():
                dripping.write(b"X: y\r\n")
                with contextlib.suppress(TimeoutError, ConnectionError):
                    await asyncio.wait_for(slow.read(1), 0.1)
            assert await never.read() == b""
        asking.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in (await kept.readuntil(b" 200 ")), "one that has asked may wait"
        assert await _cut_off(cluster) == {"sending": 2}
        for _, writer in lines:
            writer.close()


async def test_a_connection_that_was_used_is_closed_when_its_next_request_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert application.KEEPALIVE_CONNECTION_S == 75.0, "as the threat model says"
    monkeypatch.setattr(application, "KEEPALIVE_CONNECTION_S", 0.2)

    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(scaled(10)):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 "), "answered, and closed later"
        writer.close()
    finally:
        await runner.cleanup()


async def test_a_connection_whose_task_fails_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Connection) -> None:
        raise ValueError("as no part of aiohttp is known to")

    monkeypatch.setattr(Connection, "start", fail)
    runner = make_runner(web.Application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        async with asyncio.timeout(scaled(10)):
            assert await reader.read() == b""
        writer.close()
    finally:
        await runner.cleanup()
    assert len(caplog.messages) == 1 and "ValueError at" in caplog.messages[0] and "aiohttp" not in caplog.messages[0]


@contextlib.asynccontextmanager
async def _busy(
    go_on: asyncio.Event,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Callable[[], list[Connection]]]]:
    """Yield a connection to a server that answers nothing before ``go_on``, and the server's side of the connection."""

    async def answer(request: web.Request) -> web.Response:
        await go_on.wait()
        return web.Response(body=str(len(await request.read())))

    app = web.Application()
    app.router.add_route("*", "/", answer)
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        server = runner.server
        assert server is not None
        yield reader, writer, lambda: [each for each in server.connections if isinstance(each, Connection)]
        writer.close()
    finally:
        await runner.cleanup()


def _is_refused(connection: Connection) -> bool:
    return connection._refused and connection._body is None


async def test_headers_of_requests_that_wait_for_an_earlier_one_are_bounded() -> None:
    go_on = asyncio.Event()
    async with _busy(go_on) as (reader, writer, connections):
        one = "GET / HTTP/1.1\r\nHost: localhost\r\n" + f"x: {'y' * 15_000}\r\n" * 4 + "\r\n"
        fit = MAX_WAITING_BYTES // len(one)
        for _ in range(fit + 5):
            writer.write(one.encode())
        await until(lambda: any(map(_is_refused, connections())), "the rest is refused")
        go_on.set()
        async with asyncio.timeout(scaled(10)):
            said = await reader.read()
        assert said.count(b"HTTP/1.1 200") in (fit, fit + 1), "the first no longer waits"
        assert said.count(b"HTTP/1.1 400") == 1


BUSY = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAITING = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("size", [900_000, 768_000])
async def test_the_last_body_that_waits_for_an_earlier_request_is_read_when_it_is_its_turn(size: int) -> None:
    """A body behind an unanswered request is not read beyond a limit, whether it is long or has many chunks."""
    long = b"Content-Length: %d\r\n\r\n" % size + bytes(size)
    chunks = b"Transfer-Encoding: chunked\r\n\r\n" + (b"100\r\n" + bytes(256) + b"\r\n") * (size // 256) + b"0\r\n\r\n"
    go_on = asyncio.Event()
    async with _busy(go_on) as (reader, writer, connections):
        writer.write(BUSY)
        await writer.drain()
        writer.write(WAITING + (long if size > 800_000 else chunks))
        await until(lambda: any(each._reading_paused for each in connections()), "no more is read")
        held = max(each._mine for each in connections())
        go_on.set()
        async with asyncio.timeout(scaled(10)):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(1) == b"0"
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(str(size))) == str(size).encode()
        assert held < 4 * MAX_WAITING_BYTES, held


async def test_bodies_of_requests_that_wait_for_an_earlier_one_are_bounded() -> None:
    go_on = asyncio.Event()
    async with _busy(go_on) as (reader, writer, connections):
        one = WAITING + b"Content-Length: 100000\r\n\r\n" + bytes(100_000)
        writer.write(BUSY + one * 8)
        await until(lambda: any(map(_is_refused, connections())), "the rest is refused")
        go_on.set()
        async with asyncio.timeout(scaled(10)):
            said = await reader.read()
        assert said.count(b"HTTP/1.1 200") in (4, 5) and said.count(b"HTTP/1.1 400") == 1, said
        assert b"wait on this connection" in said


async def test_small_bodies_that_wait_are_served_in_their_order_and_a_long_one_of_its_own_is_not_bounded() -> None:
    go_on = asyncio.Event()
    async with _busy(go_on) as (reader, writer, connections):
        long = bytes(MAX_WAITING_BYTES * 2)
        writer.write(WAITING + b"Content-Length: %d\r\n\r\n" % len(long) + long)
        for size in range(1, 21):
            writer.write(WAITING + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        await asyncio.sleep(0.1)
        go_on.set()
        async with asyncio.timeout(scaled(10)):
            for size in (len(long), *range(1, 21)):
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(len(str(size))) == str(size).encode()
        assert not any(map(_is_refused, connections()))
