"""The page at ``/ui``: static files, read once and sent with an ETag and a strict Content-Security-Policy.

The files hold no data of this server, so they need no key. Everything that the page shows comes from other endpoints,
which check the key that the page sends.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from common.core.errors import RequestError
from coordinator.http.context import deliver_whole

routes = web.RouteTableDef()

_FOLDER = Path(__file__).parent / "ui"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
"""Media types by suffix; the only kinds of files that are sent."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content-Security-Policy. Scripts and styles come from files of this server alone, and with Trusted Types no string
can become markup or code, so that text of a model or a client cannot either."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # the browser asks each time, and gets 304 while the ETag is the same
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the page, as it is sent."""

    body: bytes
    type: str
    etag: str


def _file(body: bytes, suffix: str) -> _File:
    return _File(body, _TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


@functools.cache
def _files() -> Mapping[str, _File]:
    """Return all files by name. The name "" is that of the page at a path without a slash at its end, from which the
    relative addresses of the other files are longer: they stay relative so that a proxy may add a prefix."""
    files = {path.name: _file(path.read_bytes(), path.suffix) for path in _FOLDER.iterdir() if path.suffix in _TYPES}
    return {**files, "": _file(files[_INDEX].body.replace(b'"./', b'"ui/'), ".html")}


@routes.get("/ui")
async def page(request: web.Request) -> web.StreamResponse:
    """Show a page to chat, to watch the workers and to see where the time of each request went. It loads nothing from
    other servers."""
    return await _send(request, _files()[_INDEX if request.path.endswith("/") else ""])


@routes.get("/ui/{file}")
async def file(request: web.Request) -> web.StreamResponse:
    """Return a script, a style or an image of the page at ``/ui``."""
    name = request.match_info["file"].removesuffix("/")
    found = _files().get(name)
    if found is None or not name:
        raise RequestError(f"The page has no file {name[:64]!r}.", status=404, code="not_found")
    return await _send(request, found)


async def _send(request: web.Request, file: _File) -> web.StreamResponse:
    headers = {**_HEADERS, "ETag": file.etag}
    if file.etag in (tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")):
        return await deliver_whole(request, web.Response(status=304, headers=headers))
    response = web.Response(body=file.body, headers={**headers, "Content-Type": file.type})
    return await deliver_whole(request, response)
