"""Connections to a server under test that tell a stale one from a failed request.

A server may close a connection that it keeps open at any time, also while the next request travels to it. That request
has failed for no fault of the server's, and a client sends it again on a new connection (RFC 9112, section 9.3.1).
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler


class StaleConnection(aiohttp.ServerDisconnectedError):
    """A connection that had served a request before was closed before a byte of this answer came."""


class _Connection(ResponseHandler):
    """Counts its requests, and whether the last one has been answered by any byte."""

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
            exc = StaleConnection(f"a kept connection was closed: {exc}")
        super().set_exception(exc, *cause)


class Connector(aiohttp.TCPConnector):
    """A pool without a limit, whose connections are kept for ``kept_s`` after an answer. A request for which one turns
    out to be closed raises StaleConnection."""

    def __init__(self, kept_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=kept_s)
        self._factory = cast("functools.partial[ResponseHandler]", functools.partial(_Connection, self._loop))
