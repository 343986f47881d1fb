"""What every HTTP request passes: its id, its right to be here, and the shape of errors.

Owns authentication (default-deny as soon as any key is set), the check against web sites in a browser here (only
without keys), the limit of the body, and the translation of every exception to OpenAI's error object. A stack trace
never leaves.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import logging
import re
import secrets
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from common.config import CoordinatorConfig
from common.errors import RequestError
from coordinator.answers import encode
from coordinator.fields import Json
from coordinator.reply import error_body
from coordinator.server import EXPECTATION, internal_error

log = logging.getLogger("tandem.http")

REQUEST_ID = web.RequestKey("request_id", str)
WRITTEN = web.RequestKey("written", asyncio.Future)
"""Of a stream: done when its last event was written, after which a client has no reason to stay."""
HEARD = web.AppKey("heard", set)
"""Connections that have sent a request."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_OPEN_PATHS = ("/health", "/ready")
REMEMBERED_HOSTS = 256
_LOCAL_NAMES = ("localhost", "ip6-localhost")
_CLOSING = ("server_shutting_down", "request_too_large", "malformed_request")
"""Codes of errors that end the connection: what a client sends after them would be the rest of its body, or wasted."""


def json_response(body: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(body), status=status, headers=headers, content_type="application/json")


def error_response(error: RequestError) -> web.Response:
    """``error`` as a response, with the headers that belong to its status."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1000)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = json_response(error_body(error), status=error.status, headers=headers)
    if error.code in _CLOSING or error.status == 408:
        response.force_close()
    return response


def guard(config: CoordinatorConfig) -> Middleware:
    """The one middleware."""
    gate = _Gate(config)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = _request_id(request)
        request.app[HEARD].add(request.protocol)
        try:
            gate.check(request)
            _check_body(request)
            response = await handler(request)
        except RequestError as error:
            response = error_response(error)
        except web.HTTPException as error:
            response = error_response(_from_aiohttp(request, error))
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = error.headers["Allow"]
        except asyncio.CancelledError:
            written = request.get(WRITTEN)
            if request.transport is None and not (written and written.done()):
                log.info("499 %s %s: the client has left (%s)", request.method, route(request), request[REQUEST_ID])
            raise
        except Exception:
            log.exception("%s %s failed", request.method, route(request))
            response = error_response(internal_error())
        if not response.prepared:
            response.headers["x-request-id"] = request[REQUEST_ID]
            if EXPECTATION in request:
                response.force_close()  # the body was not asked for: what comes next is that, or another request
        return response

    return middleware


def route(request: web.Request) -> str:
    """The path of the handler that ``request`` has reached, which is ours; the client's where there is none."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else request.path


def _check_body(request: web.Request) -> None:
    """RequestError 413 or 417 if the headers of ``request`` announce a body that will not be read."""
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large(request)
    if request.get(EXPECTATION, "100-continue").lower() != "100-continue":
        raise RequestError("Only 100-continue can be expected.", status=417, code="unsupported_expectation")


def announce_reading(request: web.Request) -> None:
    """Lets a client send its body that waits to hear that it is wanted (``Expect: 100-continue``)."""
    waits = request.pop(EXPECTATION, None) is not None and not request.content.is_eof()
    if waits and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


class _Gate:
    """Who may call what."""

    def __init__(self, config: CoordinatorConfig) -> None:
        keys = config.api_keys()
        self._admin_keys = [config.admin_api_key.encode()] if config.admin_api_key else []
        self._keys = [key.encode() for key in keys]
        self._checks_site = not (self._keys or self._admin_keys or config.insecure_http)
        self._own_host = config.host.lower()
        self._is_here = functools.lru_cache(maxsize=REMEMBERED_HOSTS)(self._names_here)

    def check(self, request: web.Request) -> None:
        """RequestError 401 or 403 unless the request may go on."""
        if self._checks_site and request.path not in _OPEN_PATHS:
            self._check_site(request)
        if (not self._keys and not self._admin_keys) or request.path in _OPEN_PATHS:
            return
        admin = request.path.startswith("/admin")
        if not admin and not self._keys:
            return  # only /admin has a key
        token = _bearer(request)
        if admin and self._admin_keys:
            if not _matches(token, self._admin_keys):
                if _matches(token, self._keys):
                    raise RequestError("This key has no right to /admin.", status=403, code="insufficient_permissions")
                raise _unauthorized(token)
        elif not _matches(token, self._keys + self._admin_keys):
            raise _unauthorized(token)

    def _check_site(self, request: web.Request) -> None:
        """Without a key a web page in a browser on this machine could post here, or read what a name that it has made
        point here shows: its Host or Origin gives it away."""
        host = request.headers.get("Host", "")
        if host and not self._is_here(f"//{host}"):
            raise _foreign("Host", host)
        origin = request.headers.get("Origin")
        if origin is not None and not self._is_here(origin):  # "null" names no host either
            raise _foreign("Origin", origin)

    def _names_here(self, url: str) -> bool:
        """Whether the host that ``url`` names, if any, is this machine."""
        name = _host_of(url)
        if name is None:
            return False
        if name in _LOCAL_NAMES or name == self._own_host:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _host_of(url: str) -> str | None:
    """The host that ``url`` names; None when it names none, or is malformed."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _bearer(request: web.Request) -> bytes | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        return None
    return token.strip().encode("utf-8", "surrogateescape")


def _matches(token: bytes | None, keys: list[bytes]) -> bool:
    """In the same time for every wrong token."""
    return token is not None and sum(hmac.compare_digest(token, key) for key in keys) > 0


def _unauthorized(token: bytes | None) -> RequestError:
    text = "No API key was given: send 'Authorization: Bearer KEY'." if token is None else "The API key is wrong."
    return RequestError(text, status=401, code="invalid_api_key")


def _foreign(header: str, value: str) -> RequestError:
    return RequestError(
        f"The {header} {value[:128]!r} is not this machine. Set --api-key to serve other names.",
        status=403,
        code="forbidden_origin",
    )


def _too_large(request: web.Request) -> RequestError:
    text = f"The request body has more than {request.client_max_size:,} bytes, which --max-body-bytes allows."
    return RequestError(text, status=413, code="request_too_large")


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> RequestError:
    """aiohttp's own refusals in OpenAI's shape."""
    match error.status:
        case 404:
            text = f"There is no {request.method} {request.path[:128]} here."
            if request.path.startswith(("/v1/embeddings", "/v1/audio", "/v1/images", "/v1/rerank", "/v1/moderations")):
                text = f"{request.path[:128]} is not served: this server generates text."
            return RequestError(text, status=404, code="not_found")
        case 405:
            text = f"{request.path[:128]} does not take {request.method[:16]}."
            return RequestError(text, status=405, code="method_not_allowed")
        case 413:
            return _too_large(request)
        case status:
            kind = "server_error" if status >= 500 else "invalid_request_error"
            return RequestError(error.reason or "The request was refused.", status=status, type=kind)
