"""A reverse proxy that records what passes between clients and the server.

A client's base URL is ``http://127.0.0.1:PORT/at/CHECK`` (``.../v1`` for OpenAI's clients). ``GET /recorded/CHECK``
returns the exchanges of that check as JSON and forgets them: method, path, request body, whether Anthropic's client
sent it, status, headers, the response's body, the count of pieces in which it arrived, whether the connection broke
before its end, and whether the client left before it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
_NO_LIMIT = aiohttp.ClientTimeout(total=None)


class Recorder:
    """Forwards to ``upstream`` and keeps the exchanges of each check."""

    def __init__(self, upstream: str, session: aiohttp.ClientSession) -> None:
        self._upstream, self._session = upstream, session
        self._exchanges: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    async def recorded(self, request: web.Request) -> web.Response:
        return web.json_response(self._exchanges.pop(request.match_info["check"], []))

    async def forward(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.rel_url.raw_path.split("/", 3)[3]
        sent = await request.read()
        kept: dict[str, Any] = {
            "method": request.method,
            "path": path,
            "request": sent.decode(),
            "anthropic": "anthropic-version" in request.headers,
            "broken": False,
            "left": True,
        }
        self._exchanges[request.match_info["check"]].append(kept)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = (
            self._upstream + path + (f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else "")
        )
        async with self._session.request(request.method, url, data=sent or None, headers=headers) as response:
            kept |= {
                "status": response.status,
                "headers": {name.lower(): value for name, value in response.headers.items()},
            }
            answer = web.StreamResponse(status=response.status)
            for name, value in response.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    answer.headers.add(name, value)
            await answer.prepare(request)
            pieces: list[bytes] = []
            try:
                async for piece in response.content.iter_any():
                    pieces.append(piece)
                    await answer.write(piece)
            except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
                kept["broken"] = True
            else:
                kept["left"] = False
            finally:
                kept |= {"body": b"".join(pieces).decode(errors="replace"), "pieces": len(pieces)}
            if kept["broken"] and request.transport is not None:
                request.transport.abort()
            else:
                await answer.write_eof()
            return answer


@asynccontextmanager
async def recording(upstream: str) -> AsyncIterator[str]:
    """Run a recorder before ``upstream``; yield its URL."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=_NO_LIMIT, auto_decompress=False) as session:
        recorder = Recorder(upstream, session)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/recorded/{check}", recorder.recorded)
        app.router.add_route("*", "/at/{check}/{rest:.*}", recorder.forward)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def _main(upstream: str) -> None:
    async with recording(upstream) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    import sys

    asyncio.run(_main(sys.argv[1]))
