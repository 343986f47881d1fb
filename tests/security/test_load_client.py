"""``tandem bench serve`` against a server that closes kept connections: no request may fail because of that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.system import TandemProcess
from tests.pace import scaled

EVENT = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
ANSWERS = {
    b"GET /v1/models": json.dumps({"data": [{"id": "tiny", "max_model_len": 2048}]}).encode(),
    b"POST /tokenize": json.dumps({"tokens": list(range(100, 400))}).encode(),
    b"POST /v1/completions": EVENT * 4 + b"data: [DONE]\n\n",
}
REQUESTS = 6


class ClosingServer:
    """Answers one completion per connection. For a second one on the same connection it reads only the headers, then
    closes as ``closing`` says: with a ``reset``, with an orderly ``end``, or with an orderly end after one ``byte`` of
    an answer."""

    def __init__(self, closing: str) -> None:
        self.closing, self.completions = closing, 0
        self.unanswered = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered: Counter[bytes] = Counter()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                what = b" ".join(head.split(b" ", 2)[:2])
                if what == b"POST /v1/completions" and answered[what]:
                    self.unanswered += 1
                    break
                await reader.readexactly(_length(head))
                answered[what] += 1
                self.completions += what == b"POST /v1/completions"
                body = ANSWERS[what]
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            if self.closing == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                await reader.readexactly(_length(head))  # with unread data the kernel would send a reset
            if self.closing == "byte":
                writer.write(b"H")
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _length(head: bytes) -> int:
    """Return the length of the body."""
    found = re.search(rb"(?i)content-length: *(\d+)", head)
    return int(found[1]) if found else 0


async def bench(url: str, log: Path) -> str:
    """Return the output of ``tandem bench serve`` with requests sent one after another."""
    words = "--num-warmups 0 --random-input-len 4 --random-output-len 4 --max-concurrency 1".split()
    process = TandemProcess.start(log, "bench", "serve", "--url", url, "--num-prompts", str(REQUESTS), *words)
    try:
        async with asyncio.timeout(scaled(90)):
            await asyncio.to_thread(process.popen.wait)
    finally:
        process.kill()
    return process.text


@pytest.mark.e2e
@pytest.mark.parametrize("closing", ["reset", "end"])
async def test_a_kept_connection_that_was_closed_fails_no_request(closing: str, tmp_path: Path) -> None:
    server = ClosingServer(closing)
    async with server.running() as url:
        shown = await bench(url, tmp_path / "bench.log")
    assert re.search(rf"Successful requests: +{REQUESTS}\b", shown), shown
    assert server.completions == REQUESTS and server.unanswered == REQUESTS // 2
    assert f"note: {server.unanswered} sent again" in shown


@pytest.mark.e2e
async def test_a_request_whose_answer_had_begun_is_not_sent_again(tmp_path: Path) -> None:
    server = ClosingServer("byte")
    async with server.running() as url:
        shown = await bench(url, tmp_path / "bench.log")
    assert re.search(rf"Successful requests: +{REQUESTS // 2}\b", shown), shown
    assert server.completions == server.unanswered == REQUESTS // 2
