"""The endpoints that generate text, and the application they live in.

Owns the walk of one HTTP request: body, prompt, tickets, reply. What a body means is :mod:`coordinator.api.openai`'s,
what an answer looks like :mod:`coordinator.api.response_encoder`'; pages that only show something are in
:mod:`coordinator.http.pages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from aiohttp import web

from common.config.commands import CoordinatorConfig
from common.core.errors import RequestError
from common.core.ids import new_request_id, pack_tokens
from common.core.request import SamplingParams
from coordinator.api.fields import parse_json
from coordinator.api.openai import parse_chat, parse_completion
from coordinator.api.response_encoder import ChatShape, Choice, CompletionShape, Head, Shape
from coordinator.api.service import ServedModel
from coordinator.cluster.registry import Registry
from coordinator.http.bodies import Bodies, BodyShare
from coordinator.http.cors import Cors
from coordinator.http.middleware import REQUEST_ID, WRITTEN, announce_reading, error_response, guard, json_response
from coordinator.http.repeats import RateLimitedLog
from coordinator.http.reply import Reply, StreamReply, WholeReply
from coordinator.http.server import (
    EXPECTATION,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    SERVER,
    Connection,
    Runner,
    malformed_request,
)
from coordinator.http.sse import KEEPALIVE_S, LOOKS, EventStream, deliver
from coordinator.metrics import Metrics
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.errors import shutting_down
from coordinator.requests.record import Ticket
from coordinator.requests.spec import CompletionBody, Json, Options
from coordinator.routing.router import Chains
from coordinator.text.lanes import INLINE_BYTES, is_small
from coordinator.text.tokenizer import ChatText, StopStrings

log = logging.getLogger("tandem.http")

T = TypeVar("T")

KEEPALIVE_CONNECTION_S = 75.0
LINGER_S = 2.0
"""For how long the rest of a body that was refused is read and dropped, so that its sender can read why."""
READ_BYTES = 64 << 10
"""Of a body: with twice as much that its handler has not taken, nothing more is read from its client."""
BACKLOG = 4_096
RETRY_COUNT = "x-stainless-retry-count"
"""Header with the number of retries before this one, of the openai and anthropic clients among others."""
_LAST_WORDS_S = 1.0


Scale = Callable[[int | None, int | None], Awaitable[tuple[int, int]]]
"""Makes the prefill and the decode pool that large (None: as it is); returns their sizes, or raises RequestError."""


class OpenAnswers:
    """Counts answers from their admission until the kernel has their last byte; ``none`` is set while there are none.

    Each is entered as a context."""

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
    """What handlers need, made once per coordinator."""

    config: CoordinatorConfig
    model: ServedModel
    dispatcher: Dispatcher
    registry: Registry
    metrics: Metrics
    scale: Scale | None = None
    answers: OpenAnswers = field(default_factory=OpenAnswers)
    bodies: Bodies = field(init=False)
    cuts: RateLimitedLog = field(
        default_factory=lambda: RateLimitedLog(logging.WARNING, "%d more clients were cut off: %s")
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "bodies", Bodies(self.config.max_body_bytes))


SERVICES = web.AppKey("services", Services)


def make_app(services: Services) -> web.Application:
    """The aiohttp application over running services."""
    from coordinator.http.pages import routes

    config = services.config
    cors = Cors(config.allowed_origins or ())
    if cors.allows_all and not config.api_keys():
        log.warning("every web page in a browser that reaches this server may use it: set --api-key")
    left = RateLimitedLog(logging.INFO, "%d more clients have left before they were answered: %s")
    app = web.Application(
        middlewares=[guard(config, cors, left)],
        client_max_size=config.max_body_bytes,
    )
    app.on_response_prepare.append(_name_server)
    app.on_response_prepare.append(cors.add_headers)
    app.on_cleanup.append(functools.partial(_close_logs, left, services.cuts))
    app[SERVICES] = services
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_routes(routes)
    return app


async def _close_logs(left: RateLimitedLog, cuts: RateLimitedLog, _: web.Application) -> None:
    left.close()
    cuts.close()


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    """Without versions: whoever looks for weak ones learns nothing."""
    response.headers["Server"] = SERVER


def make_runner(app: web.Application) -> web.AppRunner:
    """How the application is served: a client that leaves cancels its handler, and no body is unpacked, not even one
    that is refused and drained."""
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
    """Takes connections of ``listener``; at the end those that are left have a second for their last words."""
    runner = make_runner(app)
    await runner.setup()
    usher = asyncio.create_task(_show_out(app[SERVICES], runner))
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        yield
    finally:
        usher.cancel()
        await runner.cleanup()


async def _show_out(services: Services, runner: web.AppRunner) -> None:
    """Looks at all connections from time to time."""
    patience_s, cut = _patience(services)
    while True:
        await asyncio.sleep(patience_s / LOOKS)
        _close_silent_and_unread(services, runner, patience_s, cut)


def _close_silent_and_unread(
    services: Services, runner: web.AppRunner, patience_s: float, cut: Callable[[str], None]
) -> None:
    """Closes connections whose first request does not come (aiohttp waits for headers for ever; later ones on the same
    connection have the keep-alive limit), and those whose client does not read, whatever it has asked for."""
    now = time.monotonic()
    for connection in runner.server.connections if runner.server else ():
        if not isinstance(connection, Connection):
            continue
        if not connection.requests and connection.transport is not None and now - connection.made_at >= patience_s:
            services.metrics.cut_off("sending")
            connection.force_close()
        elif connection.is_unread(now, patience_s):
            cut(f"has taken nothing of its answers for {patience_s:g} s")
            connection.abort()


async def read_body(request: web.Request, read: Callable[[Json], T]) -> T:
    """Return ``read`` of the JSON object of a POST; RequestError for anything else that was sent.

    The parser and ``read`` run as one step of a lane if the body is long or has many objects, so that bodies wait as
    bytes, not as objects."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise RequestError(
            f"A body with Content-Encoding {encoding[:32]!r} is not taken; send it plain.",
            status=415,
            code="unsupported_content_encoding",
        )
    services = request.app[SERVICES]
    await asyncio.sleep(0)  # a client that has sent everything and left is known to have left behind this
    with services.bodies.share() as share:
        body = await _receive(request, share)
        if is_small(body):
            return read(parse_json(body))
        return await services.model.in_body_lane(body, lambda: read(parse_json(body)))


async def _receive(request: web.Request, share: BodyShare) -> bytes:
    """All bytes of the body, counted in ``share`` as they come: while a flood of small ones that stay unfinished is
    refused, those that come in one piece are served."""
    services = request.app[SERVICES]
    all_there = request.content.is_eof()  # a timer would be for nothing
    announce_reading(request)
    body = bytearray()
    try:
        async with asyncio.timeout(None if all_there else services.config.client_timeout):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > request.client_max_size:
                    raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
                if len(body) > INLINE_BYTES or not request.content.is_eof():  # a lane counts small ones that are whole
                    share.grow(len(body))
    except TimeoutError:
        services.metrics.cut_off("sending")
        raise RequestError("The request body did not arrive in time.", status=408, code="request_timeout") from None
    except web.RequestPayloadError as error:
        found = malformed_request(error)
        assert found is not None
        raise found[1] from None
    return bytes(body)


# -- the two generating endpoints -------------------------------------------------------------------------------------


async def chat_completions(request: web.Request) -> web.StreamResponse:
    arrived_at = time.monotonic()
    services = request.app[SERVICES]
    _refuse_when_draining(services)
    model = services.model

    def read(fields: Json) -> tuple[Options, ChatText]:
        body = parse_chat(fields)
        model.check_name(body.options.model)
        return body.options, model.chat_text(body)

    options, text = await read_body(request, read)
    prompts = [await model.chat_prompt(text)]
    del text  # it may be long, and the answer may take long
    shape = ChatShape(_head("chatcmpl", model), options, model.text)
    return await _answer(request, arrived_at, prompts, "messages", options, shape)


async def completions(request: web.Request) -> web.StreamResponse:
    arrived_at = time.monotonic()
    services = request.app[SERVICES]
    _refuse_when_draining(services)
    model = services.model
    context_length = model.context_length

    def read(fields: Json) -> CompletionBody:
        body = parse_completion(fields, context_length)
        model.check_name(body.options.model)
        model.check_prompts(body.prompts)
        model.check_repeats(body, body.prompts)
        return body

    body = await read_body(request, read)
    options = body.options
    prompts = await model.text_prompts(body.prompts)
    if options.return_token_ids:
        model.check_repeats(replace(body, echo=False), prompts)
    echoes = await _echoes(model, body, prompts) if body.echo else []
    del body  # it may be long, and the answer may take long
    shape = CompletionShape(_head("cmpl", model), options, model.text, echoes)
    return await _answer(request, arrived_at, prompts, "prompt", options, shape)


async def _echoes(model: ServedModel, body: CompletionBody, prompts: Sequence[list[int]]) -> list[str]:
    """What each choice begins with: the text of its prompt."""
    given = body.prompts
    texts = await model.run(
        sum(map(len, prompts)), lambda: [each if isinstance(each, str) else model.text.decode(each) for each in given]
    )
    return [text for text in texts for _ in range(body.options.n)]


def _refuse_when_draining(services: Services) -> None:
    if services.dispatcher.draining:
        raise shutting_down()


def _head(prefix: str, model: ServedModel) -> Head:
    return Head(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model.name, model.system_fingerprint)


async def _answer(
    request: web.Request,
    arrived_at: float,
    prompts: Sequence[list[int]],
    prompt_field: str,
    options: Options,
    shape: Shape,
) -> web.StreamResponse:
    """Tickets for ``prompts``, submitted together; the reply as a whole or as a stream."""
    services = request.app[SERVICES]
    model = services.model
    stops = StopStrings(options.stop, options.include_stop) if options.stop else None

    def choice(index: int) -> Choice:
        return Choice(index, prompts[index // options.n], options, model.text, stops)

    reply = (StreamReply if options.stream else WholeReply)(options, shape, len(prompts) * options.n, choice)
    tickets = []
    for prompt in prompts:
        most_output = services.dispatcher.router.most_output(len(prompt), options.n)
        sampling = model.sampling(options, len(prompt), prompt_field, most_output, len(prompts) * options.n)
        packed = pack_tokens(prompt)
        chains = await model.prefix_chains(packed, options.cache_salt)
        tickets.append(_ticket(services, arrived_at, packed, sampling, chains, options, reply))
    reply.expect(tickets)
    with services.answers:
        try:
            first_try = request.headers.get(RETRY_COUNT) == "0"
            services.dispatcher.submit(tickets, first_try=first_try)
            if isinstance(reply, StreamReply):
                return await _stream(request, reply)
            await reply.finished
        finally:  # the client has left, or one ticket of several has failed
            for ticket in tickets:
                services.dispatcher.abort(ticket)
        if reply.error is not None:
            raise reply.error
        assert isinstance(reply, WholeReply)
        return await deliver_whole(request, json_response(reply.body(), headers=_headers(request, reply)))


def _ticket(
    services: Services,
    arrived_at: float,
    prompt: bytes,
    sampling: SamplingParams,
    chains: Chains,
    options: Options,
    reply: Reply,
) -> Ticket:
    return Ticket(
        id=new_request_id(),
        prompt=prompt,
        sampling=sampling,
        n=options.n,
        cache_salt=options.cache_salt,
        priority=options.priority,
        chains=chains,
        client=reply,
        arrived_at=arrived_at,
        tokenized_at=time.monotonic(),
        deadline_at=arrived_at + services.config.request_timeout,
        open_ended=options.sampling.max_tokens is None,
    )


async def _stream(request: web.Request, reply: StreamReply) -> web.StreamResponse:
    """Headers go out with the first token, so that a failure before it has a status of its own; or after 15 s."""
    patience = asyncio.get_running_loop().call_later(KEEPALIVE_S, reply.start)
    try:
        await reply.started
    finally:
        patience.cancel()
    if reply.refused:
        assert reply.error is not None
        raise reply.error
    stream = EventStream(request, _headers(request, reply), *_patience(request.app[SERVICES]))
    await stream.open()
    request[WRITTEN] = reply.finished
    stream.send(reply.open(stream.send))
    await stream.until(reply.finished)
    return await stream.close()


async def deliver_whole(request: web.Request, response: web.Response) -> web.StreamResponse:
    """Sends all of ``response``; a client that takes nothing of it for ``client_timeout`` is cut."""
    response.headers["x-request-id"] = request[REQUEST_ID]
    if EXPECTATION in request:
        response.force_close()  # as of guard, for what is sent before it sees it
    return await deliver(request, response, *_patience(request.app[SERVICES]))


def _patience(services: Services) -> tuple[float, Callable[[str], None]]:
    """How long a client may not read, and who hears if it does not."""

    def cut(why: str) -> None:
        services.metrics.cut_off("reading")
        services.cuts.add(f"({why})", f"a client is cut off: it {why}")

    return services.config.client_timeout, cut


def _headers(request: web.Request, reply: Reply) -> dict[str, str]:
    """Where the (first) request went, or is going to."""
    ticket = reply.tickets[0]
    headers = {"x-request-id": request[REQUEST_ID], "x-tandem-path": ticket.path}
    if (placement := ticket.placement) is not None:
        headers["x-tandem-prefill"] = (placement.prefill or placement.decode).hello.name
        headers["x-tandem-decode"] = "none" if ticket.path == "prefill" else placement.decode.hello.name
    if reply.options.ignored:
        names = (name for name in reply.options.ignored if name.isascii() and name.isprintable())
        headers["x-tandem-ignored"] = ", ".join(names)[:1024]
    return headers
