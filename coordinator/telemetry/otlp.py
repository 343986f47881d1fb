"""A client of OTLP over HTTP, in the coordinator's event loop: sends serialized export requests, with retries.

OpenTelemetry's own exporter blocks, so it needs a thread, and its encoding of a span costs several times what that of
:mod:`coordinator.telemetry.spans` does: its thread would hold the interpreter's lock while tokens wait. Settings of the
connection come from OpenTelemetry's variables (docs/operate/opentelemetry.md).
"""

from __future__ import annotations

import asyncio
import gzip
import math
import random
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from common.core.errors import StartError, reason

TIMEOUT_S = 10.0
"""Seconds for one attempt, and for all attempts together."""
BACKOFF_S = 0.5
"""Mean delay before the second attempt; it doubles with each further one."""
RETRIED = frozenset((429, 502, 503, 504))
"""Statuses after which OTLP allows another attempt."""
MAX_ANSWER_BYTES = 64 << 10
_DETAIL_CHARS = 200
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def endpoint(url: str, signal: Literal["traces", "metrics"]) -> str:
    """Return ``url`` with the standard path of ``signal`` if it has none."""
    parts = urlsplit(url)
    return url if parts.path not in ("", "/") else parts._replace(path=f"/v1/{signal}").geturl()


def setting(environ: Mapping[str, str], signal: Literal["traces", "metrics"], name: str) -> str:
    """Return the value of ``OTEL_EXPORTER_OTLP_`` and ``name``; the variable for ``signal`` wins over the general one.
    Empty if neither is set."""
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}")
    return (own or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")).strip()


def read_headers(environ: Mapping[str, str], signal: Literal["traces", "metrics"]) -> dict[str, str]:
    """Return the headers for ``signal`` from ``OTEL_EXPORTER_OTLP_HEADERS``: NAME=VALUE, separated by commas, values in
    URL encoding. Raises StartError, without what is there, which may be a key, if it is something else."""
    headers = {}
    for part in setting(environ, signal, "HEADERS").split(","):
        name, equals, value = part.strip().partition("=")
        name, value = unquote(name).strip(), unquote(value).strip()
        if not (name or equals):
            continue
        if not (_HEADER_NAME.fullmatch(name) and equals and value.isascii() and value.isprintable()):
            raise StartError(
                "the headers in OTEL_EXPORTER_OTLP_HEADERS cannot be read",
                "they must be NAME=VALUE, separated by commas, with values in URL encoding",
                "correct it, such as authorization=Bearer%20KEY",
            )
        headers[name] = value
    return headers


@dataclass(frozen=True, slots=True)
class Sent:
    """The outcome of one export: why it failed, "" if it did not, and how many spans the receiver rejected."""

    failure: str = ""
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """Settings of the connection to a receiver of traces, from OpenTelemetry's environment variables."""

    headers: Mapping[str, str]
    certificate: str | None
    client_certificate: str | None
    client_key: str | None
    compress: bool

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> OtlpSettings:
        """Read the settings; raises StartError for headers or a compression that are not supported."""
        compression = setting(environ, "traces", "COMPRESSION").lower() or "none"
        if compression not in ("none", "gzip"):
            raise StartError(
                "the compression in OTEL_EXPORTER_OTLP_COMPRESSION is not supported",
                "traces are sent plain or with gzip",
                "set it to none or gzip",
            )
        return cls(
            read_headers(environ, "traces"),
            setting(environ, "traces", "CERTIFICATE") or None,
            setting(environ, "traces", "CLIENT_CERTIFICATE") or None,
            setting(environ, "traces", "CLIENT_KEY") or None,
            compression == "gzip",
        )

    def context(self) -> ssl.SSLContext:
        """Return the TLS context; raises StartError if a certificate cannot be read."""
        try:
            context = ssl.create_default_context(cafile=self.certificate)
            if self.client_certificate:
                context.load_cert_chain(self.client_certificate, self.client_key)
        except (OSError, ssl.SSLError) as error:
            raise StartError(
                "cannot read a certificate for the OTLP receiver",
                reason(error),
                "correct OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE or _CLIENT_KEY",
            ) from error
        return context


class OtlpClient:
    """Posts serialized trace export requests to ``url``. Make it in the event loop that uses it."""

    def __init__(self, url: str, settings: OtlpSettings) -> None:
        self.url, self._compress = url, settings.compress
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "tandem", **settings.headers}
        if self._compress:
            headers["Content-Encoding"] = "gzip"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, ssl=settings.context()),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            trust_env=True,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close the connection."""
        await self._session.close()

    async def send(self, body: bytes, closing: asyncio.Event) -> Sent:
        """Send a serialized export request. Repeats an attempt that may succeed later, within TIMEOUT_S and not after
        ``closing`` is set."""
        loop = asyncio.get_running_loop()
        deadline, delay = loop.time() + TIMEOUT_S, BACKOFF_S
        if self._compress:
            body = await asyncio.to_thread(gzip.compress, body, 1)
        while True:
            sent, wait_s = await self._attempt(body)
            if wait_s is None:
                return sent
            pause = max(wait_s, delay * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            if closing.is_set() or loop.time() + pause > deadline:
                return sent
            try:
                async with asyncio.timeout(pause):
                    await closing.wait()
            except TimeoutError:
                delay *= 2

    async def _attempt(self, body: bytes) -> tuple[Sent, float | None]:
        """Post once. Return the outcome, and the seconds after which another attempt makes sense, None if it does
        not."""
        try:
            async with self._session.post(self.url, data=body, allow_redirects=False) as response:
                answer = await response.content.read(MAX_ANSWER_BYTES)
                if 200 <= response.status < 300:
                    return _accepted(answer), None
                retry_s = _retry_after_s(response.headers.get("Retry-After", ""))
                return Sent(f"HTTP status {response.status}"), retry_s if response.status in RETRIED else None
        except TimeoutError:
            return Sent("no answer in time"), 0.0
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return Sent(reason(error)[:_DETAIL_CHARS]), 0.0
        except aiohttp.ClientError as error:
            return Sent(type(error).__name__), None


def _accepted(answer: bytes) -> Sent:
    """Return the outcome of an export that was accepted."""
    try:
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:  # the receiver answers in another format; it has accepted the spans
        return Sent()
    rejected = max(0, partial.rejected_spans)
    return Sent(f"spans were rejected: {partial.error_message[:_DETAIL_CHARS]}" if rejected else "", rejected)


def _retry_after_s(text: str) -> float:
    """Return the seconds of a ``Retry-After`` header, 0 without one. A date counts as none."""
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
