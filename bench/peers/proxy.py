"""One address in front of a prefill and a decode server of vLLM; :mod:`bench.peers.vllm` starts it as a process.

vLLM leaves the hand-off to the client. It sends the prompt to the prefill server and asks for one token and for KV that
is kept. The answer says where the KV is. The client then sends the same request, with that place, to the decode server,
whose stream is the answer. Everything else (models, tokenizer) is passed to the decode server. The proxy does no more
than that, because it is measured as part of vLLM.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

MAX_BODY_BYTES = 64 << 20
KEPT_S = 2.0
"""Seconds that an idle connection is kept: vLLM's server closes one after 5 s, even if a request is on its way."""
_WHOLE_ANSWER = ("stream", "stream_options", "max_completion_tokens", "min_tokens")
"""Fields that describe how an answer is returned; prefill returns none."""
_STAYS: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request to the prefill server: one token, and KV that is kept until it is fetched."""
    rest = {name: value for name, value in body.items() if name not in _WHOLE_ANSWER}
    return rest | {"max_tokens": 1, "stream": False, "kv_transfer_params": _STAYS}


class Proxy:
    """The application in front of the servers at two URLs."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill.rstrip("/"), decode.rstrip("/")
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """Return the application; its HTTP session to the servers lives as long as it runs."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._sessions)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _sessions(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        headers = {"X-Request-Id": uuid.uuid4().hex}  # identifies the request on both servers
        ask = for_prefill(body)
        async with self._session.post(self._prefill + request.path, json=ask, headers=headers) as built:
            if built.status != 200:
                return await _whole(built)
            place = (await built.json()).get("kv_transfer_params")
        ask = body | {"kv_transfer_params": place}
        async with self._session.post(self._decode + request.path, json=ask, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            return response

    async def _pass_on(self, request: web.Request) -> web.Response:
        data = await request.read()
        headers = {"Content-Type": request.content_type} if data else {}
        url = self._decode + request.path_qs
        async with self._session.request(request.method, url, data=data or None, headers=headers) as answer:
            return await _whole(answer)


async def _whole(answer: aiohttp.ClientResponse) -> web.Response:
    return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)


def main() -> None:
    """Serve on loopback until the process is ended. Arguments of the command line: port, URL of prefill, URL of
    decode."""
    port, prefill, decode = sys.argv[1:]
    web.run_app(
        Proxy(prefill, decode).app(), host="127.0.0.1", port=int(port), print=None, loop=uvloop.new_event_loop()
    )


if __name__ == "__main__":
    main()
