"""Server-sent events: bytes into a connection without waiting, and a reader that stopped reading cut off.

Owns the HTTP side of a stream. Writes go to the transport at once (uvloop gathers those of one turn into one system
call); a reader is slow as long as bytes move, stalled when none did for :data:`STALL_S`.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

KEEPALIVE_S = 15.0
STALL_S = 30.0
MAX_BUFFERED_BYTES = 8 << 20
_LOW_WATER_BYTES = 64 << 10
_COMMENT = b": keep-alive\n\n"
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One streaming response on the connection of ``request``."""

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**headers, **HEADERS})
        self._chunked = request.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        self._written = self._delivered = 0
        self._moved_at = self._sent_at = self._loop.time()

    async def open(self) -> None:
        """Sends the headers."""
        await self._response.prepare(self._request)

    def send(self, data: bytes) -> None:
        """Writes ``data`` without waiting; a stalled or vanished reader loses its connection."""
        transport = self._request.transport
        if transport is None or transport.is_closing() or not data:
            return
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        transport.write(framed)
        self._sent_at = self._loop.time()
        self._written += len(framed)
        self._check_reader(transport)

    def _check_reader(self, transport: asyncio.Transport) -> None:
        waiting = transport.get_write_buffer_size()
        delivered = self._written - waiting
        if waiting <= _LOW_WATER_BYTES or delivered > self._delivered:
            self._delivered, self._moved_at = delivered, self._sent_at
        elif waiting > MAX_BUFFERED_BYTES or self._sent_at - self._moved_at > STALL_S:
            transport.abort()

    async def until(self, finished: asyncio.Future[None]) -> None:
        """Waits for the end of the stream; an idle one gets a comment every 15 s."""
        while not finished.done():
            idle = self._loop.time() - self._sent_at
            await asyncio.wait((finished,), timeout=max(0.1, KEEPALIVE_S - idle))
            if not finished.done() and self._loop.time() - self._sent_at >= KEEPALIVE_S:
                self.send(_COMMENT)

    async def close(self) -> web.StreamResponse:
        """Ends the response; a reader that does not take the rest in time is cut."""
        try:
            async with asyncio.timeout(STALL_S):
                await self._response.write_eof()
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
        return self._response
