"""Server-sent events: bytes into a connection without waiting, and a reader that stopped reading cut off.

Owns the HTTP side of a stream. Writes go to the transport at once (uvloop gathers those of one turn into one system
call). What a reader has not taken waits in memory, up to a limit; a reader is slow as long as bytes move, stalled when
none did for ``stall_s``. One that stalls, or that is slower than its answer by more than the limit, is cut: its handler
is cancelled, which stops the work everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import HttpVersion11, web

KEEPALIVE_S = 15.0
"""The longest silence of a stream: nginx cuts one after 60 s by default, Debian's HAProxy after 50 s."""
MAX_BUFFERED_BYTES = 1 << 20
LOOKS = 4
"""At a reader within the time that it may take nothing."""
KEEPALIVE = b"\n\n"
"""Two empty lines between two events, which the event-stream format ignores. Clients that split at two line breaks
ignore them too, whereas they glue a comment, or a single line break, to the next event."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One streaming response on the connection of ``request``; ``on_cut`` hears why, if its reader is cut."""

    def __init__(
        self, request: web.Request, headers: dict[str, str], stall_s: float, on_cut: Callable[[str], None]
    ) -> None:
        self._request, self._stall_s, self._on_cut = request, stall_s, on_cut
        self._transport = request.transport
        self._response = web.StreamResponse(headers={**headers, **HEADERS})
        self._chunked = request.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        self._written = self._delivered = 0
        self._bound = MAX_BUFFERED_BYTES
        self._moved_at = self._sent_at = self._loop.time()

    async def open(self) -> None:
        """Sends the headers."""
        await self._response.prepare(self._request)

    def send(self, data: bytes) -> None:
        """Writes ``data`` without waiting; a stalled or vanished reader loses its connection."""
        transport = self._transport
        if transport is None or transport.is_closing() or not data:
            return
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        transport.write(framed)
        self._sent_at = self._loop.time()
        self._written += len(framed)
        self._bound = max(self._bound, MAX_BUFFERED_BYTES + len(framed))  # one large event is nobody's slowness
        self._check_reader(transport, self._sent_at)

    def _check_reader(self, transport: asyncio.Transport, now: float) -> None:
        waiting = transport.get_write_buffer_size()
        delivered = self._written - waiting
        if not waiting or delivered > self._delivered:
            self._delivered, self._moved_at = delivered, now
        if waiting > self._bound:
            self._cut(transport, "is too far behind")
        elif now - self._moved_at > self._stall_s:
            self._cut(transport, f"has taken nothing for {self._stall_s:g} s")

    def _cut(self, transport: asyncio.Transport, why: str) -> None:
        self._on_cut(why)
        transport.abort()

    async def until(self, finished: asyncio.Future[None]) -> None:
        """Waits for the end of the stream; an idle one is kept alive, and its reader is looked at."""
        while not finished.done():
            idle = self._loop.time() - self._sent_at
            await asyncio.wait((finished,), timeout=max(0.1, min(KEEPALIVE_S - idle, self._stall_s / LOOKS)))
            transport = self._transport
            if finished.done() or transport is None or transport.is_closing():
                continue
            self._check_reader(transport, self._loop.time())
            if self._loop.time() - self._sent_at >= KEEPALIVE_S:
                self.send(KEEPALIVE)

    async def close(self) -> web.StreamResponse:
        """Ends the response; a reader that does not take the rest in time is cut."""
        return await deliver(self._request, self._response, self._stall_s, self._on_cut)


async def deliver(
    request: web.Request, response: web.StreamResponse, stall_s: float, on_cut: Callable[[str], None]
) -> web.StreamResponse:
    """Sends what is left of ``response``, until the kernel has all of it; a reader that takes nothing of it for
    ``stall_s`` is cut, and ``on_cut`` hears why."""
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
                on_cut(f"has taken nothing of its answer for {stall_s:g} s")
                transport.abort()
                break
        await sending
    finally:
        sending.cancel()
        _wait_for_the_last_byte(transport, False)
    return response


def _wait_for_the_last_byte(transport: asyncio.Transport | None, wanted: bool) -> None:
    """Whether a writer that waits for ``transport`` waits until nothing is left, or (as usual) until little is: the
    last bytes would be lost if the process ended then."""
    if transport is not None and not transport.is_closing():
        transport.set_write_buffer_limits(0 if wanted else None)
