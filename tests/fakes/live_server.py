"""A server that shows events as ``GET /admin/events`` of a coordinator does, one by one as a test sends them."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.pace import scaled

HANG_UP = ("", {})
"""Sent in place of an event, it ends the connection."""


def worker(name: str, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "id": name, "role": name.partition("-")[0], "state": "ready", "device": "cpu", "running": 3, "waiting": 1,
        "kv_blocks": {"total": 100, "free": 50, "cached": 25, "held": 25}, "heard_ms": 20, "gpus": [],
    }  # fmt: skip
    return known | changes


def system(**changes: Any) -> dict[str, Any]:
    latency = {"p50": 12.25, "p90": 40.0, "p99": 80.5}
    known: dict[str, Any] = {
        "t": 1764571234.5, "model": "tiny", "version": "1.0", "draining": False, "running": 6,
        "workers": [worker("prefill-0"), worker("decode-0")], "absent": [],
        "links": [{"from": "prefill-0", "to": "decode-0", "transport": "shm", "mb_s": 812.0, "ms": 0.31}],
        "queue": {"requests": 2, "tokens": 4096},
        "rates": {"requests_s": 1.5, "prompt_tokens_s": 1536.0, "output_tokens_s": 190.0},
        "ttft_ms": latency, "itl_ms": latency,
    }  # fmt: skip
    return known | changes


def request(name: str, **changes: Any) -> dict[str, Any]:
    spans = [
        {"name": "prefill", "worker": "prefill-0", "start_ms": 1.0, "end_ms": 9.0},
        {"name": "decode", "worker": "decode-0", "start_ms": 9.0, "end_ms": None},
    ]
    known: dict[str, Any] = {
        "id": name, "state": "decoding", "path": "disagg", "prompt_tokens": 1024, "cached_tokens": 16,
        "output_tokens": 7, "ttft_ms": 34.5, "total_ms": None, "retries": 0, "migrations": 0, "error": None,
        "spans": spans,
    }  # fmt: skip
    return known | changes


class LiveServer:
    """The server. ``requests``: the answer of /admin/requests, the newest first. ``key``: the only one accepted, None
    for no key. ``connections``: how often the events were opened."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = system()
        self.requests: list[dict[str, Any]] = []
        self.key: str | None = None
        self.status = 200
        self.url = ""
        self._queues: list[queue.Queue[tuple[str, dict[str, Any]]]] = []
        self._connected = threading.Condition()

    @property
    def connections(self) -> int:
        return len(self._queues)

    def connect(self) -> queue.Queue[tuple[str, dict[str, Any]]]:
        """Return the events of a new connection."""
        with self._connected:
            self._queues.append(queue.Queue())
            self._connected.notify_all()
            return self._queues[-1]

    def until_connected(self, count: int) -> None:
        """Wait until the events were opened ``count`` times in all."""
        with self._connected:
            assert self._connected.wait_for(lambda: self.connections >= count, scaled(30)), "too few connections"

    def send(self, event: str, data: dict[str, Any]) -> None:
        """Send an event over all connections."""
        for events in self._queues:
            events.put((event, data))

    def hang_up(self) -> None:
        """End all connections."""
        self.send(*HANG_UP)

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[LiveServer]:
        server = cls()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                    self._answer(401, {"error": {"message": "no key"}})
                elif self.path.startswith("/admin/requests"):
                    self._answer(200, {"requests": server.requests})
                elif self.path != "/admin/events" or server.status != 200:
                    self._answer(404 if server.status == 200 else server.status, {"error": {"message": "refused"}})
                else:
                    self._follow()

            def _follow(self) -> None:
                events = server.connect()
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                event, data = "system", server.first
                try:
                    while (event, data) != HANG_UP:
                        self.wfile.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())
                        self.wfile.flush()
                        event, data = events.get()
                except OSError:  # the client has left
                    pass

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            server.url = f"http://127.0.0.1:{http.server_address[1]}"
            http.daemon_threads = False
            thread = threading.Thread(target=http.serve_forever, args=(0.02,))
            thread.start()
            try:
                yield server
            finally:
                server.hang_up()
                http.shutdown()
                thread.join()
