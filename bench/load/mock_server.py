"""``tandem bench mock-server``: a server that answers on a scripted schedule, to check load generators with.

It serves OpenAI's completions and chat endpoints, streaming only, without a model: request i receives its chunks, one
word each, at the times of script i. ``GET /truth`` returns the times at which chunks were actually written, which a
client on the same machine must measure; ``GET /asked`` returns the headers and bodies of all requests. One token id is
one byte of text.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from common.config.bench.mock_server import BenchMockServerConfig

MODEL = "scripted"
MODEL_LEN = 1 << 20


@dataclass(frozen=True)
class Script:
    """A schedule of chunks: the first is sent ``ttft_s`` after the request arrives, the others ``gap_s`` apart."""

    ttft_s: float
    gap_s: float

    def moments(self, tokens: int) -> Iterator[float]:
        """Yield the send time of each of ``tokens`` chunks, in seconds after the request arrived."""
        return (self.ttft_s + index * self.gap_s for index in range(tokens))


@dataclass
class Said:
    """The times at which the chunks of one request were written, in seconds after its arrival."""

    moments: list[float] = field(default_factory=list)


SCRIPTS = tuple(Script(0.4 + 0.1 * index, 0.02 + 0.005 * index) for index in range(5))

Sleep = Callable[[float], Awaitable[None]]


class MockServer:
    """The scripted server. Tests pass their own ``clock`` and ``sleep``.

    With ``role_first``, a chat begins with a chunk that has only a role, as with vLLM. With ``refuse_every`` n, every
    n-th request is answered with 503. ``cached_tokens`` is reported as the prompt tokens found in the prefix cache."""

    def __init__(
        self,
        scripts: Sequence[Script] = SCRIPTS,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Sleep = asyncio.sleep,
        role_first: bool = False,
        refuse_every: int = 0,
        cached_tokens: int | None = None,
    ) -> None:
        self._scripts = itertools.cycle(scripts)
        self._clock, self._sleep, self._role_first, self._refuse_every = clock, sleep, role_first, refuse_every
        self._details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
        self._asked = 0
        self.said: list[Said] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def app(self) -> web.Application:
        """Return a new application with all endpoints, which records requests in this object."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/truth", self._truth)
        app.router.add_get("/asked", self._asked_for)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        came_at = self._clock()
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self._asked += 1
        if self._refuse_every and self._asked % self._refuse_every == 0:
            error = {"message": "too much", "type": "server_error", "param": None, "code": "server_is_overloaded"}
            return web.json_response({"error": error}, status=503)
        chat = "messages" in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if chat and self._role_first:
            await response.write(_event(_chat({"role": "assistant", "content": ""})))
        said = Said()
        tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        for moment in next(self._scripts).moments(tokens):
            if (left := came_at + moment - self._clock()) > 0:
                await self._sleep(left)
            said.moments.append(self._clock() - came_at)
            await response.write(_event(_chat({"content": "word "}) if chat else _text("word ")))
        self.said.append(said)
        await response.write(_event(_chat({}, "length") if chat else _text("", "length")))
        prompt = _prompt_tokens(body)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
            "prompt_tokens_details": self._details,
        }  # fmt: skip
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "owned_by": "bench", "root": MODEL, "max_model_len": MODEL_LEN}
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = list((await request.json())["prompt"].encode())
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": MODEL_LEN})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": bytes((await request.json())["tokens"]).decode(errors="replace")})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _truth(self, _: web.Request) -> web.Response:
        return web.json_response([said.moments for said in self.said])

    async def _asked_for(self, _: web.Request) -> web.Response:
        return web.json_response([list(each) for each in zip(self.headers, self.bodies, strict=True)])


def _prompt_tokens(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    if prompt is None:
        prompt = json.dumps(body["messages"])
    return len(prompt) if isinstance(prompt, list) else len(prompt.encode())


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"model": MODEL, **chunk}).encode() + b"\n\n"


def _chat(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def _text(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def run(config: BenchMockServerConfig) -> int:
    """Serve on loopback until interrupted, and print the URL."""
    asyncio.run(serve(MockServer(role_first=config.role_first), config.port))
    return 0


async def serve(server: MockServer, port: int) -> None:
    """Serve on loopback until cancelled, and print the URL."""
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
