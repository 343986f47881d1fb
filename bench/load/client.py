"""One request to an OpenAI-compatible server, and when each of its chunks came.

The client shares its cores with the server that it measures, so it does little per chunk: one typed decode, one
appended time. Everything else is derived afterwards (:mod:`bench.load.metrics`).

What counts: t0 is just before the request is sent. The first token is the first chunk with text: a chunk that only
names the role is none. After it every chunk is a token, but for those that only tell the end or the usage.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from bench.load.connections import Connector, StaleConnection
from bench.load.workloads import Ask

Backend = Literal["openai", "openai-chat"]
PATHS: dict[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
MAX_ERROR_CHARACTERS = 300
Clock = Callable[[], float]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    """Of a chunk, what is looked at."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    tandem: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """What came of one request. Times are seconds on the clock of the client; ``due_at`` is when it should have been
    sent, ``moments`` when each token's chunk came, ``cached_tokens`` of its prompt the server had from before, as far
    as it tells. ``error`` is empty if the answer is complete."""

    due_at: float
    prompt_tokens: int
    sent_at: float = 0.0
    moments: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    output_tokens: int = 0
    stages: dict[str, Any] | None = None
    error: str = ""
    cached_tokens: int = 0
    resent: bool = False
    """Whether it was sent a second time; all times count from the first."""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Time to the first token; 0 if there was none."""
        return self.moments[0] - self.sent_at if self.moments else 0.0

    @property
    def latency(self) -> float:
        """Time to the last token; 0 if there was none."""
        return self.moments[-1] - self.sent_at if self.moments else 0.0

    @property
    def itls(self) -> list[float]:
        """Times between tokens, as chunks bring them."""
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean time per token after the first; 0 for a single one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def waited(self) -> float:
        """Time in the client, for a free place among ``--max-concurrency``."""
        return self.sent_at - self.due_at


class Events:
    """Takes the bytes of a stream of server-sent events and writes what they say into ``record``."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""
        self._told = 0
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that came ``now``. msgspec.MsgspecError for data that is no chunk."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def close(self) -> None:
        """The stream is over: what it left unsaid is an error."""
        record = self._record
        self.done |= self._rest.replace(b" ", b"").strip() == b"data:[DONE]"  # some end without a line break
        record.output_tokens = self._told or len(record.moments)
        if record.error:
            return
        if not record.moments:
            record.error = "the answer has no text"
        elif not self.done:
            record.error = "the answer was cut: the server went away"

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        chunk, record = _decode(data), self._record
        if chunk.choices:
            choice = chunk.choices[0]
            text = choice.said
            if text or (record.moments and choice.finish_reason is None):
                record.moments.append(now)
                record.said.append(text)
        if chunk.usage is not None:
            self._told = chunk.usage.completion_tokens
            record.prompt_tokens = chunk.usage.prompt_tokens or record.prompt_tokens
            if details := chunk.usage.prompt_tokens_details:
                record.cached_tokens = details.cached_tokens or 0
        if chunk.tandem is not None:
            record.stages = chunk.tandem
        if chunk.error is not None:
            record.error = shortened(message(chunk.error) or "the server gave up")


@dataclass(frozen=True)
class Target:
    """A server and how it is asked. ``extra`` are fields of every body, ``headers`` those of every request beside the
    usual ones; ``url`` ends before ``/v1``."""

    url: str
    model: str
    backend: Backend = "openai"
    api_key: str | None = None
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def session(self, *, keep: bool = True) -> aiohttp.ClientSession:
        """A client session without a limit of connections of its own; each is used once unless they are kept."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        headers |= self.headers
        return aiohttp.ClientSession(
            connector=Connector(kept_s=60) if keep else aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=30),
            headers=headers,
            read_bufsize=1 << 20,
        )

    def body(self, ask: Ask) -> bytes:
        """The request for ``ask``. A chat needs a prompt that is text."""
        asked: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.backend == "openai":
            asked |= {"prompt": ask.prompt, "max_tokens": ask.output_tokens}
        else:
            messages = [{"role": "user", "content": ask.prompt}]
            asked |= {"messages": messages, "max_completion_tokens": ask.output_tokens}
        return json.dumps(asked | self.extra).encode()

    async def send(
        self, session: aiohttp.ClientSession, body: bytes, record: Record, clock: Clock = time.perf_counter
    ) -> None:
        """Sends one request and fills ``record``; what goes wrong is its error. On a kept connection that the server
        has closed, no byte of the answer comes: then it is sent again, once, on a new one."""
        record.sent_at = clock()
        try:
            async with asyncio.timeout(self.timeout_s):
                try:
                    await self._exchange(session, body, record, clock)
                except StaleConnection:
                    record.resent = True
                    async with self.session(keep=False) as fresh:
                        await self._exchange(fresh, body, record, clock)
        except TimeoutError:
            record.error = f"no answer within {self.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError) as error:
            record.error = shortened(str(error) or type(error).__name__)

    async def _exchange(self, session: aiohttp.ClientSession, body: bytes, record: Record, clock: Clock) -> None:
        events = Events(record)
        async with session.post(self.url + PATHS[self.backend], data=body) as response:
            if response.status != 200:
                record.error = _refusal(response.status, await response.read())
                return
            async for data in response.content.iter_any():
                events.feed(data, clock())
        events.close()


def message(error: Any) -> str:
    """The message of an error in OpenAI's shape, or of one that is only text."""
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)


def shortened(text: str) -> str:
    """One line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[:MAX_ERROR_CHARACTERS] + " ..."


def _refusal(status: int, body: bytes) -> str:
    try:
        found = json.loads(body)
        said = message(found.get("error", found)) if isinstance(found, dict) else str(found)
    except ValueError:
        said = body.decode(errors="replace")
    return shortened(f"HTTP {status}: {said}")
