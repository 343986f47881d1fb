"""The health endpoints of a worker: ``GET /health`` and ``GET /ready`` on a port of their own.

For an orchestrator's probes. ``/health`` answers 200 while the worker's loop turns: restart the process if it does not.
``/ready`` answers 200 while the coordinator may place requests here; a worker without a coordinator, and one that
drains, answers 503. A thread of its own answers, which sleeps between probes and never touches the engine. It knows
nothing secret and needs no key; what a stranger can hold of it is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from common.core.errors import StartError, reason
from common.net.hosts import bracketed

log = logging.getLogger("tandem.worker")

MAX_CONNECTIONS = 32
"""Open connections; the oldest is closed for another one."""
MAX_HEAD_BYTES = 4096
PATIENCE_S = 5.0
"""Seconds that a client may take to send its request."""
_PHRASES = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 431: "Request Header Fields Too Large",
            503: "Service Unavailable"}  # fmt: skip


class Probed(Protocol):
    """What is asked about. Both methods are called from another thread and only read; "" means that all is well."""

    def why_stuck(self) -> str:
        """Return why the worker's loop will not go on by itself."""
        ...

    def why_not_ready(self) -> str:
        """Return why no new request may be placed on this worker."""
        ...


class HealthServer:
    """Answers on ``host:port`` from construction to :meth:`close`. Raises StartError if the address cannot be bound."""

    def __init__(self, host: str, port: int, probed: Probed, clock: Callable[[], float] = time.monotonic) -> None:
        self._probed, self._clock = probed, clock
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._wakes, self._wake = socket.socketpair()
        self._open: dict[socket.socket, tuple[bytes, float]] = {}
        """What each connection has sent so far, and when it is closed at the latest; oldest first."""
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._wakes):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()
        log.info("health of this worker at http://%s:%d/health and /ready", bracketed(host), self.port)

    def close(self) -> None:
        """Stop answering and close all sockets."""
        self._wake.close()
        self._thread.join()
        for each in (*self._open, self._listener, self._wakes):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            timeout = None
            if self._open:
                timeout = max(0.0, min(until for _, until in self._open.values()) - self._clock())
            ready = [key.fileobj for key, _ in self._selector.select(timeout)]
            if self._wakes in ready:
                return
            for each in ready:
                assert isinstance(each, socket.socket)
                if each is self._listener:
                    self._accept()
                elif each in self._open:
                    self._read(each)
            now = self._clock()
            for late in [each for each, (_, until) in self._open.items() if until <= now]:
                self._close(late)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has given up, or there are too many open files
            return
        if len(self._open) >= MAX_CONNECTIONS:
            self._close(next(iter(self._open)))
        connection.setblocking(False)
        self._open[connection] = b"", self._clock() + PATIENCE_S
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        """Read what has arrived; answer once the head is complete or too long."""
        before, until = self._open[connection]
        try:
            data = connection.recv(MAX_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        head = before + data
        if b"\r\n\r\n" in head or b"\n\n" in head or len(head) > MAX_HEAD_BYTES:
            with contextlib.suppress(OSError):  # the client has left
                connection.send(self._answer(head))  # fits an empty buffer
            self._close(connection)
        elif data:
            self._open[connection] = head, until
        else:
            self._close(connection)

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split()
        method, path = (words[0], words[1].partition(b"?")[0]) if len(words) == 3 else (b"", b"")
        if len(head) > MAX_HEAD_BYTES:
            status, text = 431, "the request is too long"
        elif method not in (b"GET", b"HEAD"):
            status, text = 405, "only GET"
        elif path == b"/health":
            text = self._probed.why_stuck()
            status = 503 if text else 200
        elif path == b"/ready":
            text = self._probed.why_not_ready()
            status = 503 if text else 200
        else:
            status, text = 404, "there is /health and /ready"
        body = f"{text or 'ok'}\n".encode()
        lines = (
            f"HTTP/1.1 {status} {_PHRASES[status]}",
            "Content-Type: text/plain; charset=utf-8",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode() + (b"" if method == b"HEAD" else body)

    def _close(self, connection: socket.socket) -> None:
        del self._open[connection]
        self._selector.unregister(connection)
        connection.close()


@contextlib.contextmanager
def answering(host: str, port: int | None, probed: Probed) -> Iterator[None]:
    """Answer probes about ``probed`` within the block; nothing without a ``port``."""
    if port is None:
        yield
        return
    with contextlib.closing(HealthServer(host, port, probed)):
        yield


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        what = f"cannot answer health checks on {bracketed(host)}:{port}"
        raise StartError(what, reason(error), "choose another --health-port, or correct --host") from error
    return listener
