"""A coordinator in the test's event loop with fake workers around it, and a client that reads streams."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from common.config.coordinator import CoordinatorConfig
from common.core.ids import TransferId
from common.core.request import Request
from common.net.messages import Prefill, Role
from coordinator.app import SERVICES, create_app
from coordinator.http.application import serving
from coordinator.http.context import Services
from coordinator.requests.dispatcher import Dispatcher
from tests.fakes.checkpoint import EOS
from tests.fakes.worker import FakeWorker
from tests.pace import scaled

_SCHEMAS = Path(__file__).parents[2] / "golden" / "openai_schemas.json"


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    schemas = json.loads(_SCHEMAS.read_text())
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **schemas})


def valid(name: str, body: Any) -> Any:
    """Return ``body`` after checking it against OpenAI's schema ``name``."""
    _validator(name).validate(body)
    return body


async def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Wait until another thread or task has made ``condition`` true."""
    async with asyncio.timeout(scaled(seconds)):
        while not condition():  # noqa: ASYNC110 - what is waited for knows no event loop
            await asyncio.sleep(0.005)
    assert condition(), what


@dataclass
class FakeCluster:
    """A running coordinator (``url``), its parts, and its fake workers."""

    services: Services
    url: str
    client: aiohttp.ClientSession
    workers: list[FakeWorker] = field(default_factory=list)
    handed_off: set[TransferId] = field(default_factory=set)

    @property
    def dispatcher(self) -> Dispatcher:
        return self.services.dispatcher

    async def add(self, role: Role, **options: Any) -> FakeWorker:
        name = options.pop("name", f"{role}-{len(self.workers)}")
        address, fingerprint = self.dispatcher.gateway.address, self.services.model.checkpoint.fingerprint
        options = {"fingerprint": fingerprint, "handed_off": self.handed_off, **options}
        worker = FakeWorker(role, address, name=name, **options).start()
        self.workers.append(worker)
        await until(worker.joined.is_set, f"{name} joins")
        return worker

    async def post(self, path: str, body: Any, **options: Any) -> tuple[aiohttp.ClientResponse, Any]:
        """Post ``body``; return the response and its JSON body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(f"{self.url}{path}", data=io.BytesIO(data), **options) as response:
            return response, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[aiohttp.ClientResponse, Any]:
        async with self.client.get(f"{self.url}{path}", **options) as response:
            return response, await response.json()

    async def stream(self, path: str, body: Any) -> tuple[aiohttp.ClientResponse, list[Any]]:
        """Post ``body`` as a stream; return the response and its events. The last event must be [DONE]."""
        async with self.client.post(f"{self.url}{path}", json={**body, "stream": True}) as response:
            assert response.content_type == "text/event-stream", await response.text()
            text = await response.text()
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and text.endswith("data: [DONE]\n\n")
        return response, [json.loads(event) for event in events[:-1]]

    async def idle(self) -> None:
        """Wait until nothing is left: no request, no promise, and no work on any living worker."""
        await until(lambda: not self.dispatcher.records, "all requests end")
        assert self.dispatcher.admission.requests == self.dispatcher.admission.tokens == 0
        for account in self.dispatcher.router.accounts.values():
            assert (account.blocks, account.sequences, account.prefill_tokens, account.streams) == (0, 0, 0, 0)
        await until(lambda: not any(worker.busy for worker in self.workers if worker.alive), "workers are idle")


@contextlib.asynccontextmanager
async def open_cluster(model: Path, *roles: Role, **options: Any) -> AsyncIterator[FakeCluster]:
    """Run a coordinator with one fake worker per role; everything must be idle at the end."""
    config = CoordinatorConfig(**{"model": str(model), "served_model_name": "tiny", "control_port": 0, **options})
    async with create_app(config) as app:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving(app, listener), aiohttp.ClientSession(auto_decompress=False) as client:
            cluster = FakeCluster(app[SERVICES], url, client)
            try:
                for role in roles:
                    await cluster.add(role)
                yield cluster
                await cluster.idle()
            finally:
                for worker in cluster.workers:
                    worker.stop()


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def letters(text: str) -> Any:
    """Return a script that produces ``text``, one token per byte, and then ends."""
    from coordinator.text.tokenizer import _BYTE_OF

    byte_tokens = {value: index for index, value in enumerate(sorted(_BYTE_OF), start=8)}
    chars = {byte: char for char, byte in _BYTE_OF.items()}
    ids = [byte_tokens[chars[byte]] for byte in text.encode()]

    def script(request: Request, choice: int, position: int) -> int:
        return ids[position] if position < len(ids) else EOS

    return script


async def prefilled(cluster: FakeCluster, count: int) -> list[Request]:
    """Wait until the first worker has got ``count`` requests; return them. Decode may get its message earlier."""
    worker = cluster.workers[0]
    await until(lambda: len(worker.got(Prefill)) == count, f"prefill has {count} requests")
    return [sent.request for sent in worker.got(Prefill)]


def chat_of(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


class HeldTokenizer:
    """A tokenizer whose tokens are held back until ``go_on`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()
        self._slices = cluster.services.model.text.slices
        monkeypatch.setattr(cluster.services.model.text, "slices", self)

    def __call__(self, text: str, **_: Any) -> Iterator[list[int]]:
        for part in self._slices(text):
            self.begun.append(text)
            self.go_on.wait()
            yield part


def _narrow(port: int) -> socket.socket:
    """Return a connection with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    return connection


async def _ask_and_read_no_more(
    cluster: FakeCluster, asked: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and read nothing, with buffers so small that the server notices soon."""
    body = json.dumps(asked)
    connection = _narrow(int(cluster.url.rsplit(":", 1)[1]))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return reader, writer
