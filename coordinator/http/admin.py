"""The endpoints under ``/admin``: workers, requests, the feed of events, drains and scaling."""

from __future__ import annotations

import asyncio

from aiohttp import web

from common.core.errors import RequestError
from common.net.messages import Drain
from coordinator.api.event_stream import KEEPALIVE
from coordinator.api.fields import Fields, refuse
from coordinator.http.context import SERVICES, deliver_whole, read_body, read_timeout
from coordinator.http.middleware import ID_HEADERS, WRITTEN, json_response
from coordinator.http.sse import EventStream
from coordinator.live.worker_rows import link_rows, worker_rows
from coordinator.requests.spec import Json
from coordinator.requests.timeline import MAX_ENDED
from coordinator.requests.waterfall import shown

routes = web.RouteTableDef()

MAX_WORKERS = 4096
MAX_NAME = 256
MAX_DRAIN_S = 86_400.0
DEFAULT_REQUESTS, MAX_REQUESTS = 50, 200
"""Requests in one list. Each takes about 20 µs of the event loop."""


@routes.get("/admin/workers")
async def workers(request: web.Request) -> web.StreamResponse:
    """List all workers with their state, load, memory, GPUs and measured links, and those that are absent and why;
    the model, and how many workers each pool should have at least (0 if that is not configured)."""
    services = request.app[SERVICES]
    rows = worker_rows(services.dispatcher)
    more: Json = {"model": services.model.name, "expected": services.registry.expected}
    return await deliver_whole(request, json_response(rows | more))


@routes.post("/admin/drain")
async def drain(request: web.Request) -> web.Response:
    """Drain ``worker``: it takes no new requests and exits when its running ones are done, or after ``timeout``
    seconds. Streams that are still running then continue on another worker.

    The response (202) does not wait for the drain. ``tandem up`` starts a replacement."""
    services = request.app[SERVICES]
    fields = await read_body(request, lambda body, _: Fields(body))
    name, timeout_s = fields.string("worker", limit=MAX_NAME), fields.number("timeout", 0, MAX_DRAIN_S)
    if name is None:
        fields.missing("worker")
    worker = next((each for each in services.registry if each.hello.name == name), None)
    patience_s = services.config.drain_timeout if timeout_s is None else timeout_s
    message = Drain(round(patience_s * 1000))
    if worker is None or not services.dispatcher.gateway.send(worker, message):
        raise RequestError(f"There is no worker {name!r} here.", status=404, code="not_found", param="worker")
    return json_response({"worker": name, "timeout": patience_s}, status=202)


@routes.post("/admin/scale")
async def scale(request: web.Request) -> web.Response:
    """Resize the pools to ``prefill`` and ``decode`` workers. The response is sent when the pools have these sizes."""
    services = request.app[SERVICES]
    fields = await read_body(request, lambda body, _: Fields(body))
    prefill, decode = fields.integer("prefill", 0, MAX_WORKERS), fields.integer("decode", 1, MAX_WORKERS)
    if prefill is None and decode is None:
        refuse("There is nothing to change: give prefill, decode or both.", "decode", "missing_required_parameter")
    if services.scale is None:
        raise RequestError(
            "This server was not started by `tandem up`: start and stop its workers one by one.",
            status=409,
            code="cannot_scale",
        )
    prefill, decode = await services.scale(prefill, decode)
    services.registry.expected |= {"prefill": prefill, "decode": decode}
    return json_response({"prefill": prefill, "decode": decode})


@routes.post("/admin/links")
async def links(request: web.Request) -> web.StreamResponse:
    """Measure the KV link from each prefill worker to each decode worker anew by trial hand-offs, one pair at a time.
    The response is sent at the end, and lists all links that are measured. The body is ignored."""
    dispatcher = request.app[SERVICES].dispatcher
    await dispatcher.measure_links()
    return await deliver_whole(request, json_response({"links": link_rows(dispatcher)}))


@routes.get("/admin/requests")
async def requests(request: web.Request) -> web.StreamResponse:
    """List the last requests, the latest first: at most ``limit`` (default 50), those that have not ended included."""
    given = request.query.get("limit", str(DEFAULT_REQUESTS))
    if not (given.isascii() and given.isdigit() and len(given) < 5 and 1 <= int(given) <= MAX_REQUESTS):
        refuse(f"'limit' must be an integer from 1 to {MAX_REQUESTS}.", "limit")
    found = request.app[SERVICES].dispatcher.timelines.recent(int(given))
    body: Json = {"requests": [shown(timeline, spans=False) for timeline in found]}
    return await deliver_whole(request, json_response(body))


@routes.get("/admin/requests/{id}")
async def request_spans(request: web.Request) -> web.StreamResponse:
    """Show where the time of one request went: the spans of the one whose answer, or ``x-request-id``, is ``id``.

    The last 512 requests that have ended are known, and all that have not."""
    name = request.match_info["id"]
    dispatcher = request.app[SERVICES].dispatcher
    timeline = dispatcher.timelines.find(name)
    if timeline is None:
        raise RequestError(
            f"No request {name[:MAX_NAME]!r} is known: only the last {MAX_ENDED} that have ended are remembered.",
            status=404,
            code="not_found",
            param="id",
        )
    return await deliver_whole(request, json_response(shown(timeline, now=dispatcher.gateway.clock())))


@routes.get("/admin/events")
async def events(request: web.Request) -> web.StreamResponse:
    """Send what happens, as server-sent events: ``system`` once per second, ``request`` when a request changes,
    ``worker`` when a worker does. At most 16 clients are served."""
    services = request.app[SERVICES]
    services.feed.check_room()
    stream = EventStream(request, request[ID_HEADERS], *read_timeout(services), KEEPALIVE)
    await stream.open()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    request[WRITTEN] = done  # a page that is closed is no client that left before its answer
    listener = services.feed.join(stream)
    try:
        await stream.until(listener.closed)
    finally:
        services.feed.leave(listener)
    return await stream.close()
