"""The endpoints of OpenAI's chat and text completions.

:mod:`coordinator.api.openai` parses their bodies, :mod:`coordinator.api.response_encoder` encodes their responses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from coordinator.api.fields import JsonBudget
from coordinator.api.openai import parse_completion
from coordinator.api.response_encoder import ChatShape, CompletionShape
from coordinator.api.service import ServedModel
from coordinator.grammar.requests import GrammarRequest, for_completion
from coordinator.http.answer import answer, compiled, new_head, refuse_when_draining
from coordinator.http.chats import ChatRequest, answer_chat, read_chat
from coordinator.http.context import SERVICES, read_body
from coordinator.requests.spec import CompletionBody, Json

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat, as a whole or as server-sent events."""
    arrived_at = time.monotonic()
    services = request.app[SERVICES]
    refuse_when_draining(services)
    model = services.model

    def read(fields: Json, budget: JsonBudget) -> ChatRequest:
        return read_chat(model, model.parse_chat(fields, budget), "messages")

    chat = await read_body(request, read, templated=True)
    shape = ChatShape(new_head("chatcmpl-", model), chat.options, model.token_names(chat.options))
    return await answer_chat(request, arrived_at, chat, "messages", shape)


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete text or token ids, up to 64 prompts in one request."""
    arrived_at = time.monotonic()
    services = request.app[SERVICES]
    refuse_when_draining(services)
    model = services.model
    context_length = model.context_length

    def read(fields: Json, _: JsonBudget) -> tuple[CompletionBody, GrammarRequest | None]:
        body = parse_completion(fields, context_length)
        model.check_name(body.options.model)
        model.check_ignored(body.options)
        model.check_prompts(body.prompts, body.options)
        model.check_repeats(body, body.prompts)
        return body, for_completion(body.options)

    body, wanted = await read_body(request, read)
    options = body.options
    grammar = (await compiled(request, model, wanted)).text
    del wanted
    prompts = await model.text_prompts(body.prompts, options)
    if options.return_token_ids:
        model.check_repeats(replace(body, echo=False), prompts)
    echoes = await _echoes(model, body, prompts) if body.echo else []
    del body  # release its memory: the answer may take long
    shape = CompletionShape(new_head("cmpl-", model), options, model.token_names(options), echoes)
    return await answer(request, arrived_at, prompts, "prompt", options, shape, grammar, continues=True, echoes=echoes)


async def _echoes(model: ServedModel, body: CompletionBody, prompts: Sequence[list[int]]) -> list[str]:
    """Return the prompt text with which each choice begins (``echo``)."""
    given: Sequence[str | list[int]] = body.prompts if body.options.truncate_prompt is None else prompts
    texts = await model.run(
        sum(map(len, prompts)),
        lambda: [each if isinstance(each, str) else model.text.decode_prompt(each) for each in given],
    )
    return [text for text in texts for _ in range(body.options.n)]
