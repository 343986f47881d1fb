"""What an attacker has: a running coordinator and a socket."""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.system import RunningSystem

PATIENCE_S = 30.0


@contextmanager
def coordinator(directory: Path, *flags: str) -> Iterator[RunningSystem]:
    """Run ``tandem coordinator`` with the built-in model, no worker, and ``flags``."""
    words = ("coordinator", "--port", "0", "--control-port", "0", *flags)
    with RunningSystem.running(directory / "coordinator.log", *words, until_ready=False) as system:
        yield system


def own_address() -> str:
    """Return an address of this machine that is not loopback; skip the test if there is none."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not ipaddress.ip_address(each.address).is_loopback:
                return each.address
    pytest.skip("this machine has no address but loopback")


def _answering(system: RunningSystem) -> Iterator[psutil.Process]:
    """Yield the processes that listen at ``system.url``."""
    port = urlsplit(system.url).port
    mine = psutil.Process(system.process.popen.pid)
    for each in (mine, *mine.children(recursive=True)):
        if any(place.laddr.port == port and place.status == psutil.CONN_LISTEN for place in each.net_connections()):
            yield each


def memory(system: RunningSystem) -> int:
    """Return the resident bytes of the process that listens at ``system.url``."""
    return max(each.memory_info().rss for each in _answering(system))


def processor_seconds(system: RunningSystem) -> float:
    """Return the processor time so far, in seconds, of the process that listens at ``system.url``."""
    return max(times.user + times.system for times in (each.cpu_times() for each in _answering(system)))


@dataclass
class RawAnswer:
    """One response as received."""

    raw: bytes
    version: str
    """The server's HTTP version, from the status line."""
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> Any:
        """Return the error's ``code``, after checking that the error has the usual shape."""
        assert self.headers["content-type"].startswith("application/json"), self.raw
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error["code"]


class RawConnection:
    """A raw connection to ``url``, to be used as a context manager."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=PATIENCE_S)
        self._stream = self._socket.makefile("rb")

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def reset_when_closed(self) -> None:
        """Make closing this connection send a reset at once, without waiting until sent data is delivered."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def answer(self, *, to_head: bool = False) -> RawAnswer:
        """Read the next response, interim ones (100 Continue) included. A response to HEAD has no body, whatever its
        length."""
        raw = line = self._stream.readline()
        assert line, "closed without an answer"
        headers: dict[str, str] = {}
        version, status, *_ = line.decode("latin-1").split()
        assert version in ("HTTP/1.0", "HTTP/1.1"), "whatever the client's is"
        while (line := self._stream.readline()) not in (b"\r\n", b""):
            raw += line
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = b"" if to_head else self._stream.read(int(headers.get("content-length", "0")))
        return RawAnswer(raw + body, version, int(status), headers, body)

    def closed(self) -> bool:
        """Wait until the server closes the connection; return False if it sends something first."""
        try:
            return self._stream.read(1) == b""
        except ConnectionResetError:
            return True


def ask(url: str, *parts: bytes) -> RawAnswer:
    """Send bytes on a new connection and return the answer."""
    with RawConnection(url) as connection:
        for part in parts:
            connection.send(part)
        return connection.answer(to_head=parts[0].startswith(b"HEAD "))


def request(method: str, path: str, *headers: str, host: str | None = "localhost", body: bytes = b"") -> bytes:
    """Return a well-formed HTTP/1.1 request."""
    lines: Sequence[str] = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host is not None else []), *headers]
    if body:
        lines = [*lines, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
