"""The endpoints of Anthropic's Messages API. The middleware gives their errors Anthropic's form."""

from __future__ import annotations

import time
from dataclasses import replace

from aiohttp import web

from coordinator.api.anthropic import omits_thinking, parse_messages
from coordinator.api.anthropic_encoder import MessagesShape
from coordinator.api.fields import JsonBudget
from coordinator.http.answer import EXTRA_HEADERS, new_head, refuse_when_draining
from coordinator.http.chats import ChatRequest, answer_chat, read_chat
from coordinator.http.context import SERVICES, read_body
from coordinator.http.middleware import ANTHROPIC_REQUEST_ID, REQUEST_ID, json_response
from coordinator.requests.spec import Json
from coordinator.text.tokenizer import ChatText

routes = web.RouteTableDef()


@routes.post("/v1/messages")
async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a chat in the form of Anthropic's Messages API, as a whole or as its events."""
    arrived_at = time.monotonic()
    services = request.app[SERVICES]
    refuse_when_draining(services)
    model = services.model

    def read(fields: Json, budget: JsonBudget) -> tuple[ChatRequest, bool]:
        body = parse_messages(fields, budget, arguments_as_text=model.arguments_as_text)
        if body.max_reasoning_tokens is not None and not model.text.output.reads_reasoning:
            # there is nothing to bound; clients ask every model to think
            ignored = (*body.options.ignored, body.max_reasoning_param)
            body = replace(body, max_reasoning_tokens=None, options=replace(body.options, ignored=ignored))
        return read_chat(model, body, "messages"), omits_thinking(fields)

    chat, omits = await read_body(request, read, templated=True)
    chat.capped = True  # clients must send max_tokens, and most send more than small models can hold
    request[EXTRA_HEADERS] = {ANTHROPIC_REQUEST_ID: request[REQUEST_ID]}
    most = chat.options.sampling.max_tokens or 0
    shape = MessagesShape(new_head("msg_", model), most, omits_thinking=omits)
    return await answer_chat(request, arrived_at, chat, "messages", shape)


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of the prompt that POST ``/v1/messages`` would make of the same body."""
    model = request.app[SERVICES].model

    def read(fields: Json, budget: JsonBudget) -> ChatText:
        body = parse_messages(fields, budget, arguments_as_text=model.arguments_as_text, counting=True)
        model.check_name(body.options.model)
        return model.chat_text(body)

    text = await read_body(request, read, templated=True)
    return json_response({"input_tokens": len(await model.counted(text))})
