"""Shared by all handlers: the coordinator's services, reading a request body, delivering a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from common.config.coordinator import CoordinatorConfig
from common.core.errors import RequestError
from coordinator.api.fields import JsonBudget, parse_json
from coordinator.api.service import ServedModel
from coordinator.cluster.registry import Registry
from coordinator.http.bodies import Bodies, BodyShare
from coordinator.http.middleware import ID_HEADERS, announce_reading
from coordinator.http.repeats import RateLimitedLog
from coordinator.http.server import (
    EXPECTATION,
    malformed_request,
)
from coordinator.http.sse import deliver
from coordinator.live.feed import Feed
from coordinator.metrics import Metrics
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.spec import Json
from coordinator.requests.timeline import Timeline
from coordinator.requests.trace_context import TraceSampler
from coordinator.text.lanes import INLINE_BYTES, is_small

T = TypeVar("T")

Scale = Callable[[int | None, int | None], Awaitable[tuple[int, int]]]
"""Resizes the (prefill, decode) pools to the given worker counts (None: unchanged) and returns their new sizes. Raises
RequestError if that is not possible."""


class OpenAnswers:
    """Counts open answers, each from its admission until the kernel has its last byte. ``none`` is set while no answer
    is open.

    Enter it as a context manager once per answer."""

    def __init__(self) -> None:
        self.count = 0
        self.none = asyncio.Event()
        self.none.set()

    def __enter__(self) -> None:
        self.count += 1
        self.none.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self.none.set()


@dataclass(frozen=True, slots=True)
class Services:
    """The services that handlers use. One instance per coordinator."""

    config: CoordinatorConfig
    model: ServedModel
    dispatcher: Dispatcher
    registry: Registry
    metrics: Metrics
    feed: Feed
    scale: Scale | None = None
    sampler: TraceSampler = field(default_factory=TraceSampler)
    refused: Callable[[Timeline], None] | None = None
    """Exports requests that are refused before they are queued."""
    answers: OpenAnswers = field(default_factory=OpenAnswers)
    bodies: Bodies = field(init=False)
    cuts: RateLimitedLog = field(
        default_factory=lambda: RateLimitedLog(logging.WARNING, "%d more clients were disconnected: %s")
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "bodies", Bodies(self.config.max_body_bytes))


SERVICES = web.AppKey("services", Services)


async def read_body(request: web.Request, read: Callable[[Json, JsonBudget], T], *, templated: bool = False) -> T:
    """Read the body of a POST and return ``read(body, budget)``: the parsed JSON object and its remaining JSON budget.
    Raises RequestError if the body is not a JSON object. ``templated``: ``read`` may render the chat template.

    For a body that is long or has many objects, parsing and ``read`` run as one step of a lane, so that bodies wait for
    a lane as bytes rather than as the larger parsed objects."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise RequestError(
            f"Content-Encoding {encoding[:32]!r} is not supported; send the body uncompressed.",
            status=415,
            code="unsupported_content_encoding",
        )
    services = request.app[SERVICES]
    await asyncio.sleep(0)  # lets the event loop cancel this handler if the client has sent everything and disconnected
    with services.bodies.share() as share:
        body = await _receive(request, share)

        def parsed() -> T:
            budget = JsonBudget()
            return read(parse_json(body, budget), budget)

        return parsed() if is_small(body, templated=templated) else await services.model.in_body_lane(body, parsed)


async def _receive(request: web.Request, share: BodyShare) -> bytes:
    """Return all bytes of the body. They are counted in ``share`` while they arrive.

    A small body that arrives in one piece is not counted, so that it is served even during a flood of small bodies that
    stay unfinished."""
    services = request.app[SERVICES]
    all_there = request.content.is_eof()  # then no timer is needed
    announce_reading(request)
    body = bytearray()
    try:
        async with asyncio.timeout(None if all_there else services.config.client_timeout):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > request.client_max_size:
                    raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
                if len(body) > INLINE_BYTES or not request.content.is_eof():  # complete small ones: counted by a lane
                    share.grow(len(body))
    except TimeoutError:
        services.metrics.cut_off("sending")
        raise RequestError("The request body did not arrive in time.", status=408, code="request_timeout") from None
    except web.RequestPayloadError as error:
        found = malformed_request(error)
        assert found is not None
        raise found[1] from None
    return bytes(body)


async def deliver_whole(request: web.Request, response: web.Response) -> web.StreamResponse:
    """Send all of ``response``. Disconnects a client that reads nothing for ``client_timeout``."""
    response.headers.update(request[ID_HEADERS])
    if EXPECTATION in request:
        response.force_close()  # as in middleware.guard, which sees this response only after it has been sent
    return await deliver(request, response, *read_timeout(request.app[SERVICES]))


def read_timeout(services: Services) -> tuple[float, Callable[[str], None]]:
    """Return the seconds for which a client may read nothing, and the function that counts and logs a disconnection."""

    def cut(why: str) -> None:
        services.metrics.cut_off("reading")
        services.cuts.add(f"({why})", f"a client is disconnected: it {why}")

    return services.config.client_timeout, cut
