"""The HTTP server below the application: connections, and requests that are none.

aiohttp logs a malformed request with the bytes that it read (keys among them) and a traceback, repeats them to the
client as plain text, and names its own version. Here such a request is counted, logged at most every ten seconds
without a byte of it, and answered with an error in our shape. ``Expect`` is handled by the application, not before it.
aiohttp bounds each header and their number, so that their product would be what a connection may hold: here the request
line and the headers have a bound together.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import sys
import termios
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import EMPTY_PAYLOAD, HttpVersion10, HttpVersion11, StreamReader, http_exceptions, web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import ERROR, _ErrInfo
from multidict import CIMultiDict, CIMultiDictProxy

from common.core.errors import RequestError, reason
from common.platform import open_files
from coordinator.http.repeats import RateLimitedLog
from coordinator.requests.errors import overloaded

log = logging.getLogger("tandem.http")

EXPECTATION = web.RequestKey("expectation", str)
"""The ``Expect`` header of a request that has one."""
_UNREADABLE = web.RequestKey("unreadable", bool)
"""Whether the message of a request could not be read."""
_OTHER_VERSION = web.RequestKey("other version", bool)
"""Whether a request is of another version of HTTP, or of another protocol, than those that are spoken."""
MAX_HEADER_BYTES = 16 << 10
"""Bytes of the request line, and of each header."""
MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 << 10
"""Bytes of the request line and all headers together, as sent. Trailers of a chunked body have the same bound."""
MAX_WAITING_BYTES = 4 * MAX_HEAD_BYTES
"""Bound on the heads and bodies of all requests that wait on one connection for the answer to an earlier one. The body
of the last does not count."""
UNFINISHED_BUDGET = 32 << 20
"""Bytes of unfinished heads, and of requests that wait for an earlier one, on all connections together."""
FREE_BYTES = 8 << 10
"""Of them on one connection, with which it is not refused: an ordinary head that comes in two pieces."""
SLICE_BYTES = 16 << 10
"""That the parser is given at once: what it keeps of the last slice with a request is not counted."""
RETRY_S = 1.0
CHUNK_BYTES = 128
"""That a chunk of a body takes in memory beside its own bytes."""
FREE_CHUNKS = 1024
"""Chunks that a body may have, whatever their size."""
LEAST_CHUNK_BYTES = 256
"""Average size that chunks beyond those must have: the parser spends as much on a chunk as on hundreds of bytes."""
SERVER = "tandem"

ErrorResponse = Callable[[RequestError], web.Response]


class Unreadable(http_exceptions.BadHttpMessage):
    """A message that the parser takes and of which no request can be made."""


class HeadTooLong(http_exceptions.BadHttpMessage):
    """A request line and headers of more than MAX_HEAD_BYTES, or waiting requests of more than MAX_WAITING_BYTES."""


class TooMuchHeld(http_exceptions.BadHttpMessage):
    """All connections hold more than UNFINISHED_BUDGET, and this one more than FREE_BYTES of it."""


class TooManyFiles(http_exceptions.BadHttpMessage):
    """A connection with which nearly as many files are open as may be."""


class SmallChunks(web.RequestPayloadError):
    """A body of more than FREE_CHUNKS that have fewer than LEAST_CHUNK_BYTES."""


class Held:
    """Bytes of all connections together that count in UNFINISHED_BUDGET."""

    def __init__(self) -> None:
        self.total = 0


_MALFORMED: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        http_exceptions.LineTooLong,
        "too long",
        f"The request line or a header has more than {MAX_HEADER_BYTES:,} bytes.",
    ),
    (
        HeadTooLong,
        "too long",
        f"The request line and the headers have more than {MAX_HEAD_BYTES:,} bytes together, or requests that wait for"
        f" an earlier one on the same connection have more than {MAX_WAITING_BYTES:,} with their bodies.",
    ),
    (http_exceptions.BadHttpMethod, "no HTTP", "This is not an HTTP/1.1 request; TLS and HTTP/2 are not spoken here."),
    (http_exceptions.BadStatusLine, "bad request line", "The request line is malformed."),
    (http_exceptions.InvalidURLError, "bad target", "The target of the request is malformed."),
    (TooMuchHeld, "too much is unfinished", "unfinished requests hold too much memory"),
    (TooManyFiles, "no file is left", "too many connections are open"),
    (Unreadable, "bad target", "The target of the request is malformed."),
    (http_exceptions.InvalidHeader, "bad header", "A header of the request is malformed."),
    (http_exceptions.TransferEncodingError, "bad body", "The chunks of the request body are malformed."),
    (
        SmallChunks,
        "small chunks",
        f"The request body has more than {FREE_CHUNKS:,} chunks, of fewer than {LEAST_CHUNK_BYTES} bytes on average.",
    ),
    (web.RequestPayloadError, "bad body", "The request body is malformed."),
    (http_exceptions.HttpProcessingError, "bad HTTP", "The request is not well-formed HTTP/1.1."),
)
"""What a request can be instead of HTTP: kind for the log, words for the client. The first that fits counts."""


def malformed_request(error: BaseException) -> tuple[str, RequestError] | None:
    """The kind of a malformed request, and the answer to it; None if ``error`` is not about what a client sent."""
    for kind, name, text in _MALFORMED:
        if isinstance(error, kind):
            return name, RequestError(text, code="malformed_request")
    return None


class Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = (
        "_body",
        "_chunks",
        "_error_response",
        "_held",
        "_malformed",
        "_mine",
        "_moved_at",
        "_no_file",
        "_out",
        "_refused",
        "_seen",
        "_tail",
        "_unparsed",
        "made_at",
        "requests",
    )

    def __init__(
        self,
        manager: web.Server,
        *,
        malformed: RateLimitedLog,
        no_file: RateLimitedLog,
        error_response: ErrorResponse,
        held: Held,
        **arguments: Any,
    ) -> None:
        super().__init__(manager, **arguments)
        self._held, self._mine = held, 0
        self._tail = 0
        """Bytes that have come since as many requests waited as may, at most: the parser holds them unseen."""
        self._malformed, self._no_file, self._error_response = malformed, no_file, error_response
        self._body: StreamReader | None = None
        self._chunks = 0
        """Chunks of ``_body`` so far. Those of the slice in which its head came are not counted."""
        self._refused = False
        self._unparsed = 0
        """Bytes that have come since the parser last had a request or a part of a body of them: it holds them."""
        self.requests = 0
        """That it has sent and the server has begun to answer."""
        self.made_at = self._moved_at = time.monotonic()
        self._out: asyncio.Transport | None = None
        """Its transport, also while the last bytes of it are sent: aiohttp drops ``transport`` before."""
        self._seen = (0, 0, 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._out = self.transport
        if self._task_handler is not None:
            self._task_handler.add_done_callback(self._end_failed)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= open_files.limit() - open_files.reserved():
            self._refuse(0, TooManyFiles(message=""), lingering=False)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Gives back what has come and was not answered, at once: the collector finds dead connections late."""
        super().connection_lost(exc)
        self._messages.clear()
        self._message_tail = b""
        self._body = self._out = None
        self._unparsed = self._tail = 0
        self.count()

    def is_unread(self, now: float, patience_s: float) -> bool:
        """Whether its client has taken nothing for ``patience_s`` of what was written for it, as far as the looks show
        that are calls of this. A client that reads makes less wait, or the server go on to another request."""
        waiting = self._out.get_write_buffer_size() if self._out is not None else 0
        seen = waiting, _unacknowledged(self._out) if waiting else 0, self.requests
        if not waiting or seen != self._seen:
            self._seen, self._moved_at = seen, now
        return now - self._moved_at >= patience_s

    def abort(self) -> None:
        """Ends it, with what its client has not read."""
        if self._out is not None:
            self._out.abort()

    def _end_failed(self, task: asyncio.Task[None]) -> None:
        """Closes the connection if ``task``, which answers its requests, has failed: nothing else would."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(error)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data) or 1, SLICE_BYTES):
            if self._refused or self._close or self._force_close:
                return
            self._feed(data[start : start + SLICE_BYTES])
            self._refuse_small_chunks()
        if not self._refused:
            self._refuse_long_heads()
            self._end_malformed_body()
            self.count()

    def _feed(self, data: bytes) -> None:
        parsed = self._parsed()
        body, chunks = self._body, _chunks_held(self._body)
        try:
            super().data_received(data)
        except Exception as error:  # asyncio would log it, with all that its text says
            self._log(error)
            self.force_close()
            return
        self._unparsed = self._unparsed + len(data) if self._parsed() == parsed else 0
        if self._body is not body:
            self._chunks = chunks = 0
        self._chunks += _chunks_held(self._body) - chunks
        if len(self._messages) >= self._max_msg_queue_size:
            self._tail += len(data)
        elif data:
            self._tail = 0

    def count(self) -> None:
        """Counts what this connection holds, and refuses it if that is too much with all others."""
        first = 0 if self._waiter is None else 1  # else the first is taken next
        mine = self._unparsed + self._tail
        for message, body in itertools.islice(self._messages, first, None):
            if isinstance(message, RawRequestMessage):
                mine += _head_bytes(message) + _body_bytes(body)
        self._held.total += mine - self._mine
        self._mine = mine
        if mine > FREE_BYTES and self._held.total > UNFINISHED_BUDGET and not self._refused:
            self._refuse(first, TooMuchHeld(message=""))

    def _parsed(self) -> tuple[int, int]:
        """Requests so far, and bytes of the body of the last of them."""
        if self._messages:
            self._body = self._messages[-1][1]
        elif self._current_request is not None:
            self._body = self._current_request.content
        return self._request_count, self._body.total_bytes if self._body is not None else 0

    def _refuse_long_heads(self) -> None:
        """Ends the connection with an error at the first head that is too long, whether all of it has come or not, or
        at the first request that waits where too much does. Of the last one only the head counts: its body may still be
        coming, and little of it is read before its turn."""
        waiting = 0
        for place, (message, body) in enumerate(self._messages):
            if isinstance(message, RawRequestMessage):
                size = _head_bytes(message)
                if size > MAX_HEAD_BYTES or waiting + size > MAX_WAITING_BYTES:
                    self._refuse(place, HeadTooLong(message=""))
                    return
                waiting += size
                if place or self._waiter is None:  # else it is taken next
                    waiting += _body_bytes(body)
        if self._unparsed > MAX_HEAD_BYTES:
            self._refuse(len(self._messages), HeadTooLong(message=""))

    def _refuse_small_chunks(self) -> None:
        """Ends the connection with an error if its last body has too many small chunks: a megabyte of them would take
        half a second to parse."""
        body = self._body
        if body is None or self._chunks <= FREE_CHUNKS + body.total_bytes // LEAST_CHUNK_BYTES:
            return
        if self._messages and self._messages[-1][1] is body:
            self._refuse(len(self._messages) - 1, SmallChunks())
        else:  # it is being read, or dropped
            self._refuse(len(self._messages), SmallChunks())
            body.set_exception(SmallChunks())

    def _refuse(self, place: int, error: Exception, lingering: bool = True) -> None:
        """Answers the requests before ``place``, and then ``error``. What the parser holds is given back; what still
        comes is dropped, if ``lingering`` for as long as the rest of a body that was refused is, so that its sender can
        read why."""
        while len(self._messages) > place:
            self._messages.pop()
        rest = StreamReader(self, limit=1, loop=self._loop) if lingering else EMPTY_PAYLOAD
        self._messages.append((_ErrInfo(400, error, ""), rest))
        self._refused, self._parser, self._body, self._unparsed, self._tail = True, None, None, 0, 0
        if self._reading_paused:  # by a body that is dropped: that the client leaves would not be noticed
            self._reading_paused = False
            self._resume_transport_reading()
        self.count()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end_malformed_body(self) -> None:
        """Fails the body that is being read if what has come cannot be parsed: its reader would wait for the rest."""
        request = self._current_request
        malformed = self._messages and not isinstance(self._messages[-1][0], RawRequestMessage)
        if malformed and request is not None and not request.content.is_eof():
            request.content.set_exception(web.RequestPayloadError())

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a malformed request, or to one that failed outside of the application."""
        if exc is not None:
            self._log(exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer was sent already")
        found = malformed_request(exc) if exc is not None else None
        error = found[1] if found else internal_error()
        if isinstance(exc, TooMuchHeld | TooManyFiles):
            error = overloaded(error.message, RETRY_S)
        response = self._error_response(error)
        response.headers["Server"] = SERVER
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        self._log(error if isinstance(error, BaseException) else sys.exc_info()[1])

    def log_debug(self, *args: Any, **kw: Any) -> None:
        """Nothing: aiohttp's own details."""

    def _log(self, error: BaseException | None) -> None:
        """One line without the text of ``error``, which may hold what a client has sent."""
        if isinstance(error, TooManyFiles):
            self._no_file.add("refused", _all_open("a connection is refused"))
        elif error is not None and (found := malformed_request(error)):
            peer = self.peername[0] if isinstance(self.peername, tuple) else "an unknown peer"
            self._malformed.add(found[0], f"a malformed request from {peer} is refused: {found[0]}")
        else:
            log.error("a connection failed: %s", place_of(error))


def _all_open(what: str) -> str:
    return (
        f"of the {open_files.limit()} files and connections that may be open nearly all are, {what}: {open_files.HINT}"
    )


def _unacknowledged(transport: asyncio.BaseTransport | None) -> int:
    """Bytes that the kernel holds for the peer. It takes more only when a third of its buffer is free, which may be
    long after a slow reader has read some. 0 where the kernel does not tell."""
    connection = transport.get_extra_info("socket") if transport is not None else None
    try:
        return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder) if connection else 0
    except (OSError, ValueError):  # it has ended
        return 0


def _head_bytes(message: RawRequestMessage) -> int:
    """Bytes of the request line and the headers, with their line ends."""
    line = len(message.method) + len(message.path) + len("  HTTP/1.1\r\n")
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in message.raw_headers)


def _body_bytes(body: StreamReader) -> int:
    """Bytes that ``body``, which nothing has read yet, takes in memory: what has come, and the places of chunks."""
    return body.total_bytes + CHUNK_BYTES * _chunks_held(body)


def _chunks_held(body: StreamReader | None) -> int:
    """Chunks of ``body`` that have come and were not taken."""
    splits = None if body is None or body is EMPTY_PAYLOAD else body._http_chunk_splits
    return len(splits or ())


def place_of(error: BaseException | None) -> str:
    """Type and place of ``error``, without its text."""
    if error is None:
        return "for an unknown reason"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return type(error).__name__ + where


def internal_error() -> RequestError:
    return RequestError("The server failed on this request.", status=500, type="server_error", code="internal_error")


class Server(web.Server):
    """Makes the connections."""

    def __init__(self, handler: Any, connection: dict[str, Any], **arguments: Any) -> None:
        super().__init__(_refusing_other_versions(handler), **arguments)
        self._connection = connection

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._connection)


def _refusing_other_versions(handler: Any) -> Any:
    """``handler``, and for requests with _OTHER_VERSION the answer to a malformed one."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.get(_OTHER_VERSION, False):
            return request.protocol.handle_error(request, exc=http_exceptions.BadHttpMethod(""))
        response: web.StreamResponse = await handler(request)
        return response

    return handle


def _of_spoken_versions(factory: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """``factory`` of requests of HTTP/1.0 and 1.1. The parser takes others, too, and reads them as if they were: they
    have _OTHER_VERSION. aiohttp's answer names the version of the request, so they are of HTTP/1.1 themselves, and so
    is what stands for a request that cannot be parsed, of whose version nothing is known."""

    def make(message: RawRequestMessage, *arguments: Any) -> web.BaseRequest:
        if message is not ERROR and message.version in (HttpVersion10, HttpVersion11):
            return factory(message, *arguments)
        request = factory(message._replace(version=HttpVersion11), *arguments)
        request[_OTHER_VERSION] = message is not ERROR
        return request

    return make


class Runner(web.AppRunner):
    """Runs an application on such connections."""

    __slots__ = ("_error_response", "_malformed", "_no_file")

    def __init__(self, app: web.Application, error_response: ErrorResponse, **arguments: Any) -> None:
        super().__init__(app, **arguments)
        self._error_response = error_response
        self._malformed = RateLimitedLog(logging.WARNING, "%d more malformed requests were refused: %s")
        self._no_file = RateLimitedLog(logging.WARNING, "%d more times too many files were open: %s")

    def check_files(self) -> None:
        """Logs it if no file can be opened: uvloop then resets connections that come, and tells nobody."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            self._no_file.add("unable to open one", _all_open(f"connections are reset ({reason(error)})"))

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        connection = {
            **made._kwargs,
            "malformed": self._malformed,
            "no_file": self._no_file,
            "error_response": self._error_response,
            "held": Held(),
        }
        return Server(
            _refusing_unreadable(made.request_handler),
            connection,
            request_factory=_safe(_of_spoken_versions(_without_expect(made.request_factory))),
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
        )

    async def _cleanup_server(self) -> None:
        await super()._cleanup_server()
        self._malformed.close()
        self._no_file.close()


def _safe(factory: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """``factory``, and of a message on which it fails a request with _UNREADABLE: aiohttp would neither answer the
    client nor close the connection. It fails, for one, on an absolute target whose host is no IDNA."""

    def make(message: RawRequestMessage, body: StreamReader, connection: Connection, *more: Any) -> web.BaseRequest:
        connection.requests += 1
        connection.count()
        arguments = (body, connection, *more)
        try:
            return factory(message, *arguments)
        except Exception:
            request = factory(ERROR, *arguments)
            request[_UNREADABLE] = True
            return request

    return make


def _refusing_unreadable(
    handler: Callable[..., Awaitable[web.StreamResponse]],
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """``handler``, and for requests with _UNREADABLE the answer to a malformed one."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.get(_UNREADABLE, False):
            return request.protocol.handle_error(request, 400, Unreadable(message=""))
        return await handler(request)

    return handle


def _without_expect(factory: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """``factory`` of requests whose ``Expect`` header stands under EXPECTATION instead: aiohttp would answer it before
    anything has looked at the key or at the length of the body."""

    def make(message: RawRequestMessage, *arguments: Any) -> web.BaseRequest:
        expectation = message.headers.get("Expect")
        if expectation is None:
            return factory(message, *arguments)
        headers = CIMultiDict(message.headers)
        del headers["Expect"]
        request = factory(message._replace(headers=CIMultiDictProxy(headers)), *arguments)
        request[EXPECTATION] = expectation
        return request

    return make
