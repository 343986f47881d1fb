"""A stand-in for the coordinator that the page cannot tell from it: the page's files, scripted answers, and the events
of a system that the test moves by hand. It makes states that a real system does not reach on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from coordinator.http.ui_files import POLICY

Json = dict[str, Any]
_FILES = Path(__file__).parents[2] / "coordinator" / "http" / "ui"


def worker_row(name: str, role: str, **changes: Any) -> Json:
    """Return a row of /admin/workers as events have it."""
    row = {
        "id": name, "role": role, "state": "ready", "pid": 4242, "host": "127.0.0.1", "model": "tiny", "block_size": 16,
        "running": 2, "waiting": 0, "waiting_tokens": 0, "turn_ms": None, "heard_ms": 12, "incarnation": f"{name}-a",
        "links": [], "transports": ["shm", "zmq"], "avoids": [], "device": "cpu", "dtype": "bfloat16", "gpus": [],
        "counters": {}, "kv_blocks": {"total": 600, "held": 150, "cached": 240, "free": 210},
    }  # fmt: skip
    return row | changes


def tail(p50: float | None) -> Json | None:
    """Return percentiles; None if there are none."""
    return None if p50 is None else {"p50": p50, "p90": 1.6 * p50, "p99": 3.1 * p50}


@dataclass
class StandIn:
    """The state that is sent. Tests change it and call ``push``."""

    url: str = ""
    key: str | None = None
    admin_key: str | None = None
    full: bool = False
    workers: list[Json] = field(
        default_factory=lambda: [worker_row("prefill-0", "prefill"), worker_row("decode-0", "decode")]
    )
    absent: list[Json] = field(default_factory=list)
    links: list[Json] = field(default_factory=lambda: [
        {"from": "prefill-0", "to": "decode-0", "transport": "shm", "mb_s": 1240.0, "ms": 0.9}
    ])  # fmt: skip
    requests: dict[str, Json] = field(default_factory=dict)
    history: list[Json] = field(default_factory=list)
    rates: Json = field(default_factory=lambda: {"requests_s": 3.2, "prompt_tokens_s": 810.0, "output_tokens_s": 246.0})
    ttft_ms: float | None = 41.0
    itl_ms: float | None = 9.2
    queue: Json = field(default_factory=lambda: {"requests": 0, "tokens": 0})
    answers: list[list[Json | str | float]] = field(default_factory=list)
    """What the next chats are answered: chunks, an event for a string, a pause for a number of seconds."""
    bodies: list[Json] = field(default_factory=list)
    """Bodies of POST requests, in order."""
    streams: set[asyncio.Queue[bytes]] = field(default_factory=set)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has left a chat before its end."""

    def system(self) -> Json:
        shown: Json = {
            "t": time.time(), "model": "tiny", "version": "0.1.0", "draining": False, "workers": self.workers,
            "absent": self.absent, "links": self.links, "running": 4, "queue": self.queue, "rates": self.rates,
            "ttft_ms": tail(self.ttft_ms), "itl_ms": tail(self.itl_ms),
        }  # fmt: skip
        return shown

    def push(self, kind: str = "system", data: Json | None = None) -> None:
        """Send an event to all open pages; without ``data`` a snapshot."""
        event = _event(kind, self.system() if data is None else data)
        for stream in self.streams:
            stream.put_nowait(event)

    def request(self, shown: Json) -> None:
        """Keep a request and send it as an event."""
        self.requests[shown["id"]] = shown
        self.push("request", shown)

    def break_off(self) -> None:
        """End all event streams."""
        for stream in self.streams:
            stream.put_nowait(b"")

    # -- the endpoints ------------------------------------------------------------------------------------------------

    def refusal(self, request: web.Request, *, admin: bool) -> web.Response | None:
        needed = (self.admin_key or self.key) if admin else self.key
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if needed is None or given == needed or (not admin and given == self.admin_key):
            return None
        if admin and given and given == self.key:
            return _error(403, "This API key does not give access to /admin.", "insufficient_permissions")
        text = "The API key is invalid." if given else "No API key was given."
        return _error(401, text, "invalid_api_key")

    async def files(self, request: web.Request) -> web.StreamResponse:
        path = _FILES / (request.match_info.get("file") or "index.html")
        types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
        headers = {"Content-Security-Policy": POLICY, "Content-Type": types[path.suffix]}
        return web.Response(body=path.read_bytes(), headers=headers)

    async def models(self, request: web.Request) -> web.StreamResponse:
        if refused := self.refusal(request, admin=False):
            return refused
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 2048}]})

    async def listed(self, request: web.Request) -> web.StreamResponse:
        if refused := self.refusal(request, admin=True):
            return refused
        newest = sorted(self.requests.values(), key=lambda each: -each["arrived"])[: int(request.query["limit"])]
        return web.json_response({"requests": [{k: v for k, v in each.items() if k != "spans"} for each in newest]})

    async def one(self, request: web.Request) -> web.StreamResponse:
        if refused := self.refusal(request, admin=True):
            return refused
        name = request.match_info["id"]
        found = next((each for each in self.requests.values() if name in (each["id"], each["request_id"])), None)
        return web.json_response(found) if found else _error(404, "There is no such request.", "not_found")

    async def rows(self, request: web.Request) -> web.StreamResponse:
        return self.refusal(request, admin=True) or web.json_response({"workers": self.workers, "absent": self.absent})

    async def act(self, request: web.Request) -> web.StreamResponse:
        if refused := self.refusal(request, admin=True):
            return refused
        body = await request.json()
        self.bodies.append({"path": request.path, **body})
        if request.path.endswith("drain"):
            return web.json_response({"worker": body["worker"], "timeout": body.get("timeout", 30)}, status=202)
        return web.json_response({"prefill": body["prefill"], "decode": body["decode"]})

    async def events(self, request: web.Request) -> web.StreamResponse:
        if refused := self.refusal(request, admin=True):
            return refused
        if self.full:
            return _error(429, "16 pages are open already.", "too_many_streams")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue = asyncio.Queue[bytes]()
        self.streams.add(queue)
        try:
            await response.write(_event("system", {**self.system(), "history": self.history, "worker_events": []}))
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), 1.0)
                except TimeoutError:
                    event = _event("system", self.system())
                if not event:
                    return response
                await response.write(event)
        finally:
            self.streams.discard(queue)

    async def measure(self, request: web.Request) -> web.StreamResponse:
        if refused := self.refusal(request, admin=True):
            return refused
        self.links = [{**link, "mb_s": 2 * link["mb_s"]} for link in self.links]
        self.push()
        return web.json_response({"links": self.links})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if refused := self.refusal(request, admin=False):
            return refused
        self.bodies.append(await request.json())
        headers = {"Content-Type": "text/event-stream", "x-tandem-prefill": "prefill-0", "x-tandem-decode": "decode-0"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            for each in self.answers.pop(0):
                if isinstance(each, float):
                    await asyncio.sleep(each)
                elif isinstance(each, str):
                    await response.write(f"data: {each}\n\n".encode())
                else:
                    await response.write(f"data: {json.dumps(each)}\n\n".encode())
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up.set()
            raise
        return response


def chunk(content: str | None = None, *, finish: str | None = None, logprobs: Json | None = None, **delta: Any) -> Json:
    """Return a chunk of a streamed chat completion."""
    if content is not None:
        delta["content"] = content
    choice: Json = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return {"id": "chatcmpl-stand-in", "object": "chat.completion.chunk", "choices": [choice]}


def _event(kind: str, data: Json) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _error(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


@contextlib.asynccontextmanager
async def standing_in() -> AsyncIterator[StandIn]:
    """Serve a stand-in on loopback."""
    state = StandIn()
    app = web.Application()
    app.router.add_get("/ui/", state.files)
    app.router.add_get("/ui/{file}", state.files)
    app.router.add_get("/v1/models", state.models)
    app.router.add_post("/v1/chat/completions", state.chat)
    app.router.add_get("/admin/requests", state.listed)
    app.router.add_get("/admin/requests/{id}", state.one)
    app.router.add_get("/admin/workers", state.rows)
    app.router.add_get("/admin/events", state.events)
    app.router.add_post("/admin/drain", state.act)
    app.router.add_post("/admin/scale", state.act)
    app.router.add_post("/admin/links", state.measure)
    async with TestServer(app) as server:
        state.url = f"http://127.0.0.1:{server.port}"
        try:
            yield state
        finally:
            state.break_off()
