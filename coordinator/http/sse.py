"""Server-sent events: non-blocking writes to a connection, and disconnection of clients that stop reading.

Owns the HTTP side of a stream. Writes go to the transport at once (uvloop combines those of one event-loop iteration
into one system call). Unread data is buffered in memory up to a limit. A client that reads slowly is tolerated until it
is behind by more than that limit; a client that reads nothing for ``stall_s`` is stalled. In both cases the connection
is aborted, which cancels the handler and thereby the request on the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import HttpVersion11, web

from coordinator.api.event_stream import KEEPALIVE

KEEPALIVE_S = 15.0
"""Maximum time without data on a stream. nginx closes an idle stream after 60 s by default, Debian's HAProxy after 50.
"""
MAX_BUFFERED_BYTES = 1 << 20
LOOKS = 4
"""Number of checks of a client within its stall timeout."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One streaming response on the connection of ``request``. ``on_cut`` is called with the reason if the client is
    disconnected because it does not read. ``stall_s``: seconds for which it may read nothing. ``keepalive``: sent when
    the stream is idle."""

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        stall_s: float,
        on_cut: Callable[[str], None],
        keepalive: bytes = KEEPALIVE,
    ) -> None:
        self._request, self._stall_s, self._on_cut = request, stall_s, on_cut
        self._keepalive = keepalive
        self._transport = request.transport
        self._response = web.StreamResponse(headers={**headers, **HEADERS})
        self._chunked = request.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        self._written = self._delivered = 0
        self._bound = MAX_BUFFERED_BYTES
        self._moved_at = self._sent_at = self._loop.time()

    @property
    def unread_bytes(self) -> int:
        """Bytes that have been sent to the client and that the kernel has not taken."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    async def open(self) -> None:
        """Send the headers."""
        await self._response.prepare(self._request)

    def send(self, data: bytes) -> None:
        """Write ``data`` without waiting. Disconnects a client that is stalled or too far behind."""
        transport = self._transport
        if transport is None or transport.is_closing() or not data:
            return
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        transport.write(framed)
        self._sent_at = self._loop.time()
        self._written += len(framed)
        self._bound = max(self._bound, MAX_BUFFERED_BYTES + len(framed))  # one large event must not exceed the limit
        self._check_reader(transport, self._sent_at)

    def _check_reader(self, transport: asyncio.Transport, now: float) -> None:
        waiting = transport.get_write_buffer_size()
        delivered = self._written - waiting
        if not waiting or delivered > self._delivered:
            self._delivered, self._moved_at = delivered, now
        if waiting > self._bound:
            self._cut(transport, "is too far behind")
        elif now - self._moved_at > self._stall_s:
            self._cut(transport, f"has read nothing for {self._stall_s:g} s")

    def _cut(self, transport: asyncio.Transport, why: str) -> None:
        self._on_cut(why)
        transport.abort()

    async def until(self, finished: asyncio.Future[None]) -> None:
        """Wait until ``finished`` is done. Meanwhile send keep-alives on an idle stream and check that the client
        reads."""
        while not finished.done():
            idle = self._loop.time() - self._sent_at
            await asyncio.wait((finished,), timeout=max(0.1, min(KEEPALIVE_S - idle, self._stall_s / LOOKS)))
            transport = self._transport
            if finished.done() or transport is None or transport.is_closing():
                continue
            self._check_reader(transport, self._loop.time())
            if self._loop.time() - self._sent_at >= KEEPALIVE_S:
                self.send(self._keepalive)

    async def close(self) -> web.StreamResponse:
        """End the response and deliver the rest of it, as :func:`deliver`."""
        return await deliver(self._request, self._response, self._stall_s, self._on_cut)


async def deliver(
    request: web.Request, response: web.StreamResponse, stall_s: float, on_cut: Callable[[str], None]
) -> web.StreamResponse:
    """Send the rest of ``response`` and wait until the kernel has all of it. Disconnects a client that reads nothing of
    it for ``stall_s`` and calls ``on_cut`` with the reason."""
    transport = request.transport
    await response.prepare(request)
    _wait_for_the_last_byte(transport, True)
    sending = asyncio.ensure_future(response.write_eof())
    clock = asyncio.get_running_loop().time
    try:
        await asyncio.wait((sending,), timeout=0)
        left, moved_at = transport.get_write_buffer_size() if transport is not None else 0, clock()
        while not sending.done() and transport is not None:
            await asyncio.wait((sending,), timeout=stall_s / LOOKS)
            before, left = left, transport.get_write_buffer_size()
            if left < before or not left:
                moved_at = clock()
            if not sending.done() and clock() - moved_at > stall_s:
                on_cut(f"has read nothing of its response for {stall_s:g} s")
                transport.abort()
                break
        await sending
    finally:
        sending.cancel()
        _wait_for_the_last_byte(transport, False)
    return response


def _wait_for_the_last_byte(transport: asyncio.Transport | None, wanted: bool) -> None:
    """Set whether draining ``transport`` waits until its buffer is empty, or (the default) until it is nearly empty.
    The last bytes would be lost if the process ended before they were sent."""
    if transport is not None and not transport.is_closing():
        transport.set_write_buffer_limits(0 if wanted else None)
