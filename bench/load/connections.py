"""HTTP connections that distinguish a stale kept-alive connection from a failed request.

A server may close an idle kept-alive connection at any time, even while the next request is on its way. Such a request
did not fail because of the server's work, and a client may send it again on a new connection (RFC 9112, section 9.3.1).
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler


class StaleConnection(aiohttp.ServerDisconnectedError):
    """Raised when a reused connection is closed before the first byte of the answer."""


class _Connection(ResponseHandler):
    """Counts the requests on a connection, and records whether any byte of the last answer has arrived."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._requests, self._answered = 0, False

    def set_response_params(self, **options: Any) -> None:
        self._requests += 1
        self._answered = False
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        self._answered = True
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        closed = isinstance(exc, aiohttp.ClientConnectionError) and not isinstance(exc, TimeoutError)
        if closed and self._requests > 1 and not self._answered:
            exc = StaleConnection(f"a kept-alive connection was closed: {exc}")
        super().set_exception(exc, *cause)


class Connector(aiohttp.TCPConnector):
    """An unlimited connection pool that keeps idle connections for ``kept_s`` seconds.

    A request on a pooled connection that the server has closed raises StaleConnection."""

    def __init__(self, kept_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=kept_s)
        self._factory = cast("functools.partial[ResponseHandler]", functools.partial(_Connection, self._loop))
