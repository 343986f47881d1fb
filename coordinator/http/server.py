"""The HTTP server below the application: connections, malformed requests, and memory bounds per connection.

Replaces defaults of aiohttp that are unsafe for a public server:

- aiohttp logs a malformed request with a traceback and the bytes received (which may include keys), repeats them to the
  client as plain text, and names its own version. Here such a request is logged by kind only, rate-limited, and
  answered with an OpenAI-shaped error.
- aiohttp answers ``Expect`` before the handler runs. Here the middleware does, after it has checked the key and the
  length of the body.
- aiohttp limits the size of one header and the number of headers, so that a connection may hold the product of both.
  Here the request line and all headers together have a limit.
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
from coordinator.requests.errors import internal, overloaded

log = logging.getLogger("tandem.http")

EXPECTATION = web.RequestKey("expectation", str)
"""The ``Expect`` header of a request, if it has one."""
_UNREADABLE = web.RequestKey("unreadable", bool)
"""Set if the parser accepted the message but no request could be built from it."""
_OTHER_VERSION = web.RequestKey("other version", bool)
"""Set if the request has a version other than HTTP/1.0 and 1.1, or another protocol."""
MAX_HEADER_BYTES = 16 << 10
"""Maximum bytes of the request line, and of each header."""
MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of the request line and all headers together, as sent. Also the limit for the trailers of a chunked
body."""
MAX_WAITING_BYTES = 4 * MAX_HEAD_BYTES
"""Maximum bytes of the pipelined requests, heads and bodies, that wait on one connection for an earlier response. The
body of the last request is not counted."""
UNFINISHED_BUDGET = 32 << 20
"""Maximum bytes of unfinished heads and waiting pipelined requests on all connections together."""
FREE_BYTES = 8 << 10
"""A connection that holds at most this many of those bytes is never refused, so that an ordinary head that arrives in
two pieces is accepted during a flood."""
SLICE_BYTES = 16 << 10
"""Maximum bytes passed to the parser at once. Bytes that the parser keeps from a slice that completed a request are not
counted, so a slice bounds them."""
RETRY_S = 1.0
CHUNK_BYTES = 128
"""Memory overhead of one chunk of a chunked body."""
FREE_CHUNKS = 1024
"""Number of chunks that a body may have regardless of their size."""
LEAST_CHUNK_BYTES = 256
"""Minimum average size of the chunks beyond FREE_CHUNKS. The parser spends as much time on a chunk as on hundreds of
bytes."""
SERVER = "tandem"

ErrorResponse = Callable[[RequestError], web.Response]


class Unreadable(http_exceptions.BadHttpMessage):
    """The parser accepted the message, but no request can be built from it."""


class HeadTooLong(http_exceptions.BadHttpMessage):
    """The request line and headers exceed MAX_HEAD_BYTES, or the waiting requests exceed MAX_WAITING_BYTES."""


class TooMuchHeld(http_exceptions.BadHttpMessage):
    """All connections together hold more than UNFINISHED_BUDGET, and this one holds more than FREE_BYTES."""


class TooManyFiles(http_exceptions.BadHttpMessage):
    """Accepting this connection would leave too few file descriptors for the rest of the process."""


class SmallChunks(web.RequestPayloadError):
    """The body has more than FREE_CHUNKS chunks, and those beyond average fewer than LEAST_CHUNK_BYTES."""


class Held:
    """The bytes of all connections together that count towards UNFINISHED_BUDGET."""

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
        f"The request line and the headers have more than {MAX_HEAD_BYTES:,} bytes together, or the pipelined requests"
        f" that wait on this connection have more than {MAX_WAITING_BYTES:,} bytes with their bodies.",
    ),
    (http_exceptions.BadHttpMethod, "not HTTP", "This is not an HTTP/1.1 request; TLS and HTTP/2 are not supported."),
    (http_exceptions.BadStatusLine, "bad request line", "The request line is malformed."),
    (http_exceptions.InvalidURLError, "bad target", "The target of the request is malformed."),
    (TooMuchHeld, "too many unfinished requests", "unfinished requests hold too much memory"),
    (TooManyFiles, "too many connections", "too many connections are open"),
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
"""Exception types for malformed requests, each with a kind for the log and a message for the client. The first match
wins."""


def malformed_request(error: BaseException) -> tuple[str, RequestError] | None:
    """Return the kind of a malformed request and the error to answer it with, or None if ``error`` was not caused by
    what a client sent."""
    for kind, name, text in _MALFORMED:
        if isinstance(error, kind):
            return name, RequestError(text, code="malformed_request")
    return None


class Connection(web.RequestHandler):
    """One client connection. Enforces the limits on heads, pipelined requests and chunks."""

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
        """Upper bound of the bytes that the parser holds unparsed because the queue of waiting requests is full."""
        self._malformed, self._no_file, self._error_response = malformed, no_file, error_response
        self._body: StreamReader | None = None
        self._chunks = 0
        """Chunks of ``_body`` so far, without those that arrived in the same slice as its head."""
        self._refused = False
        self._unparsed = 0
        """Bytes received since the parser last produced a request or a part of a body. The parser holds them."""
        self.requests = 0
        """Number of requests of this connection for which a handler has been started."""
        self.made_at = self._moved_at = time.monotonic()
        self._out: asyncio.Transport | None = None
        """The transport, kept until the connection is lost. aiohttp clears ``transport`` before the last bytes are
        sent."""
        self._seen = (0, 0, 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or refuse it with an error response if nearly all file descriptors are in use."""
        super().connection_made(transport)
        self._out = self.transport
        if self._task_handler is not None:
            self._task_handler.add_done_callback(self._end_failed)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= open_files.limit() - open_files.reserved():
            self._refuse(0, TooManyFiles(message=""), lingering=False)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release what was received and not answered; the garbage collector would free a dead connection late."""
        super().connection_lost(exc)
        self._messages.clear()
        self._message_tail = b""
        self._body = self._out = None
        self._unparsed = self._tail = 0
        self.count()

    def is_unread(self, now: float, patience_s: float) -> bool:
        """Return whether the client has read nothing for ``patience_s`` although data is waiting for it. Must be called
        periodically: each call compares the bytes waiting here and in the kernel, and the number of requests, with
        those of the call before."""
        waiting = self._out.get_write_buffer_size() if self._out is not None else 0
        seen = waiting, _unacknowledged(self._out) if waiting else 0, self.requests
        if not waiting or seen != self._seen:
            self._seen, self._moved_at = seen, now
        return now - self._moved_at >= patience_s

    def abort(self) -> None:
        """Close the connection at once and discard what the client has not read."""
        if self._out is not None:
            self._out.abort()

    def _end_failed(self, task: asyncio.Task[None]) -> None:
        """Close the connection if ``task``, which handles its requests, has failed. aiohttp would leave it open."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(error)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Parse ``data`` in slices of SLICE_BYTES and apply the limits. Data after a refused request is discarded."""
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
        except Exception as error:  # asyncio would log the text of the error, which may contain received bytes
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
        """Update the bytes counted for this connection, and refuse it if the budget of all connections is exceeded."""
        first = 0 if self._waiter is None else 1  # an idle handler takes the first request next: it is not waiting
        mine = self._unparsed + self._tail
        for message, body in itertools.islice(self._messages, first, None):
            if isinstance(message, RawRequestMessage):
                mine += _head_bytes(message) + _body_bytes(body)
        self._held.total += mine - self._mine
        self._mine = mine
        if mine > FREE_BYTES and self._held.total > UNFINISHED_BUDGET and not self._refused:
            self._refuse(first, TooMuchHeld(message=""))

    def _parsed(self) -> tuple[int, int]:
        """Return the number of requests so far and the bytes of the last request's body."""
        if self._messages:
            self._body = self._messages[-1][1]
        elif self._current_request is not None:
            self._body = self._current_request.content
        return self._request_count, self._body.total_bytes if self._body is not None else 0

    def _refuse_long_heads(self) -> None:
        """Refuse the first request whose head is too long, even if it is incomplete, or with which the waiting requests
        exceed MAX_WAITING_BYTES. The body of the last request is not counted: it may still be arriving, and little of
        it is read before it is handled."""
        waiting = 0
        for place, (message, body) in enumerate(self._messages):
            if isinstance(message, RawRequestMessage):
                size = _head_bytes(message)
                if size > MAX_HEAD_BYTES or waiting + size > MAX_WAITING_BYTES:
                    self._refuse(place, HeadTooLong(message=""))
                    return
                waiting += size
                if place or self._waiter is None:  # else the idle handler takes it next
                    waiting += _body_bytes(body)
        if self._unparsed > MAX_HEAD_BYTES:
            self._refuse(len(self._messages), HeadTooLong(message=""))

    def _refuse_small_chunks(self) -> None:
        """Refuse the last body if it has too many small chunks: a megabyte of them would take half a second to
        parse."""
        body = self._body
        if body is None or self._chunks <= FREE_CHUNKS + body.total_bytes // LEAST_CHUNK_BYTES:
            return
        if self._messages and self._messages[-1][1] is body:
            self._refuse(len(self._messages) - 1, SmallChunks())
        else:  # a handler is reading or draining it
            self._refuse(len(self._messages), SmallChunks())
            body.set_exception(SmallChunks())

    def _refuse(self, place: int, error: Exception, lingering: bool = True) -> None:
        """Drop the waiting requests from ``place`` on and answer with ``error`` after those before it, then close.

        Releases what the parser holds and discards further input. With ``lingering`` the connection stays open for
        LINGER_S after the response, as for a refused body, so that the client gets to read it."""
        while len(self._messages) > place:
            self._messages.pop()
        rest = StreamReader(self, limit=1, loop=self._loop) if lingering else EMPTY_PAYLOAD
        self._messages.append((_ErrInfo(400, error, ""), rest))
        self._refused, self._parser, self._body, self._unparsed, self._tail = True, None, None, 0, 0
        if self._reading_paused:  # by a body that is now dropped; while paused, a disconnect would go unnoticed
            self._reading_paused = False
            self._resume_transport_reading()
        self.count()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end_malformed_body(self) -> None:
        """Fail the body that is being read if the received data cannot be parsed; its reader would wait for ever."""
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
        """Return the response to a malformed request, or to one that failed outside of the application."""
        if exc is not None:
            self._log(exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another response has been sent already")
        found = malformed_request(exc) if exc is not None else None
        error = found[1] if found else internal()
        if isinstance(exc, TooMuchHeld | TooManyFiles):
            error = overloaded(error.message, RETRY_S)
        response = self._error_response(error)
        response.headers["Server"] = SERVER
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an error that aiohttp reports, without its text."""
        error = kw.get("exc_info")
        self._log(error if isinstance(error, BaseException) else sys.exc_info()[1])

    def log_debug(self, *args: Any, **kw: Any) -> None:
        """Do nothing: drops aiohttp's own debug lines."""

    def _log(self, error: BaseException | None) -> None:
        """Log one line without the text of ``error``, which may contain what a client has sent."""
        if isinstance(error, TooManyFiles):
            self._no_file.add("refused", _all_open("a connection is refused"))
        elif error is not None and (found := malformed_request(error)):
            peer = self.peername[0] if isinstance(self.peername, tuple) else "an unknown peer"
            self._malformed.add(found[0], f"a malformed request from {peer} is refused: {found[0]}")
        else:
            log.error("a connection failed: %s", place_of(error))


def _all_open(what: str) -> str:
    return f"nearly all of the {open_files.limit()} allowed files and connections are open, {what}: {open_files.HINT}"


def _unacknowledged(transport: asyncio.BaseTransport | None) -> int:
    """Return the bytes in the kernel's send buffer, 0 if unknown.

    They show progress of a slow reader earlier than the transport's buffer does: the kernel accepts more data only when
    a third of its buffer is free."""
    connection = transport.get_extra_info("socket") if transport is not None else None
    try:
        return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder) if connection else 0
    except (OSError, ValueError):  # the connection is closed
        return 0


def _head_bytes(message: RawRequestMessage) -> int:
    """Return the bytes of the request line and the headers, with their line ends."""
    line = len(message.method) + len(message.path) + len("  HTTP/1.1\r\n")
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in message.raw_headers)


def _body_bytes(body: StreamReader) -> int:
    """Return the memory of a ``body`` that has not been read yet: its bytes and its list of chunk ends."""
    return body.total_bytes + CHUNK_BYTES * _chunks_held(body)


def _chunks_held(body: StreamReader | None) -> int:
    """Return the number of received chunks of ``body`` that have not been read."""
    splits = None if body is None or body is EMPTY_PAYLOAD else body._http_chunk_splits
    return len(splits or ())


def place_of(error: BaseException | None) -> str:
    """Return the type of ``error`` and the line that raised it, without its text."""
    if error is None:
        return "for an unknown reason"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return type(error).__name__ + where


class Server(web.Server):
    """Creates a :class:`Connection` per accepted socket."""

    def __init__(self, handler: Any, connection: dict[str, Any], **arguments: Any) -> None:
        super().__init__(_refusing_other_versions(handler), **arguments)
        self._connection = connection

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._connection)


def _refusing_other_versions(handler: Any) -> Any:
    """Wrap ``handler`` so that requests with _OTHER_VERSION are answered as malformed."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.get(_OTHER_VERSION, False):
            return request.protocol.handle_error(request, exc=http_exceptions.BadHttpMethod(""))
        response: web.StreamResponse = await handler(request)
        return response

    return handle


def _of_spoken_versions(factory: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Wrap ``factory`` so that requests of versions other than HTTP/1.0 and 1.1 are marked with _OTHER_VERSION.

    The parser accepts any version and reads it like HTTP/1.1. aiohttp answers in the version of the request, so these
    requests, and the placeholder for a message that could not be parsed, are given version 1.1."""

    def make(message: RawRequestMessage, *arguments: Any) -> web.BaseRequest:
        if message is not ERROR and message.version in (HttpVersion10, HttpVersion11):
            return factory(message, *arguments)
        request = factory(message._replace(version=HttpVersion11), *arguments)
        request[_OTHER_VERSION] = message is not ERROR
        return request

    return make


class Runner(web.AppRunner):
    """Runs an application whose connections are :class:`Connection` objects."""

    __slots__ = ("_error_response", "_malformed", "_no_file")

    def __init__(self, app: web.Application, error_response: ErrorResponse, **arguments: Any) -> None:
        super().__init__(app, **arguments)
        self._error_response = error_response
        self._malformed = RateLimitedLog(logging.WARNING, "%d more malformed requests were refused: %s")
        self._no_file = RateLimitedLog(logging.WARNING, "%d more times too many files or connections were open: %s")

    def check_files(self) -> None:
        """Log a warning if no file can be opened. uvloop then resets incoming connections without an error."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            self._no_file.add("unable to open a file", _all_open(f"connections are reset ({reason(error)})"))

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
    """Wrap ``factory`` so that a message on which it fails becomes a request marked with _UNREADABLE. aiohttp would
    neither answer the client nor close the connection. One such message is an absolute target whose host is not valid
    IDNA."""

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
    """Wrap ``handler`` so that requests with _UNREADABLE are answered as malformed."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.get(_UNREADABLE, False):
            return request.protocol.handle_error(request, 400, Unreadable(message=""))
        return await handler(request)

    return handle


def _without_expect(factory: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Wrap ``factory`` so that the ``Expect`` header is moved to EXPECTATION. aiohttp would answer it before the key
    and the length of the body have been checked."""

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
