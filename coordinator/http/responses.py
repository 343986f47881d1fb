"""The endpoints of OpenAI's Responses API, served without state."""

from __future__ import annotations

import time
from typing import NoReturn

import msgspec
from aiohttp import web

from common.core.errors import RequestError
from coordinator.api.delta_encoder import encode
from coordinator.api.fields import JsonBudget
from coordinator.api.responses import parse_responses
from coordinator.api.responses_encoder import ResponsesShape
from coordinator.http.answer import new_head, refuse_when_draining
from coordinator.http.chats import ChatRequest, answer_chat, read_chat
from coordinator.http.context import SERVICES, read_body
from coordinator.http.middleware import json_response
from coordinator.requests.spec import Json
from coordinator.text.tokenizer import ChatText

routes = web.RouteTableDef()

_ECHOED = ("temperature", "top_p")
"""Sampling fields of the answer, with the values that took effect."""


@routes.post("/v1/responses")
async def responses(request: web.Request) -> web.StreamResponse:
    """Answer items in the form of OpenAI's Responses API, as a whole or as its events. Nothing is stored."""
    arrived_at = time.monotonic()
    services = request.app[SERVICES]
    refuse_when_draining(services)
    model = services.model

    def read(fields: Json, budget: JsonBudget) -> tuple[ChatRequest, dict[str, msgspec.Raw], bool]:
        body = parse_responses(fields, budget, model.check_chars, arguments_as_text=model.arguments_as_text)
        return read_chat(model, body.chat, "input"), body.echo, body.summary

    chat, echo, summary = await read_body(request, read, templated=True)
    for name in _ECHOED:
        given = getattr(chat.options.sampling, name)
        echo[name] = msgspec.Raw(encode(float(model.rules.defaults[name] if given is None else given)))
    shape = ResponsesShape(new_head("resp_", model), echo, model.token_names(chat.options), summary=summary)
    return await answer_chat(request, arrived_at, chat, "input", shape)


@routes.post("/v1/responses/input_tokens")
async def input_tokens(request: web.Request) -> web.Response:
    """Count the tokens of the prompt that POST ``/v1/responses`` would make of the same body."""
    model = request.app[SERVICES].model

    def read(fields: Json, budget: JsonBudget) -> ChatText:
        body = parse_responses(fields, budget, model.check_chars, arguments_as_text=model.arguments_as_text)
        model.check_name(body.chat.options.model)
        return model.chat_text(body.chat, "input")

    text = await read_body(request, read, templated=True)
    return json_response({"object": "response.input_tokens", "input_tokens": len(await model.counted(text))})


@routes.get("/v1/responses/{id}")
@routes.delete("/v1/responses/{id}")
@routes.post("/v1/responses/{id}/cancel")
@routes.get("/v1/responses/{id}/input_items")
async def stored_response(request: web.Request) -> NoReturn:
    """Answer 404: no response is stored."""
    raise RequestError(
        "This server stores no responses: send the whole conversation as 'input' of POST /v1/responses.",
        status=404,
        param="response_id",
        code="not_found",
    )
