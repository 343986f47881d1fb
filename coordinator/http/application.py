"""The aiohttp application for the running services, and the server that accepts its connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable

from aiohttp import HttpVersion11, web

from coordinator.http.admin import routes as admin
from coordinator.http.anthropic import routes as anthropic
from coordinator.http.context import SERVICES, Services, read_timeout
from coordinator.http.cors import Cors
from coordinator.http.middleware import error_response, guard
from coordinator.http.pages import routes as pages
from coordinator.http.repeats import RateLimitedLog
from coordinator.http.responses import routes as responses
from coordinator.http.routes import routes as generating
from coordinator.http.server import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    SERVER,
    Connection,
    Runner,
)
from coordinator.http.sse import LOOKS
from coordinator.http.ui_files import routes as ui_files

log = logging.getLogger("tandem.http")

KEEPALIVE_CONNECTION_S = 75.0
LINGER_S = 2.0
"""How long to keep reading and discarding a refused body, so that its sender gets to read the error response."""
READ_BYTES = 64 << 10
"""Buffer size of a request body. aiohttp pauses reading from the client while twice this much is unconsumed."""
BACKLOG = 4_096
_LAST_WORDS_S = 1.0


def make_app(services: Services) -> web.Application:
    """Build the aiohttp application for the running services."""
    config = services.config
    cors = Cors(config.allowed_origins or ())
    if cors.allows_all and not config.api_keys():
        log.warning("any web page in a browser that can reach this server may use it: set --api-key")

    def responded(endpoint: str, status: int) -> None:
        services.metrics.responded(endpoint, status)
        services.feed.responded(endpoint, status)

    left = RateLimitedLog(logging.INFO, "%d more clients disconnected before they were answered: %s")
    app = web.Application(
        middlewares=[guard(config, cors, left, services.sampler, responded, services.refused)],
        client_max_size=config.max_body_bytes,
    )
    app.on_response_prepare.append(_name_server)
    app.on_response_prepare.append(functools.partial(_close_if_leaving, services))
    app.on_response_prepare.append(cors.add_headers)
    app.on_cleanup.append(functools.partial(_close_logs, left, services.cuts))
    app[SERVICES] = services
    for table in (generating, responses, anthropic, pages, admin, ui_files):
        app.router.add_routes(table)
        for route in table:  # each path may have a slash at its end
            if isinstance(route, web.RouteDef) and route.path != "/" and ":" not in route.path:
                app.router.add_route(route.method, f"{route.path}/", route.handler)
    return app


async def _close_logs(left: RateLimitedLog, cuts: RateLimitedLog, _: web.Application) -> None:
    left.close()
    cuts.close()


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    """Set the ``Server`` header, without a version number that would help an attacker."""
    response.headers["Server"] = SERVER


async def _close_if_leaving(services: Services, request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection behind ``response`` while another coordinator takes over: the client's next one goes
    there."""
    if services.dispatcher.leaving:
        response.force_close()
        if request.version >= HttpVersion11:
            response.headers["Connection"] = "close"


def make_runner(app: web.Application) -> Runner:
    """Build the runner of the application. The handler of a client that disconnects is cancelled, and no body is
    decompressed, not even one that is refused and drained."""
    return Runner(
        app,
        error_response,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEPALIVE_CONNECTION_S,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        read_bufsize=READ_BYTES,
        lingering_time=LINGER_S,
        auto_decompress=False,
        shutdown_timeout=_LAST_WORDS_S,
    )


@contextlib.asynccontextmanager
async def serving(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Accept connections of ``listener``. On exit, wait up to one second for open connections to finish."""
    runner = make_runner(app)
    await runner.setup()
    usher = asyncio.create_task(_show_out(app[SERVICES], runner))
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        yield
    finally:
        usher.cancel()
        app[SERVICES].feed.close()  # its streams would not end by themselves
        await runner.cleanup()


async def _show_out(services: Services, runner: Runner) -> None:
    """Check all connections periodically, until cancelled."""
    patience_s, cut = read_timeout(services)
    while True:
        await asyncio.sleep(patience_s / LOOKS)
        runner.check_files()
        _close_silent_and_unread(services, runner, patience_s, cut)


def _close_silent_and_unread(
    services: Services, runner: web.AppRunner, patience_s: float, cut: Callable[[str], None]
) -> None:
    """Close connections that have not sent their first request in time, and those whose client does not read its
    responses.

    aiohttp has no timeout for the first request of a connection; later requests are covered by its keep-alive timeout.
    """
    now = time.monotonic()
    for connection in runner.server.connections if runner.server else ():
        if not isinstance(connection, Connection):
            continue
        if not connection.requests and connection.transport is not None and now - connection.made_at >= patience_s:
            services.metrics.cut_off("sending")
            connection.force_close()
        elif connection.is_unread(now, patience_s):
            cut(f"has read nothing of its responses for {patience_s:g} s")
            connection.abort()
