"""The health endpoints of a worker."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from common.core.errors import StartError
from common.worker import health
from common.worker.health import MAX_CONNECTIONS, MAX_HEAD_BYTES, HealthServer, answering
from tests.fakes.oracle import OracleEngine
from tests.pace import scaled
from tests.unit.workers import Bench


class Probed:
    stuck = unready = ""

    def why_stuck(self) -> str:
        return self.stuck

    def why_not_ready(self) -> str:
        return self.unready


@pytest.fixture
def probed() -> Probed:
    return Probed()


@pytest.fixture
def server(probed: Probed) -> Iterator[HealthServer]:
    with contextlib.closing(HealthServer("127.0.0.1", 0, probed)) as server:
        yield server


def dial(server: HealthServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=scaled(10))


def said(client: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    parts = []
    while part := client.recv(4096):
        parts.append(part)
    return b"".join(parts)


def ask(server: HealthServer, head: bytes) -> tuple[int, bytes]:
    """Send one request; return the status and the body."""
    with dial(server) as client:
        client.sendall(head)
        answer = said(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Connection: close" in head and b"Content-Length: " in head
    return int(head.split()[1]), body


def get(server: HealthServer, path: str) -> int:
    return ask(server, f"GET {path} HTTP/1.1\r\nHost: 10.0.0.7:8002\r\nUser-Agent: kube-probe/1.34\r\n\r\n".encode())[0]


def test_both_answers_follow_the_worker(server: HealthServer, probed: Probed) -> None:
    assert get(server, "/health") == get(server, "/ready") == get(server, "/ready?verbose") == 200
    probed.unready = "this worker drains"
    assert get(server, "/health") == 200
    assert ask(server, b"GET /ready HTTP/1.0\r\n\r\n") == (503, b"this worker drains\n")
    probed.stuck = "hangs"
    assert get(server, "/health") == 503
    assert ask(server, b"HEAD /health HTTP/1.1\r\n\r\n") == (503, b"")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"POST /health HTTP/1.1\r\n\r\n", 405),
        (b"\r\n\r\n", 405),
        (b"\xff\xfe\n\n", 405),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES, 431),
    ],
)
def test_other_requests_are_refused(server: HealthServer, head: bytes, status: int) -> None:
    assert ask(server, head)[0] == status
    assert get(server, "/health") == 200


def test_clients_that_send_nothing_do_not_delay_others_and_are_closed(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial(server)) for _ in range(2 * MAX_CONNECTIONS)]
        assert get(server, "/health") == 200
        for client in silent[:MAX_CONNECTIONS]:  # the oldest ones had to make room
            assert said(client) == b""
        assert len(server._open) <= MAX_CONNECTIONS
    monkeypatch.setattr(health, "PATIENCE_S", 0.05)
    with dial(server) as client:
        client.sendall(b"GET /hea")
        assert said(client) == b""


def test_a_port_in_use_is_an_error_in_words(server: HealthServer, probed: Probed) -> None:
    with pytest.raises(StartError, match="cannot answer health checks") as error:
        HealthServer("127.0.0.1", server.port, probed)
    assert "--health-port" in error.value.todo


def test_without_a_port_nothing_listens(probed: Probed) -> None:
    with answering("127.0.0.1", None, probed):
        pass


def test_a_worker_is_ready_while_it_has_joined_and_does_not_drain(bench: Bench) -> None:
    worker = bench.add("decode", OracleEngine(64))
    bench.until(lambda: worker.membership.joined and worker.membership.connected)
    assert worker.why_not_ready() == worker.why_stuck() == ""
    worker.membership._welcome, welcome = None, worker.membership._welcome
    assert "has not joined" in worker.why_not_ready() and not worker.why_stuck()
    worker.membership._welcome = welcome
    worker.drain(60.0)
    assert "drains" in worker.why_not_ready() and not worker.why_stuck()


def test_a_worker_is_stuck_if_one_turn_takes_far_longer_than_its_step(bench: Bench) -> None:
    worker = bench.add("decode", OracleEngine(64))
    worker.membership.turning_since = time.monotonic() - 31.0
    assert "31 s" in worker.why_stuck()
    worker.membership.expected_s = 4.0
    assert not worker.why_stuck()
    worker.membership.turning_since = None
    worker.membership.expected_s = 0.0
    assert not worker.why_stuck()
