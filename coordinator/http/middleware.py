"""The middleware that every HTTP request passes: request id, access checks, and error responses.

Owns authentication (default-deny as soon as a client key is configured), the protection of routes without a key against
web pages in a local browser (cross-site requests and DNS rebinding), the body size limit, and the translation of every
exception to OpenAI's error object. A stack trace is never sent.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from common.config.coordinator import CoordinatorConfig
from common.core.errors import RequestError
from common.net.hosts import is_loopback
from coordinator.api.anthropic_encoder import anthropic_error
from coordinator.api.delta_encoder import encode
from coordinator.api.event_stream import error_body
from coordinator.http.access import LEFT, RECORDS, log_access
from coordinator.http.cors import Cors
from coordinator.http.repeats import RateLimitedLog
from coordinator.http.server import EXPECTATION
from coordinator.requests.errors import RETRY_JITTER, internal
from coordinator.requests.spec import Json
from coordinator.requests.timeline import Timeline
from coordinator.requests.trace_context import TRACEPARENT, TRACESTATE, TraceContext, TraceSampler
from coordinator.telemetry.attributes import GENERATING

log = logging.getLogger("tandem.http")

REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived at", float)
"""Time of ``time.monotonic`` at which the head of the request had been read."""
TRACE = web.RequestKey("trace", TraceContext)
ID_HEADERS = web.RequestKey("headers with ids", dict[str, str])
"""Headers of every response: ``x-request-id``, and the trace context if the caller sent one or spans are exported."""
ANTHROPIC_REQUEST_ID = "request-id"
"""Header in which Anthropic's clients look for the request's id."""
KEY_NAME = web.RequestKey("key name", str)
"""Name of the API key that the client sent; ``NO_KEY`` if the route needs none."""
NO_KEY = "none"
ADMIN = "admin"
"""Name of the key for the admin routes."""
UNKNOWN_ENDPOINT = "other"
"""The endpoint by which metrics count requests that no route matches."""
WRITTEN = web.RequestKey("written", asyncio.Future)
"""For streams: done when the last event has been written. A client that disconnects afterwards is not logged."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_MESSAGES = "/v1/messages"
_OPEN_PATHS = ("/health", "/ping", "/ready", "/ui", "/ui/{file}")
"""Routes that need no key: the state of this process, and the files of the page, which hold no data."""
REMEMBERED_HOSTS = 256
_RANDOM = secrets.SystemRandom()
_LOCAL_NAMES = ("localhost", "ip6-localhost")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{0,5})?")
_WITH_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_CLOSING = ("server_shutting_down", "request_too_large", "malformed_request")
"""Codes of errors that close the connection, because what the client sends next would be the rest of its body, or would
be refused as well."""


def json_response(body: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return ``body`` as a JSON response."""
    return web.Response(body=encode(body), status=status, headers=headers, content_type="application/json")


def error_response(error: RequestError, request: web.Request | None = None) -> web.Response:
    """Return ``error`` as a response with the headers for its status. It has Anthropic's form if ``request`` is one of
    the Messages API, else OpenAI's."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers |= _retry_headers(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if request is not None and is_anthropic(request):
        body = anthropic_error(error, request[REQUEST_ID])
    else:
        body = error_body(error)
    response = json_response(body, status=error.status, headers=headers)
    if error.code in _CLOSING or error.status == 408:
        response.force_close()
    return response


def is_anthropic(request: web.Request) -> bool:
    """Return whether ``request`` is one of Anthropic's Messages API."""
    return request.path == _MESSAGES or request.path.startswith(f"{_MESSAGES}/")


def _retry_headers(seconds: float) -> dict[str, str]:
    """Return ``seconds`` with jitter in both headers that clients read; ``Retry-After`` rounds up to whole seconds."""
    delay_ms = max(1, round(1000 * seconds * _RANDOM.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER)))
    return {"Retry-After": str(-(-delay_ms // 1000)), "retry-after-ms": str(delay_ms)}


def guard(
    config: CoordinatorConfig,
    cors: Cors,
    left: RateLimitedLog,
    sampler: TraceSampler,
    responded: Callable[[str, int], None],
    refused: Callable[[Timeline], None] | None = None,
) -> Middleware:
    """Return the application's only middleware. ``left`` logs clients that disconnect before their response.
    ``responded`` is called with the endpoint and the status of each response, ``refused`` with each request for text
    that has the right key and is refused before it is queued."""
    gate = _Gate(config, cors)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        _identify(request, sampler)
        request[KEY_NAME] = NO_KEY
        status = LEFT
        try:
            response = await guarded(request, handler)
            status = response.status
            return response
        finally:
            if status == LEFT and _is_written(request):
                status = 200
            known = request.match_info.route.resource is not None
            responded(route(request) if known else UNKNOWN_ENDPOINT, status)
            if config.access_log:
                ids = {**log_fields(request), "key_name": request[KEY_NAME]}
                log_access(request, route(request), status, time.monotonic() - request[ARRIVED_AT], ids)

    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        passed = False
        try:
            gate.check_site(request)
            if cors.is_preflight(request):
                response: web.StreamResponse = cors.preflight(request)
            else:
                request[KEY_NAME] = gate.check_key(request)
                passed = True
                _check_body(request)
                response = await handler(request)
        except RequestError as error:
            response = error_response(error, request)
            if passed and refused is not None and (timeline := _refusal(request, error)) is not None:
                refused(timeline)
        except web.HTTPException as error:
            response = error_response(_from_aiohttp(request, error), request)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = error.headers["Allow"]
        except asyncio.CancelledError:
            if request.transport is None and not _is_written(request):
                resource = request.match_info.route.resource
                what = f"{request.method} {resource.canonical if resource else 'an unknown path'}"
                left.add(what, f"{LEFT} {what}: the client disconnected")
            raise
        except Exception:
            log.exception("%s %s failed", request.method, route(request), extra=log_fields(request))
            response = error_response(internal(), request)
        if not response.prepared:
            response.headers.update(request[ID_HEADERS])
            if is_anthropic(request):
                response.headers[ANTHROPIC_REQUEST_ID] = request[REQUEST_ID]
            if EXPECTATION in request:
                response.force_close()  # no 100 Continue was sent: the next bytes may be the body or another request
        return response

    return middleware


def _is_written(request: web.Request) -> bool:
    """Return whether the last event of a stream has been written."""
    written = request.get(WRITTEN)
    return written is not None and written.done()


def route(request: web.Request) -> str:
    """Return the path pattern of the route that matched ``request``, or the path of the request if none matched."""
    resource = request.match_info.route.resource
    return (resource.canonical.rstrip("/") or "/") if resource is not None else request.path


def _check_body(request: web.Request) -> None:
    """Raise RequestError 413 or 417 if the headers of ``request`` announce a body that will not be read."""
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large(request)
    if request.get(EXPECTATION, "100-continue").lower() != "100-continue":
        raise RequestError(
            "The only supported expectation is 'Expect: 100-continue'.", status=417, code="unsupported_expectation"
        )


def announce_reading(request: web.Request) -> None:
    """Send ``100 Continue`` if the client waits for it before it sends the body (``Expect: 100-continue``)."""
    waits = request.pop(EXPECTATION, None) is not None and not request.content.is_eof()
    if waits and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _identify(request: web.Request, sampler: TraceSampler) -> None:
    """Set the ids of ``request``: its own and its place in a trace."""
    headers = request.headers
    request[ARRIVED_AT] = time.monotonic()
    request[REQUEST_ID] = _request_id(request)
    trace = sampler.context(headers.getall(TRACEPARENT, ()), headers.getall(TRACESTATE, ()))
    request[TRACE] = trace
    shows_trace = sampler.records or trace.parent_id is not None
    request[ID_HEADERS] = {"x-request-id": request[REQUEST_ID], **(trace.headers() if shows_trace else {})}


def _refusal(request: web.Request, error: RequestError) -> Timeline | None:
    """Return the timeline of a request for text that ``error`` has ended before it was queued; None for others."""
    endpoint, now = route(request), time.monotonic()
    if endpoint not in GENERATING or any(record.timeline.attempts for record in request.get(RECORDS, ())):
        return None
    timeline = Timeline(
        request_id=request[REQUEST_ID],
        trace=request[TRACE],
        endpoint=endpoint,
        arrived_unix_s=time.time() - (now - request[ARRIVED_AT]),
        arrived_at=request[ARRIVED_AT],
        tokenized_at=now,
    )
    timeline.refused(now, error)
    return timeline


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def log_fields(request: web.Request) -> dict[str, str]:
    """Return the fields of log lines about ``request``."""
    return {"request_id": request[REQUEST_ID], "trace_id": request[TRACE].trace_id}


class _Gate:
    """The access checks: which client may call which route."""

    def __init__(self, config: CoordinatorConfig, cors: Cors) -> None:
        self._admin_keys = {config.admin_api_key.encode(): ADMIN} if config.admin_api_key else {}
        self._client_keys = {key.encode(): name for name, key in config.named_api_keys()}
        self._metrics_need_a_key = config.metrics_need_a_key
        self._own_host = config.host.lower().strip("[]")
        # on any other address, a route without a key needs an explicit flag
        self._checks_site = is_loopback(config.host) and not config.insecure_http
        self._cors = cors
        self._is_here = functools.lru_cache(maxsize=REMEMBERED_HOSTS)(self._names_here)

    def _keys_of(self, path: str) -> Mapping[bytes, str]:
        """Return the keys that give access to ``path``, with their names; empty if it needs no key."""
        if path in _OPEN_PATHS:
            return {}
        if path.startswith("/admin"):
            return self._admin_keys or self._client_keys
        needed = self._metrics_need_a_key if path == "/metrics" else bool(self._client_keys)
        return self._admin_keys | self._client_keys if needed else {}

    def check_site(self, request: web.Request) -> None:
        """Raise RequestError 403 if ``request`` needs no key and may come from a web page of another site.

        A web page in a browser on this machine could send a POST to this server (the Origin header shows it), or read
        responses through a host name of its own that it resolves to this machine (DNS rebinding; the Host header shows
        it). An HTTP/1.0 request without a Host does not come from a browser.
        """
        path = route(request)
        if not self._checks_site or path in _OPEN_PATHS or self._keys_of(path):
            return
        hosts = request.headers.getall("Host", ())
        if target := _WITH_SCHEME.match(request.raw_path):  # an absolute target overrides Host
            hosts = (*hosts, target[1])
        for host in hosts:
            if not self._is_here(host):
                raise _foreign("Host", host)
        for origin in request.headers.getall("Origin", ()):
            site = _WITH_SCHEME.fullmatch(origin)  # "null" names no host
            if not (self._cors.allows(origin) or (site and self._is_here(site[1]))):
                raise _foreign("Origin", origin)

    def check_key(self, request: web.Request) -> str:
        """Return the name of the key of ``request``, NO_KEY if its route needs none. Raises RequestError 401 or 403
        unless it has a key for its route."""
        path = route(request)
        keys = self._keys_of(path)
        if not keys:
            return NO_KEY
        token = _token(request)
        name = _name(token, keys)
        if name is None:
            if path.startswith("/admin") and _name(token, self._client_keys) is not None:
                raise RequestError(
                    "This API key does not give access to /admin.", status=403, code="insufficient_permissions"
                )
            raise _unauthorized(token)
        return name

    def _names_here(self, authority: str) -> bool:
        """Return whether ``authority`` (a host, optionally with a port) names this machine."""
        match = _AUTHORITY.fullmatch(authority)
        if match is None:
            return False
        name = match[1].lower().strip("[]").removesuffix(".")
        return name in _LOCAL_NAMES or name == self._own_host or is_loopback(name)


def _token(request: web.Request) -> bytes | None:
    """Return the key of a request, from a bearer token (OpenAI's clients) or ``x-api-key`` (Anthropic's). Raises
    RequestError 401 if it has several different keys."""
    tokens = set()
    for value in request.headers.getall("Authorization", ()):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            tokens.add(token.strip())
    tokens.update(value.strip() for value in request.headers.getall("x-api-key", ()))
    tokens.discard("")
    if len(tokens) > 1:
        raise RequestError("The request has several different API keys.", status=401, code="invalid_api_key")
    return tokens.pop().encode("utf-8", "surrogateescape") if tokens else None


def _name(token: bytes | None, keys: Mapping[bytes, str]) -> str | None:
    """Return the name of the key that ``token`` is, None if it is none. Compares in constant time: every key is
    compared, whether or not an earlier one matches."""
    matched = [name for key, name in keys.items() if token is not None and hmac.compare_digest(token, key)]
    return matched[0] if matched else None


def _unauthorized(token: bytes | None) -> RequestError:
    text = "The API key is invalid."
    if token is None:
        text = "No API key was given: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    return RequestError(text, status=401, code="invalid_api_key")


def _foreign(header: str, value: str) -> RequestError:
    other = ", allow the page's origin with --allowed-origins" if header == "Origin" else ""
    return RequestError(
        f"The {header} {value[:128]!r} does not name this machine, and this route needs no API key. Set"
        f" --api-key{other}, or open the server to every web page with --insecure-http.",
        status=403,
        code="forbidden_origin",
    )


def _too_large(request: web.Request) -> RequestError:
    text = f"The request body has more than {request.client_max_size:,} bytes, the limit of --max-body-bytes."
    return RequestError(text, status=413, code="request_too_large")


_OTHER_USES = re.compile(
    "(/v[12])?/(embeddings?|embed|pooling|score|rerank|classify|audio|images?|videos|moderations|files|batches"
    "|fine_tuning|assistants|threads|vector_stores|realtime|uploads)(/.*)?"
)
_GENERATES = "POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages"


def _nothing_here(request: web.Request) -> str:
    """Return the text of a 404: what there is instead of the path of ``request``."""
    path = request.path[:128]
    if _OTHER_USES.fullmatch(path):
        return f"{path} is not supported: this server only generates text, by {_GENERATES}."
    known = {resource.canonical.rstrip("/") for resource in request.app.router.resources()}
    near = difflib.get_close_matches(path.rstrip("/"), sorted(known), n=1)
    return f"There is no endpoint {request.method} {path}. " + (
        f"The nearest is {near[0]}." if near else "GET / lists all endpoints."
    )


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> RequestError:
    """Translate an error of aiohttp's router or body reader to a RequestError."""
    match error.status:
        case 404:
            return RequestError(_nothing_here(request), status=404, code="not_found")
        case 405:
            text = f"{request.path[:128]} does not support {request.method[:16]}."
            return RequestError(text, status=405, code="method_not_allowed")
        case 413:
            return _too_large(request)
        case status:
            kind = "server_error" if status >= 500 else "invalid_request_error"
            return RequestError(error.reason or "The request was refused.", status=status, type=kind)
