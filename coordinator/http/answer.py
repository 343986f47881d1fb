"""From prompts to the response: records, reply, and its delivery, whole or as a stream of events.

The modules with the routes read a body, render and tokenize it; what happens then is the same for all endpoints that
generate text.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from aiohttp import web

from common.core.ids import new_request_id, pack_tokens
from common.core.request import SamplingParams
from coordinator.api.choice import Choice
from coordinator.api.parsed_choice import OutputReading, ParsedChoice
from coordinator.api.prompt_report import PromptReport
from coordinator.api.service import ServedModel
from coordinator.api.shape import Head, Shape
from coordinator.grammar.compiler import ObeyedGrammar
from coordinator.grammar.requests import GrammarRequest
from coordinator.http.access import RECORDS
from coordinator.http.context import SERVICES, Services, deliver_whole, read_timeout
from coordinator.http.middleware import ID_HEADERS, KEY_NAME, REQUEST_ID, TRACE, WRITTEN, json_response, route
from coordinator.http.reply import Reply, StreamReply, WholeReply
from coordinator.http.sse import KEEPALIVE_S, EventStream
from coordinator.requests.errors import shutting_down
from coordinator.requests.record import RequestRecord
from coordinator.requests.spec import Options
from coordinator.requests.timeline import Timeline
from coordinator.requests.trace_context import TraceContext
from coordinator.routing.router import Chains
from coordinator.telemetry.attributes import request_attributes
from coordinator.text.tokenizer import StopStrings

RETRY_COUNT = "x-stainless-retry-count"
"""Request header with the number of earlier attempts, sent by clients such as those of OpenAI and Anthropic."""
EXTRA_HEADERS = web.RequestKey("extra headers", dict[str, str])
"""Headers of the response that depend on the request alone."""


GRAMMAR_S = web.RequestKey("seconds for a grammar", float)


def refuse_when_draining(services: Services) -> None:
    """Raise RequestError while the server drains."""
    if services.dispatcher.draining:
        raise shutting_down()


def new_head(prefix: str, model: ServedModel) -> Head:
    """Return the members with which a new answer begins; its id begins with ``prefix``."""
    return Head(f"{prefix}{secrets.token_hex(16)}", int(time.time()), model.name, model.system_fingerprint)


async def compiled(request: web.Request, model: ServedModel, wanted: GrammarRequest | None) -> ObeyedGrammar:
    """Return the grammar of the outputs of ``request``, as :meth:`ServedModel.grammar` does, and note for its timeline
    how long that took."""
    began = time.monotonic()
    grammar = await model.grammar(wanted)
    request[GRAMMAR_S] = time.monotonic() - began
    return grammar


async def answer(
    request: web.Request,
    arrived_at: float,
    prompts: Sequence[list[int]],
    prompt_field: str,
    options: Options,
    shape: Shape,
    grammar: str,
    reading: OutputReading | None = None,
    *,
    continues: bool,
    echoes: Sequence[str] = (),
) -> web.StreamResponse:
    """Submit one record per prompt, all together, and return the response, whole or as a stream. ``grammar``: what each
    choice must match, "" for no constraint. ``reading``: how outputs are parsed, None if they are only text.
    ``continues``: whether outputs continue the text at the end of their prompts, rather than being texts of their own.
    ``echoes``: as for :class:`coordinator.api.response_encoder.CompletionShape`."""
    services = request.app[SERVICES]
    model = services.model
    stops = None
    if options.stop:
        stops = StopStrings(options.stop, options.include_stop, model.text.control_tokens(options.stop))

    reports: list[PromptReport] = []
    if options.sampling.prompt_logprobs is not None:
        names = model.token_names(options)
        texts: Sequence[str | None] = echoes[:: options.n] or [None] * len(prompts)
        pairs = zip(prompts, texts, strict=True)
        reports = [PromptReport(prompt, options, names, text) for prompt, text in pairs]

    def choice(index: int) -> Choice:
        prompt = prompts[index // options.n]
        if reading is None:
            made = Choice(index, prompt, options, model.text, stops, continues=continues, echoed=bool(echoes))
        else:
            made = ParsedChoice(index, prompt, options, model.text, stops, reading, continues=continues)
        if reports:
            made.show_prompt(reports[index // options.n])
        return made

    reply = (StreamReply if options.stream else WholeReply)(options, shape, len(prompts) * options.n, choice)
    records = []
    for prompt in prompts:
        most_output = services.dispatcher.router.most_output(len(prompt), options.n)
        sampling = model.rules.params(
            options, len(prompt), prompt_field, most_output, len(prompts) * options.n, grammar
        )
        packed = pack_tokens(prompt)
        # a prompt whose log-probabilities are requested is computed whole, whatever is cached
        scored = sampling.prompt_logprobs is not None
        chains = {} if scored else await model.prefix_chains(packed, options.cache_salt)
        records.append(_record(services, arrived_at, packed, sampling, chains, options, reply))
    for number, record in enumerate(records):
        record.key_name = request[KEY_NAME]
        record.timeline = _timeline(request, shape, number, record, options)
    reply.expect(records)
    request[RECORDS] = records
    with services.answers:
        try:
            first_try = request.headers.get(RETRY_COUNT) == "0"
            services.dispatcher.submit(records, first_try=first_try)
            if isinstance(reply, StreamReply):
                return await _stream(request, reply)
            await reply.finished
        finally:  # the client may have disconnected, or one of several records may have failed
            for record in records:
                services.dispatcher.abort(record)
        if reply.error is not None:
            raise reply.error
        assert isinstance(reply, WholeReply)
        return await deliver_whole(request, json_response(reply.body(), headers=_headers(request, reply)))


def _record(
    services: Services,
    arrived_at: float,
    prompt: bytes,
    sampling: SamplingParams,
    chains: Chains,
    options: Options,
    reply: Reply,
) -> RequestRecord:
    return RequestRecord(
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
        open_ended=options.sampling.max_tokens is None and sampling.max_tokens != options.sampling.default_tokens,
    )


def _timeline(request: web.Request, shape: Shape, number: int, record: RequestRecord, options: Options) -> Timeline:
    """Return the timeline of ``record``, which has this ``number`` among those of an HTTP request."""
    trace: TraceContext = request[TRACE] if number == 0 else request[TRACE].sibling()
    exported = trace.sampled and request.app[SERVICES].sampler.records
    return Timeline(
        id=f"{shape.head.id}.{number}" if number else shape.head.id,
        request_id=request[REQUEST_ID],
        endpoint=route(request),
        stream=options.stream,
        arrived_unix_s=time.time() - (time.monotonic() - record.arrived_at),
        trace=trace,
        asked=request_attributes(record.sampling, record.n) if exported else {},
        grammar_s=request.get(GRAMMAR_S, 0.0),
    )


async def _stream(request: web.Request, reply: StreamReply) -> web.StreamResponse:
    """Send a stream. Headers are sent with the first token, so that a failure before it still gets an HTTP error
    status, or after KEEPALIVE_S without a token."""
    patience = asyncio.get_running_loop().call_later(KEEPALIVE_S, reply.start)
    try:
        await reply.started
    finally:
        patience.cancel()
    if reply.refused:
        assert reply.error is not None
        raise reply.error
    keepalive = reply.shape.keepalive
    stream = EventStream(request, _headers(request, reply), *read_timeout(request.app[SERVICES]), keepalive)
    await stream.open()
    request[WRITTEN] = reply.finished
    stream.send(reply.open(stream.send))
    await stream.until(reply.finished)
    return await stream.close()


def _headers(request: web.Request, reply: Reply) -> dict[str, str]:
    """Return the headers that depend on the request. The path and the workers are those of its first record."""
    record = reply.records[0]
    headers: dict[str, str] = request[ID_HEADERS] | {"x-tandem-path": record.path} | request.get(EXTRA_HEADERS, {})
    if (placement := record.placement) is not None:
        headers["x-tandem-prefill"] = (placement.prefill or placement.decode).hello.name
        headers["x-tandem-decode"] = "none" if record.path == "prefill" else placement.decode.hello.name
    if reply.options.ignored:
        names = (name for name in reply.options.ignored if name.isascii() and name.isprintable())
        headers["x-tandem-ignored"] = ", ".join(names)[:1024]
    return headers
