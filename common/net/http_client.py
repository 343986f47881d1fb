"""A small HTTP client of a running server, for the commands, the launcher and the benchmarks.

Uses only the standard library, so that commands start fast. Turns connection errors into readable ones. Knows the
server only through its public HTTP API.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from common.core.errors import StartError, TandemError, reason

ADMIN_KEY = "the server's admin key (an API key, if it has none)"
"""The key that ``/admin`` requires, in advice to a user."""


class HttpError(TandemError):
    """The server answered with an error, or the connection broke; the text is its message. ``status`` is the HTTP
    status, 0 if the connection or a stream broke."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    def todo(self, otherwise: str, *, admin: bool = False) -> str:
        """Return advice for the user by the HTTP status; ``otherwise`` if the status calls for none. ``admin``: the
        request was one to ``/admin``."""
        if self.status in (401, 403):
            return f"give {ADMIN_KEY if admin else 'the right key'} with --api-key or TANDEM_API_KEY"
        return "try again in a moment" if self.status in (429, 503) else otherwise


PAGE_S = 10.0
MAX_LINE = 8 << 20
"""Longest line of an event stream, in bytes."""


class HttpClient:
    """A client of the server at ``url``. The path of ``url`` is put before the API's paths; a ``/v1`` at its end is
    ignored. ``key`` and ``headers`` are sent with every request.

    ``timeout_s`` bounds each wait for bytes, in seconds. In a GET, which computes nothing, the bound is at most
    ``PAGE_S``: the other side may speak no HTTP and wait for us. Raises StartError for an invalid URL or header.
    """

    def __init__(
        self, url: str, key: str | None = None, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None
    ) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, self._port = parts.hostname, parts.port
            http.client.HTTPConnection(host or "", self._port)  # opens nothing yet
        except (ValueError, http.client.InvalidURL) as error:  # a port out of range, half a bracket, a space
            raise _no_address(url, str(error)) from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise _no_address(url, "it takes http://HOST:PORT or http://HOST:PORT/PATH")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url, self._host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}", host
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = ({"Authorization": f"Bearer {key}"} if key else {}) | dict(headers or {})
        for name, value in self._headers.items():
            if not (value.isascii() and value.isprintable()):  # http.client would show it
                why = "its value has a character that is not allowed in a header"
                raise StartError(f"the header {name} cannot be sent", why, "correct --header, or --api-key")
        self._timeout_s = timeout_s

    def get(self, path: str) -> tuple[int, Any]:
        """GET ``path``; return the status and the JSON body (None if it is not JSON). Raises OSError if no HTTP server
        answers."""
        status, data = self.read(path)
        return status, _parse(data)

    def read(self, path: str) -> tuple[int, bytes]:
        """GET ``path``; return the status and the body. Raises OSError if no HTTP server answers."""
        connection = self._connect(self._host, self._port, timeout=min(self._timeout_s, PAGE_S))
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, UnicodeError) as error:  # not an HTTP server, or an invalid host name
            raise OSError(str(error) or type(error).__name__) from error
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST ``body`` as JSON; return the JSON body of the answer. Raises HttpError with the server's message unless
        the status is 200, OSError if no HTTP server answers."""
        connection = self._connect(self._host, self._port, timeout=self._timeout_s)
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            connection.request("POST", self._path + path, json.dumps(body), headers)
            response = connection.getresponse()
            answer = _parse(response.read())
        except (http.client.HTTPException, UnicodeError) as error:
            raise OSError(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        if response.status != 200:
            raise HttpError(_message(answer) or f"HTTP status {response.status}", response.status)
        return answer

    def events(self, path: str) -> EventStream:
        """Open the server-sent events of ``path``, to be closed by the caller. Raises HttpError with the server's
        message unless the status is 200, OSError if no HTTP server answers."""
        connection = self._connect(self._host, self._port, timeout=min(self._timeout_s, PAGE_S))
        try:
            headers = {"Accept": "text/event-stream", **self._headers}
            connection.request("GET", self._path + path, headers=headers)
            sock = connection.sock  # the response takes it over
            response = connection.getresponse()
            if response.status != 200:
                answer = _parse(response.read(MAX_LINE))
                raise HttpError(_message(answer) or f"HTTP status {response.status}", response.status)
        except (http.client.HTTPException, UnicodeError) as error:
            connection.close()
            raise OSError(str(error) or type(error).__name__) from error
        except BaseException:
            connection.close()
            raise
        return EventStream(connection, response, sock)

    def model(self) -> str:
        """Return the name of the server's first model; raises StartError as :meth:`served`."""
        return str(self.served()["id"])

    def served(self, name: str | None = None) -> dict[str, Any]:
        """Return the entry of model ``name`` in ``/v1/models``, by default the first. Raises StartError if the server
        cannot be reached, refuses, or does not serve the model."""
        try:
            status, body = self.get("/v1/models")
        except OSError as error:
            why = reason(error)
            raise StartError(f"cannot reach {self.url}", why, "start it with `tandem up`, or give --url") from error
        if status != 200 or not isinstance(body, dict) or not body.get("data"):
            why, closed = _message(body) or f"HTTP status {status}", status in (401, 403)
            what = f"{self.url} requires a key" if closed else f"{self.url} lists no models"
            raise StartError(what, why, "give --api-key or set TANDEM_API_KEY" if closed else "check --url")
        models: dict[str, dict[str, Any]] = {str(each["id"]): each for each in body["data"]}
        if name is not None and name not in models:
            why = f"it serves {', '.join(models)}"
            raise StartError(f"{self.url} does not serve {name}", why, "correct --served-model-name")
        return models[name] if name is not None else next(iter(models.values()))

    def chat(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one streamed chat completion; raises HttpError. Closing the iterator closes the
        connection, upon which the server aborts the request."""
        connection = self._connect(self._host, self._port, timeout=self._timeout_s)
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            path = f"{self._path}/v1/chat/completions"
            connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
            response = connection.getresponse()
            if response.status != 200:
                why = _message(_parse(response.read())) or f"HTTP status {response.status}"
                raise HttpError(why, response.status)
            yield from _events(response)
        except (OSError, http.client.HTTPException) as error:
            raise HttpError(f"the connection broke: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()


class EventStream:
    """An open stream of server-sent events. Iterate to get the name and the JSON object of each. Raises OSError if the
    connection breaks, or if nothing arrives for ``PAGE_S``."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, sock: socket.socket
    ) -> None:
        self._connection, self._response, self._socket = connection, response, sock

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        name = ""
        try:
            while line := self._response.readline(MAX_LINE):
                if not line.endswith(b"\n"):
                    raise OSError(f"the server sent a line of more than {MAX_LINE:,} bytes")
                field, _, value = line.strip().partition(b":")
                if field == b"event":
                    name = value.strip().decode(errors="replace")
                elif field == b"data" and isinstance(data := _parse(value), dict):
                    yield name, data
                    name = ""
        except (http.client.HTTPException, ValueError) as error:  # cut off, or closed meanwhile
            raise OSError(str(error) or type(error).__name__) from error

    def interrupt(self) -> None:
        """End the iteration in another thread, which closes the stream. Safe at any time."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._response.close()
        self._connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events up to ``[DONE]``. Raises HttpError if the stream ends before that."""
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            response.read()  # read the end of the body, else the server sees a client that disconnects
            return
        chunk = _parse(data)
        if not isinstance(chunk, dict):
            raise HttpError("the server sent something that is not a JSON object")
        if "error" in chunk:
            raise HttpError(_message(chunk) or "the server reported an error without a message")
        yield chunk
    raise HttpError("the answer was cut off: the server closed the connection")


def shown(url: str) -> str:
    """Return ``url`` without the parts that may be secret: user, password and query."""
    before, slashes, rest = url.partition("?")[0].partition("//")
    host, slash, path = rest.partition("/")
    return f"{before}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def _no_address(url: str, why: str) -> StartError:
    return StartError(
        f"{shown(url)} is not the address of a server", why, "correct --url, for example http://HOST:PORT"
    )


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _message(body: Any) -> str:
    """Return the message of an error body in OpenAI's format, "" if it has none."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""
