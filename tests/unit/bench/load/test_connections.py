"""The load client against servers that close the connections it keeps open."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import aiohttp
import pytest
from rich.console import Console

from bench.commands.serve import show_remarks
from bench.load.client import Record, Target
from bench.load.connections import _Connection
from bench.load.run import run_load
from bench.load.workloads import PlannedRequest

STREAM = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\ndata: [DONE]\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b" % (len(STREAM), STREAM)
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Close = Callable[[Reader, Writer], Awaitable[None]]


async def read_request(reader: Reader) -> bytes:
    """Return a whole request; raise IncompleteReadError at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.split(b":")[1]))


def reset(writer: Writer) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# -- ways to close a connection instead of answering ------------------------------------------------------------------


async def close_unanswered(reader: Reader, writer: Writer) -> None:
    await read_request(reader)
    writer.close()


async def close_after_headers(reader: Reader, writer: Writer) -> None:
    """Close without reading the body, so that the kernel sends a reset."""
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def reset_at_first_byte(reader: Reader, writer: Writer) -> None:
    await reader.readexactly(1)
    reset(writer)


async def reset_unanswered(reader: Reader, writer: Writer) -> None:
    await read_request(reader)
    reset(writer)


async def half_close(reader: Reader, writer: Writer) -> None:
    await read_request(reader)
    writer.write_eof()
    await reader.read()
    writer.close()


UNANSWERED: list[Close] = [close_unanswered, close_after_headers, reset_at_first_byte, reset_unanswered, half_close]


def after(said: bytes, arrived: asyncio.Event, close: Callable[[Writer], None]) -> Close:
    async def partly_answered(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(said)
        await arrived.wait()  # a reset discards what the client has not read yet
        close(writer)

    return partly_answered


@dataclass
class LimitedServer:
    """A server that answers the first ``good`` requests of each connection and then calls ``close``; from connection
    ``well`` on it answers all. ``begun`` counts the requests of each connection."""

    close: Close
    good: int = 1
    well: int = 1
    begun: list[int] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: Reader, writer: Writer) -> None:
        mine = len(self.begun)
        self.begun.append(0)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while mine >= self.well or self.begun[mine] < self.good:
                await read_request(reader)
                self.begun[mine] += 1
                writer.write(ANSWER)
            self.begun[mine] += 1
            await self.close(reader, writer)
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Target]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m", timeout_s=20)


async def send(target: Target, session: aiohttp.ClientSession) -> Record:
    record = Record(0.0, 0)
    await target.send(session, target.body(PlannedRequest([65], 1, 1)), record)
    return record


@pytest.mark.parametrize("close", UNANSWERED)
async def test_a_request_on_a_stale_connection_is_sent_again_on_a_new_one(close: Close) -> None:
    server = LimitedServer(close)
    async with server.running() as target, target.session() as session:
        first, second = await send(target, session), await send(target, session)
    assert (first.ok, first.resent) == (True, False)
    assert (second.error, second.resent, second.said) == ("", True, ["a"])
    assert server.begun == [2, 1]


async def test_the_time_of_a_request_that_is_sent_again_counts_from_the_first_sending() -> None:
    times = iter(range(100))

    async def late(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        for _ in range(10):
            next(times)  # ten seconds pass
        writer.close()

    async with LimitedServer(late).running() as target, target.session() as session:
        await send(target, session)
        record = Record(0.0, 0)
        await target.send(session, target.body(PlannedRequest([65], 1, 1)), record, lambda: float(next(times)))
    assert record.resent and record.ttft == 11.0


@pytest.mark.parametrize("close", UNANSWERED)
@pytest.mark.parametrize("at_once", [1, 4])
async def test_a_pool_of_stale_connections(close: Close, at_once: int) -> None:
    """Each request goes to a new connection, not to the next stale one of the pool."""
    server = LimitedServer(close, well=4)
    async with server.running() as target, target.session() as session:
        await asyncio.gather(*(send(target, session) for _ in range(4)))
        records = await asyncio.gather(*(send(target, session) for _ in range(at_once)))
    assert [(record.error, record.resent) for record in records] == [("", True)] * at_once
    assert server.begun[4:] == [1] * at_once


@pytest.mark.parametrize("close", UNANSWERED)
async def test_a_new_connection_that_is_closed_is_a_failure(close: Close) -> None:
    """The server closes it before its first answer, which is the server's fault."""
    server = LimitedServer(close, good=0, well=9)
    async with server.running() as target, target.session() as session:
        record = await send(target, session)
    assert record.error and not record.resent
    assert server.begun == [1]


@pytest.mark.parametrize("close", UNANSWERED)
async def test_a_request_is_sent_again_only_once(close: Close) -> None:
    server = LimitedServer(close, well=9)
    async with server.running() as target, target.session() as session:
        await send(target, session)
        server.good = 0
        record = await send(target, session)
    assert record.error and record.resent
    assert server.begun == [2, 1]


@pytest.mark.parametrize("said", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", ANSWER.partition(b"\r\n")[0], ANSWER[:-9]])
@pytest.mark.parametrize("close", [Writer.close, reset])
async def test_a_request_of_whose_answer_a_byte_came_is_not_sent_again(
    said: bytes, close: Callable[[Writer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, receive = asyncio.Event(), _Connection.data_received

    def received(connection: _Connection, data: bytes) -> None:
        receive(connection, data)
        if data == said:
            arrived.set()

    monkeypatch.setattr(_Connection, "data_received", received)
    server = LimitedServer(after(said, arrived, close))
    async with server.running() as target, target.session() as session:
        await send(target, session)
        record = await send(target, session)
    assert record.error and not record.resent
    assert server.begun == [2]


async def test_a_connection_that_was_closed_while_idle_is_not_used() -> None:
    closed = asyncio.Event()

    async def close_idle(reader: Reader, writer: Writer) -> None:
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = LimitedServer(close_idle)
    async with server.running() as target, target.session() as session:
        await send(target, session)
        await closed.wait()
        record = await send(target, session)
    assert record.ok
    assert len(server.begun) == 2


async def test_the_wait_for_both_answers_is_bounded_by_one_timeout() -> None:
    async def never(reader: Reader, writer: Writer) -> None:
        if len(server.begun) == 1:
            await close_unanswered(reader, writer)
        else:
            await reader.read()

    server = LimitedServer(never, well=9)
    async with server.running() as target, target.session() as session:
        await send(target, session)
        server.good = 0
        record = await send(replace(target, timeout_s=0.2), session)
    assert record.resent and record.error == "no answer within 0.2 s"


async def test_run_counts_resent_requests() -> None:
    """The server closes each connection after its second request, and no request fails."""
    server = LimitedServer(close_after_headers, good=2, well=99)
    async with server.running() as target:
        run = await run_load(target, [PlannedRequest([65], 1, 1)] * 7, [0.0] * 7, max_concurrency=1)
    assert all(record.ok for record in run.records)
    resent = sum(record.resent for record in run.records)
    assert resent == sum(count > 2 for count in server.begun) > 0
    show_remarks(Console(file=(shown := io.StringIO()), width=200), run.records)
    assert f"note: {resent} sent again" in shown.getvalue()
