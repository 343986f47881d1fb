"""The endpoints that generate text.

Owns the path of one HTTP request: body, prompts, records, reply. :mod:`coordinator.api.openai` parses the body,
:mod:`coordinator.api.response_encoder` encodes the response.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from aiohttp import web

from common.core.ids import new_request_id, pack_tokens
from common.core.request import SamplingParams
from coordinator.api.fields import JsonBudget
from coordinator.api.openai import parse_completion
from coordinator.api.parsed_choice import OutputReading, ParsedChoice
from coordinator.api.prompt_report import PromptReport
from coordinator.api.response_encoder import ChatShape, Choice, CompletionShape, Head, Shape
from coordinator.api.service import ServedModel
from coordinator.grammar.requests import GrammarRequest, for_completion
from coordinator.http.context import SERVICES, Services, deliver_whole, read_body, read_timeout
from coordinator.http.middleware import REQUEST_ID, WRITTEN, json_response
from coordinator.http.reply import Reply, StreamReply, WholeReply
from coordinator.http.sse import KEEPALIVE_S, EventStream
from coordinator.requests.errors import shutting_down
from coordinator.requests.record import RequestRecord
from coordinator.requests.spec import CompletionBody, Json, Options
from coordinator.routing.router import Chains
from coordinator.text.tokenizer import ChatText, StopStrings

routes = web.RouteTableDef()

RETRY_COUNT = "x-stainless-retry-count"
"""Request header with the number of earlier attempts, sent by clients such as those of OpenAI and Anthropic."""
EXTRA_HEADERS = web.RequestKey("extra headers", dict[str, str])
"""Headers of the response that depend on the request alone."""
UNPARSED_TOOLS = {"x-tandem-tools": "unparsed"}
"""Header of an answer that may have tool calls in its content, because the model's way to write them is not known."""


class ChatRequest(NamedTuple):
    """A chat as it was read. ``reading``: how outputs are parsed. ``unparsed``: whether calls stay in the content.
    ``grammar``: what the grammar of outputs depends on."""

    options: Options
    text: ChatText
    reading: OutputReading | None
    unparsed: bool
    grammar: GrammarRequest | None


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat, as a whole or as server-sent events."""
    arrived_at = time.monotonic()
    services = request.app[SERVICES]
    _refuse_when_draining(services)
    model = services.model

    def read(fields: Json, budget: JsonBudget) -> ChatRequest:
        body = model.parse_chat(fields, budget)
        text = model.chat_text(body)
        unparsed = body.tool_use is not None and not model.text.output.reads_calls
        return ChatRequest(body.options, text, model.reading(body, text), unparsed, model.chat_grammar(body, text))

    options, text, reading, unparsed, wanted = await read_body(request, read, templated=True)
    if unparsed:
        request[EXTRA_HEADERS] = UNPARSED_TOOLS
    grammar = await model.grammar(wanted)
    del wanted
    prompts = [await model.chat_prompt(text)]
    del text  # release its memory: the answer may take long
    shape = ChatShape(_head("chatcmpl", model), options, model.text)
    return await _answer(request, arrived_at, prompts, "messages", options, shape, grammar, reading)


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete text or token ids, up to 64 prompts in one request."""
    arrived_at = time.monotonic()
    services = request.app[SERVICES]
    _refuse_when_draining(services)
    model = services.model
    context_length = model.context_length

    def read(fields: Json, _: JsonBudget) -> tuple[CompletionBody, GrammarRequest | None]:
        body = parse_completion(fields, context_length)
        model.check_name(body.options.model)
        model.check_prompts(body.prompts)
        model.check_repeats(body, body.prompts)
        return body, for_completion(body.options)

    body, wanted = await read_body(request, read)
    options = body.options
    grammar = await model.grammar(wanted)
    del wanted
    prompts = await model.text_prompts(body.prompts)
    if options.return_token_ids:
        model.check_repeats(replace(body, echo=False), prompts)
    echoes = await _echoes(model, body, prompts) if body.echo else []
    del body  # release its memory: the answer may take long
    shape = CompletionShape(_head("cmpl", model), options, model.text, echoes)
    return await _answer(request, arrived_at, prompts, "prompt", options, shape, grammar, echoes=echoes)


async def _echoes(model: ServedModel, body: CompletionBody, prompts: Sequence[list[int]]) -> list[str]:
    """Return the prompt text with which each choice begins (``echo``)."""
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
    grammar: str,
    reading: OutputReading | None = None,
    echoes: Sequence[str] = (),
) -> web.StreamResponse:
    """Submit one record per prompt, all together, and return the response, whole or as a stream. ``grammar``: what each
    choice must match, "" for no constraint. ``reading``: how outputs are parsed, None if they are only text.
    ``echoes``: as for :class:`coordinator.api.response_encoder.CompletionShape`."""
    services = request.app[SERVICES]
    model = services.model
    stops = StopStrings(options.stop, options.include_stop) if options.stop else None

    reports: list[PromptReport] = []
    if options.sampling.prompt_logprobs is not None:
        texts: Sequence[str | None] = echoes[:: options.n] or [None] * len(prompts)
        pairs = zip(prompts, texts, strict=True)
        reports = [PromptReport(prompt, options, model.text, text) for prompt, text in pairs]

    def choice(index: int) -> Choice:
        prompt = prompts[index // options.n]
        if reading is None:
            made = Choice(index, prompt, options, model.text, stops)
        else:
            made = ParsedChoice(index, prompt, options, model.text, stops, reading)
        if reports:
            made.show_prompt(reports[index // options.n])
        return made

    reply = (StreamReply if options.stream else WholeReply)(options, shape, len(prompts) * options.n, choice)
    records = []
    for prompt in prompts:
        most_output = services.dispatcher.router.most_output(len(prompt), options.n)
        sampling = model.sampling(options, len(prompt), prompt_field, most_output, len(prompts) * options.n, grammar)
        packed = pack_tokens(prompt)
        # a prompt whose log-probabilities are requested is computed whole, whatever is cached
        scored = sampling.prompt_logprobs is not None
        chains = {} if scored else await model.prefix_chains(packed, options.cache_salt)
        records.append(_record(services, arrived_at, packed, sampling, chains, options, reply))
    reply.expect(records)
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
        open_ended=options.sampling.max_tokens is None,
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
    """Return the ``x-`` headers of a response. The path and the workers are those of the first record."""
    record = reply.records[0]
    headers = {
        "x-request-id": request[REQUEST_ID],
        "x-tandem-path": record.path,
    }
    headers |= request.get(EXTRA_HEADERS, {})
    if (placement := record.placement) is not None:
        headers["x-tandem-prefill"] = (placement.prefill or placement.decode).hello.name
        headers["x-tandem-decode"] = "none" if record.path == "prefill" else placement.decode.hello.name
    if reply.options.ignored:
        names = (name for name in reply.options.ignored if name.isascii() and name.isprintable())
        headers["x-tandem-ignored"] = ", ".join(names)[:1024]
    return headers
