"""Endpoints that do not generate text: front page, models, tokenize and detokenize, health, metrics."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from aiohttp import web

from common.core.errors import RequestError
from common.core.request import MAX_TOKENS
from coordinator.api.delta_encoder import encode
from coordinator.api.fields import Fields, JsonBudget, refuse
from coordinator.api.openai import MAX_TOKEN_ID, token_ids
from coordinator.api.service import ServedModel, product_version
from coordinator.http.context import SERVICES, Services, deliver_whole, read_body
from coordinator.http.middleware import json_response
from coordinator.requests.spec import ChatBody, Json
from coordinator.text.tokenizer import ChatText

routes = web.RouteTableDef()

_ANTHROPIC = "anthropic-version"
"""The header by which Anthropic's clients are known."""


# -- front page -------------------------------------------------------------------------------------------------------


@routes.get("/")
async def front(request: web.Request) -> web.Response:
    """Show the model and all endpoints, as HTML if the client accepts it (a browser), else as JSON."""
    services = request.app[SERVICES]
    found = [(route.method, route.resource.canonical) for route in request.app.router.routes() if route.resource]
    endpoints = sorted({(path, method) for method, path in found if method != "HEAD" and not path.endswith("/")})
    headers = {"Vary": "Accept"}
    if "text/html" in request.headers.get("Accept", ""):
        page = _front_page(services.model.name, endpoints)
        return web.Response(text=page, content_type="text/html", headers=headers)
    shown: Json = {
        "server": "tandem",
        "version": product_version(),
        "model": services.model.name,
        "endpoints": [f"{method} {path}" for path, method in endpoints],
    }
    return json_response(shown, headers=headers)


def _front_page(model: str, endpoints: Iterable[tuple[str, str]]) -> str:
    """Return the HTML front page. Endpoints with GET and a fixed path are links, all relative: a proxy may serve the
    page under a path."""
    items = []
    for path, method in endpoints:
        linked = method == "GET" and "{" not in path
        items.append(
            f"<li>{method} " + (f'<a href="{path.removeprefix("/")}">{path}</a>' if linked else path) + "</li>"
        )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Tandem</title>',
            f"<h1>Tandem {html.escape(product_version())} serves {html.escape(model)}</h1>",
            '<p><a href="ui">Chat, watch the workers, and see where the time of each request went</a></p>',
            "<ul>", *items, "</ul></html>\n",
        ]
    )  # fmt: skip


@routes.get("/openapi.json")
async def openapi(request: web.Request) -> web.StreamResponse:
    """Describe all endpoints in OpenAPI 3.1."""
    model = request.app[SERVICES].model
    response = web.Response(body=_openapi(model.name, model.checkpoint.vocab_size), content_type="application/json")
    return await deliver_whole(request, response)


@functools.lru_cache(maxsize=4)
def _openapi(model: str, vocabulary: int) -> bytes:
    """Return the description, in which the only value of the field ``model`` is ``model``, and token ids are below
    ``vocabulary``."""
    described = msgspec.json.decode((Path(__file__).parent / "openapi.json").read_bytes())
    for methods in described["paths"].values():
        for operation in methods.values():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if (field := schema.get("properties", {}).get("model")) is not None:
                field["enum"] = [model] if field["type"] == "string" else [model, None]
            _bound_tokens(schema, vocabulary - 1)
    return encode(described)


def _bound_tokens(schema: object, most: int) -> None:
    """Replace the maximum of all token ids in ``schema`` by ``most``."""
    if isinstance(schema, list):
        for each in schema:
            _bound_tokens(each, most)
    elif isinstance(schema, dict):
        if schema.get("maximum") == MAX_TOKEN_ID:
            schema["maximum"] = most
        for each in schema.values():
            _bound_tokens(each, most)


@routes.get("/docs")
async def docs(request: web.Request) -> web.StreamResponse:
    """Show all endpoints and the fields of their bodies as one HTML page that loads nothing else."""
    page = _docs_page("../" if request.path.endswith("/") else "")
    return await deliver_whole(request, web.Response(text=page, content_type="text/html"))


@functools.cache
def _docs_page(root: str) -> str:
    """Return the HTML page of all endpoints; ``root`` is the relative address of the server's root."""
    described = msgspec.json.decode(_openapi("", MAX_TOKEN_ID))
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Tandem API</title>',
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:2px 12px 2px 0;"
        "vertical-align:top}</style>",
        f"<h1>Tandem {html.escape(product_version())}</h1>",
        f'<p>The same for programs: <a href="{root}openapi.json">/openapi.json</a></p>',
    ]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                fields = [(name, field.get("description", "")) for name, field in schema["properties"].items()]
                cells = [(html.escape(name), html.escape(words)) for name, words in fields]
                rows = [f"<tr><td><code>{name}</code></td><td>{words}</td></tr>" for name, words in cells]
                parts += ["<table>", *rows, "</table>"]
    return "\n".join([*parts, "</html>\n"])


# -- models -----------------------------------------------------------------------------------------------------------


def _model(request: web.Request) -> Json:
    """Return the description of the served model, in Anthropic's form for its clients, otherwise in OpenAI's."""
    model = request.app[SERVICES].model
    if _ANTHROPIC in request.headers:
        return {
            "id": model.name,
            "type": "model",
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": model.context_length,
            "max_tokens": model.context_length,
        }
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "max_model_len": model.context_length,
    }


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """List the served model. The header ``anthropic-version`` asks for Anthropic's form."""
    model = _model(request)
    if _ANTHROPIC in request.headers:
        return json_response({"data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]})
    return json_response({"object": "list", "data": [model]})


@routes.get("/v1/models/{id:.+}")
async def model(request: web.Request) -> web.Response:
    """Describe the served model; 404 for another name. The header ``anthropic-version`` asks for Anthropic's form."""
    request.app[SERVICES].model.check_name(request.match_info["id"].removesuffix("/"))
    return json_response(_model(request))


# -- tokens -----------------------------------------------------------------------------------------------------------


@routes.post("/tokenize")
@routes.post("/v1/tokenize")
async def tokenize(request: web.Request) -> web.StreamResponse:
    """Tokenize a prompt or messages. The request and the response have the format of vLLM's ``/tokenize``."""
    return await deliver_whole(request, await _tokenized(request))


async def _tokenized(request: web.Request) -> web.Response:
    model = request.app[SERVICES].model

    def read(body: Json, budget: JsonBudget) -> _Asked:
        fields = Fields(body)
        model.check_name(fields.string("model", limit=1024))
        strings, special = fields.boolean("return_token_strs", False), fields.boolean("add_special_tokens", True)
        prompt = fields.string("prompt", limit=1 << 26)
        if fields.has("messages"):
            if prompt is not None:
                refuse("'prompt' and 'messages' exclude each other.", "prompt")
            return _Asked(model.chat_text(_as_chat(body, budget, model)), True, strings)
        if prompt is None:
            fields.missing("prompt")
        model.check_chars(len(prompt), "prompt")
        return _Asked(prompt, special, strings)

    asked = await read_body(request, read, templated=True)
    tokens = await model.counted(asked.prompt, asked.add_special_tokens)
    shown: Json = {"count": len(tokens), "max_model_len": model.context_length, "tokens": tokens}
    if asked.strings:
        shown["token_strs"] = await model.run(len(tokens), lambda: list(map(model.text.token_text, tokens)))
    return json_response(shown)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A validated body of POST /tokenize."""

    prompt: str | ChatText
    add_special_tokens: bool
    strings: bool


_TEMPLATED = (
    *("model", "messages", "tools", "tool_choice", "documents", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Fields of a chat request that its prompt depends on."""


def _as_chat(body: Json, budget: JsonBudget, model: ServedModel) -> ChatBody:
    return model.parse_chat({name: body[name] for name in _TEMPLATED if name in body}, budget)


@routes.post("/detokenize")
@routes.post("/v1/detokenize")
async def detokenize(request: web.Request) -> web.StreamResponse:
    """Return the text of ``tokens``, at most as many as the context length."""
    return await deliver_whole(request, await _detokenized(request))


async def _detokenized(request: web.Request) -> web.Response:
    model = request.app[SERVICES].model

    def read(body: Json, _: JsonBudget) -> list[int]:
        fields = Fields(body)
        model.check_name(fields.string("model", limit=1024))
        given = fields.array("tokens", MAX_TOKENS)
        if given is None:
            fields.missing("tokens")
        tokens = token_ids(given, "tokens", model.context_length) if given else []
        model.check_detokenized(tokens)
        return tokens

    tokens = await read_body(request, read)
    text = await model.run(len(tokens), lambda: model.text.decode(tokens, skip_special_tokens=False))
    return json_response({"prompt": text})


# -- state ------------------------------------------------------------------------------------------------------------


@routes.get("/health")
@routes.get("/ping")
async def health(request: web.Request) -> web.Response:
    """Answer 200 while the coordinator runs."""
    return json_response({"status": "ok"})


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """Answer 200 if a request could be served now and every configured worker has joined at least once, else 503."""
    services = request.app[SERVICES]
    reason = not_ready(services)
    if reason is None:
        return json_response({"status": "ready"})
    raise RequestError(reason, status=503, type="server_error", code="not_ready", retry_after_s=1.0)


def not_ready(services: Services) -> str | None:
    """Return why no request could be served now, or which workers have never joined; None if GET /ready answers 200."""
    if services.dispatcher.draining or services.dispatcher.leaving:
        return "The server is shutting down."
    config, registry = services.config, services.registry
    wanted = registry.expected
    for role, seen in registry.seen.items():
        if len(seen) < wanted[role]:
            return f"{len(seen)} of {wanted[role]} {role} workers have joined."
    if registry.ready("colocated"):
        return None
    if not registry.ready("decode"):
        return "No decode worker is ready."
    needs_prefill = config.local_prefill != "always" and config.no_prefill_policy != "local"
    if needs_prefill and not registry.ready("prefill"):
        return "No prefill worker is ready."
    return None


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.StreamResponse:
    """Show all metrics in Prometheus' text format."""
    page = request.app[SERVICES].metrics.page()
    response = web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
    return await deliver_whole(request, response)


@routes.get("/version")
async def version(request: web.Request) -> web.Response:
    """Return Tandem's version."""
    return json_response({"version": product_version()})
