"""Cross-origin resource sharing (CORS): which web pages of other origins may call this server and read its responses.

Off unless origins are allowed. A page authenticates with a key in a header. Requests with browser credentials (cookies)
are never allowed, so that ``*`` gives a page no access beyond that of its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from aiohttp import web

PREFLIGHT_AGE_S = 600
METHODS = "GET, POST, OPTIONS"
EXPOSED = ", ".join(
    (
        "x-request-id", "request-id", "retry-after", "retry-after-ms", "www-authenticate",
        "x-tandem-path", "x-tandem-prefill", "x-tandem-decode", "x-tandem-ignored", "x-tandem-tools",
        "traceparent", "tracestate",
    )
)  # fmt: skip
"""Response headers that a page may read."""
HEADERS = "Authorization, Content-Type, anthropic-beta, anthropic-version, x-api-key, x-request-id"
"""Request headers allowed to a preflight that names none."""
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MAX_HEADER_NAMES = 2048


class Cors:
    """The CORS rules for the allowed ``origins``, spelled as in an ``Origin`` header; ``*`` allows all."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)
        self.allows_all = "*" in self._origins

    def allows(self, origin: str) -> bool:
        """Return whether ``origin``, as in an ``Origin`` header, is allowed."""
        return self.allows_all or origin in self._origins

    def is_preflight(self, request: web.Request) -> bool:
        """Return whether this is a CORS preflight of an allowed origin. A preflight never carries the page's key."""
        headers = request.headers
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in headers
        return asks and self._allowed_origin(request) is not None

    def preflight(self, request: web.Request) -> web.Response:
        """Return the response to a preflight request."""
        wanted = request.headers.get("Access-Control-Request-Headers", "").strip()
        sane = len(wanted) <= _MAX_HEADER_NAMES and _HEADER_NAMES.fullmatch(wanted)
        headers = {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Allow-Headers": wanted if sane else HEADERS,
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
            "Vary": "Access-Control-Request-Method, Access-Control-Request-Headers",
        }
        return web.Response(status=204, headers=headers)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that let a page of an allowed origin read ``response``, error and stream responses included.
        A signal receiver of ``on_response_prepare``."""
        if not self._origins:
            return
        if not self.allows_all:  # caches must not give one origin's answer to another
            vary = response.headers.get("Vary")
            response.headers["Vary"] = f"{vary}, Origin" if vary else "Origin"
        if (origin := self._allowed_origin(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = "*" if self.allows_all else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _allowed_origin(self, request: web.Request) -> str | None:
        origins = request.headers.getall("Origin", ())
        return origins[0] if len(origins) == 1 and self.allows(origins[0]) else None
