"""A streaming client for OpenAI-compatible servers that records when each chunk arrives.

The client may share its cores with the server that it measures, so it does little per chunk: one typed decode and one
appended time. Everything else is derived afterwards (:mod:`bench.load.metrics`).

Time 0 of a request is just before it is sent. The first chunk with text is the first token; a chunk that only names the
role does not count. Each later chunk counts as a token, except those that carry only a finish reason or the usage.
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
from bench.load.workloads import PlannedRequest

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
    """The fields of a chunk that the client reads; the others are ignored."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    tandem: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """The outcome of one request. Times are seconds on the client's clock.

    ``due_at`` is the scheduled send time, ``moments`` the arrival time of each token's chunk, ``said`` the texts of
    these chunks. ``cached_tokens`` is the number of prompt tokens that the server reports as prefix-cache hits (0 if it
    reports none). ``error`` is empty if the answer is complete."""

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
    """Whether the request was sent a second time; all times count from the first."""

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return not self.error

    @property
    def ttft(self) -> float:
        """Time to first token; 0 if there was none."""
        return self.moments[0] - self.sent_at if self.moments else 0.0

    @property
    def latency(self) -> float:
        """Time to the last token; 0 if there was none."""
        return self.moments[-1] - self.sent_at if self.moments else 0.0

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between consecutive chunks."""
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 if there is at most one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def waited(self) -> float:
        """Time from ``due_at`` until the request was sent, spent waiting for a place among ``--max-concurrency``."""
        return self.sent_at - self.due_at


class Events:
    """Parses a stream of server-sent events and writes its content into ``record``."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""
        self._reported_tokens = 0
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that arrived at ``now``. Raises msgspec.MsgspecError for an event that is not a valid chunk."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def close(self) -> None:
        """End the stream: set the record's output tokens, and its error if the answer is incomplete."""
        record = self._record
        self.done |= self._rest.replace(b" ", b"").strip() == b"data:[DONE]"  # some servers omit the last newline
        record.output_tokens = self._reported_tokens or len(record.moments)
        if record.error:
            return
        if not record.moments:
            record.error = "the answer has no text"
        elif not self.done:
            record.error = "the answer is incomplete: the server closed the connection"

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
            self._reported_tokens = chunk.usage.completion_tokens
            record.prompt_tokens = chunk.usage.prompt_tokens or record.prompt_tokens
            if details := chunk.usage.prompt_tokens_details:
                record.cached_tokens = details.cached_tokens or 0
        if chunk.tandem is not None:
            record.stages = chunk.tandem
        if chunk.error is not None:
            record.error = shortened(message(chunk.error) or "the server reported an error without a message")


@dataclass(frozen=True)
class Target:
    """A server, and the parameters of every request to it. ``url`` is the base URL without ``/v1``; ``extra`` holds
    additional fields of every request body, ``headers`` additional HTTP headers."""

    url: str
    model: str
    backend: Backend = "openai"
    api_key: str | None = None
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def session(self, *, keep: bool = True) -> aiohttp.ClientSession:
        """Open a client session without a connection limit. With ``keep``, connections are kept alive; otherwise each
        one serves a single request."""
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

    def body(self, ask: PlannedRequest) -> bytes:
        """Return the request body for ``ask``. The chat backend needs a prompt that is text."""
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
        """Send one request and fill ``record``; a failure becomes ``record.error``.

        If the server had closed a kept-alive connection before any byte of the answer, the request is sent once more on
        a new connection."""
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
    """Return the message of an error that is an object in OpenAI's shape or plain text."""
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)


def shortened(text: str) -> str:
    """Return ``text`` as one line of at most ``MAX_ERROR_CHARACTERS`` characters and an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[:MAX_ERROR_CHARACTERS] + " ..."


def _refusal(status: int, body: bytes) -> str:
    try:
        found = json.loads(body)
        said = message(found.get("error", found)) if isinstance(found, dict) else str(found)
    except ValueError:
        said = body.decode(errors="replace")
    return shortened(f"HTTP {status}: {said}")
