"""Oversized bodies and headers, and unsupported protocols, are rejected at once with an error in the usual shape."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.system import RunningSystem
from tests.leaked_keys import new_key
from tests.pace import scaled
from tests.security.outside import RawConnection, ask, coordinator, memory, processor_seconds, request

LIMIT = 64 << 10
AT_ONCE_S = scaled(5.0)
"""Seconds within which a rejection must come."""
GENERATE = "/v1/completions"
MIB = 1 << 20
HEAD = 64 << 10
"""Most bytes of the request line and all headers together."""
KEY = new_key()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    flags = ("--api-key", KEY, "--max-body-bytes", str(LIMIT), "--client-timeout", "60")
    with coordinator(tmp_path_factory.mktemp("limits"), *flags) as system:
        yield system


def _post(*headers: str, path: str = GENERATE) -> bytes:
    return request("POST", path, f"Authorization: Bearer {KEY}", *headers)


@pytest.mark.parametrize("length", [LIMIT + 1, 99_000_000_000, (1 << 63) - 1])
@pytest.mark.parametrize(
    "path", [GENERATE, "/v1/chat/completions", "/tokenize", "/admin/drain", "/v1/models", "/nowhere"]
)
def test_a_body_that_announces_too_much_is_refused_before_it_comes(
    server: RunningSystem, path: str, length: int
) -> None:
    for expect in ((), ("Expect: 100-continue",)):
        with RawConnection(server.url) as connection:
            began = time.monotonic()
            connection.send(_post(f"Content-Length: {length}", *expect, path=path))
            answer = connection.answer()  # 413, not 100
            assert time.monotonic() - began < AT_ONCE_S
            assert answer.status == 413 and answer.code == "request_too_large"
            assert answer.headers["connection"] == "close"


def test_one_that_sends_it_nonetheless_reads_why(server: RunningSystem) -> None:
    with RawConnection(server.url) as connection:
        body = bytes(4 * LIMIT)
        connection.send(_post(f"Content-Length: {len(body)}") + body)
        assert connection.answer().code == "request_too_large"
        assert connection.closed()


def test_the_limit_itself_is_taken(server: RunningSystem) -> None:
    body = b'{"prompt": 1}'.ljust(LIMIT)
    assert ask(server.url, _post(f"Content-Length: {LIMIT}") + body).status == 400, "it was read"


def test_chunks_are_refused_as_soon_as_they_are_too_many(server: RunningSystem) -> None:
    with RawConnection(server.url) as connection:
        connection.send(_post("Transfer-Encoding: chunked", "Expect: 100-continue"))
        assert connection.answer().status == 100
        began = time.monotonic()
        for _ in range(LIMIT // 1024 + 1):
            connection.send(b"400\r\n" + bytes(1024) + b"\r\n")
        answer = connection.answer()
        assert answer.status == 413 and answer.code == "request_too_large" and answer.headers["connection"] == "close"
        assert time.monotonic() - began < AT_ONCE_S
        assert connection.closed()


def test_a_key_is_asked_for_before_a_body(server: RunningSystem) -> None:
    for headers in (("Content-Length: 99000000000",), ("Content-Length: 100", "Expect: 100-continue")):
        with RawConnection(server.url) as connection:
            connection.send(request("POST", GENERATE, *headers))
            assert connection.answer().code == "invalid_api_key"
            assert connection.closed()


def test_a_body_that_is_wanted_is_asked_for_once(server: RunningSystem) -> None:
    body = b'{"prompt": 1}'
    with RawConnection(server.url) as connection:
        for _ in range(2):  # the connection is kept
            connection.send(_post(f"Content-Length: {len(body)}", "Expect: 100-Continue"))
            assert connection.answer().status == 100
            connection.send(body)
            assert connection.answer().status == 400


def test_a_body_that_comes_unasked_needs_no_word(server: RunningSystem) -> None:
    body = b'{"prompt": 1}'
    with RawConnection(server.url) as connection:
        connection.send(_post(f"Content-Length: {len(body)}", "Expect: 100-continue") + body)
        assert connection.answer().status in (100, 400)


def test_where_no_body_is_read_none_is_asked_for(server: RunningSystem) -> None:
    with RawConnection(server.url) as connection:
        connection.send(
            request("GET", "/v1/models", f"Authorization: Bearer {KEY}", "Content-Length: 5", "Expect: 100-continue")
        )
        assert connection.answer().status == 200
        assert connection.closed(), "what comes next may be that body"


def test_other_expectations_are_refused_unseen(server: RunningSystem) -> None:
    secret = new_key()
    for path in (GENERATE, "/nowhere"):
        answer = ask(server.url, _post(f"Expect: {secret}", "Content-Length: 2", path=path))
        assert answer.status == 417 and answer.code == "unsupported_expectation"
        assert secret.encode() not in answer.raw


def test_http_1_0_gets_the_same_errors_and_no_interim_answer(server: RunningSystem) -> None:
    key = f"Authorization: Bearer {KEY}\r\n"
    for data, status in (
        ("GET /v1/models HTTP/1.0\r\n\r\n", 401),
        (f"GET /nowhere HTTP/1.0\r\n{key}\r\n", 404),
        (f"PUT /v1/models HTTP/1.0\r\n{key}\r\n", 405),
        (f"POST {GENERATE} HTTP/1.0\r\n{key}Content-Length: 99000000000\r\n\r\n", 413),
        (f"POST {GENERATE} HTTP/1.0\r\n{key}Content-Length: 2\r\nExpect: 100-continue\r\n\r\n{{}}", 400),
        (f"GET /v1/models HTTP/1.0\r\n{key}x: \x01\r\n\r\n", 400),
        ("GET /ready HTTP/1.0\r\n\r\n", 503),
    ):
        with RawConnection(server.url) as connection:
            connection.send(data.encode())
            answer = connection.answer()
            assert answer.status == status and answer.code and KEY.encode() not in answer.raw
            assert answer.version == ("HTTP/1.1" if "\x01" in data else "HTTP/1.0"), "of what can be read"
            assert connection.closed()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x" * 200])
def test_compressed_bodies_are_not_unpacked(server: RunningSystem, encoding: str) -> None:
    answer = ask(server.url, _post(f"Content-Encoding: {encoding}", "Content-Length: 9") + b"\x1f\x8b\x08aaaaaa")
    assert answer.status in (400, 415) and answer.code


def _bomb(gibibytes: int) -> bytes:
    """Return a gzip file that unpacks to ``gibibytes`` GiB of zeros, about a thousand times its size. It repeats one
    gzip member, which makes it quick to create."""
    packer = zlib.compressobj(9, wbits=31)
    return (packer.compress(bytes(16 * MIB)) + packer.flush()) * (64 * gibibytes)


def test_a_compressed_body_that_is_drained_costs_others_no_time(tmp_path: Path) -> None:
    body = _bomb(1)
    with coordinator(tmp_path, "--api-key", KEY) as system:
        for head, status in ((request("GET", "/health"), 200), (request("POST", GENERATE), 401), (_post(), 415)):
            encoded = f"Content-Encoding: gzip\r\nContent-Length: {len(body) + 1}\r\n\r\n".encode()
            with RawConnection(system.url) as attacker, RawConnection(system.url) as other:
                before = processor_seconds(system)
                attacker.send(head[:-2] + encoded + body)
                assert attacker.answer().status == status
                other.send(request("GET", "/health"))
                assert other.answer().status == 200
                attacker.send(b"\0" + request("GET", "/health"))
                assert attacker.answer().status == 200, "all of it was received"
                assert processor_seconds(system) - before < 0.4, "unpacking takes longer"


SMALL_CHUNKS = {
    "read": (_post(), {400}),
    "dropped: no key": (request("POST", GENERATE), {400, 401}),
    "dropped: no body wanted": (request("GET", "/health"), {400, 200}),
    "behind another request": (request("GET", "/health") + _post(), {200}),
}
"""Request heads, and the statuses allowed for the first answer: the handler may answer before there are too many
chunks."""


@pytest.mark.parametrize("place", SMALL_CHUNKS)
def test_a_body_of_many_small_chunks_is_refused_and_costs_others_no_time(tmp_path: Path, place: str) -> None:
    heads, statuses = SMALL_CHUNKS[place]
    with coordinator(tmp_path, "--api-key", KEY) as system, RawConnection(system.url) as attacker:
        before = processor_seconds(system)
        # further bytes are discarded for a while, then the server closes the connection
        with contextlib.suppress(ConnectionError):
            attacker.send(heads[:-2] + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 500_000)
        assert attacker.answer().status in statuses
        if place == "behind another request":
            assert attacker.answer().status == 400
        assert attacker.closed()
        assert processor_seconds(system) - before < 0.4, "parsing them takes longer"


@pytest.mark.parametrize(("count", "size"), [(1024, 1), (1200, 50)])
def test_a_body_of_a_few_small_chunks_is_taken(server: RunningSystem, count: int, size: int) -> None:
    body = b'{"prompt": "a"}'.ljust(count * size)
    chunks = b"".join(b"%x\r\n%b\r\n" % (size, body[at : at + size]) for at in range(0, len(body), size))
    with RawConnection(server.url) as connection:
        connection.send(_post("Transfer-Encoding: chunked", path="/tokenize") + chunks + b"0\r\n\r\n")
        assert connection.answer().status == 200


def test_a_plain_body_that_is_refused_early_is_drained_until_its_sender_reads_why(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--api-key", KEY) as system, RawConnection(system.url) as connection:
        for _ in range(2):
            connection.send(request("POST", GENERATE, body=bytes(8 * MIB)))
            assert connection.answer().code == "invalid_api_key"


def test_no_answer_names_a_version(server: RunningSystem) -> None:
    for data in (
        request("GET", "/health"), request("GET", "/v1/models"),
        request("GET", "/v1/models", f"Authorization: Bearer {KEY}"),
        request("GET", "/metrics"), request("OPTIONS", "*"), b"\0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0",
        _post("Content-Length: 99000000000"), _post("Expect: x"),
    ):  # fmt: skip
        answer = ask(server.url, data)
        assert answer.headers["server"] == "tandem"
        assert b"aiohttp" not in answer.raw and b"Python/" not in answer.raw


@pytest.mark.parametrize("host", ["xn--a", "xn--a.b:80", "xn--" + "a" * 59])
def test_a_target_of_which_no_request_can_be_made_is_refused_on_a_used_connection_too(
    server: RunningSystem, host: str
) -> None:
    with RawConnection(server.url) as connection:
        connection.send(request("GET", "/health"))
        assert connection.answer().status == 200
        connection.send(request("GET", f"http://{host}/health") + request("GET", "/health"))
        answer = connection.answer()
        assert answer.status == 400 and answer.code == "malformed_request" and host.encode() not in answer.raw
        assert connection.closed()


def test_a_flood_of_bytes_after_the_answer_is_cut(server: RunningSystem) -> None:
    """The server reads on for a moment, so that the sender can read the answer, but not for ever."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as sender:
        sender.sendall(_post("Content-Length: 99000000000"))
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 30:
                sender.sendall(bytes(1 << 16))
        assert time.monotonic() - began < 2 + AT_ONCE_S


@pytest.mark.parametrize("version", ["HTTP/0.9", "HTTP/1.2", "HTTP/2.0", "HTTP/9.9", "RTSP/2.0", "ICE/1.0"])
@pytest.mark.parametrize("used", [False, True])
def test_other_versions_than_those_spoken_are_refused_in_one_that_is(
    server: RunningSystem, used: bool, version: str
) -> None:
    with RawConnection(server.url) as connection:
        if used:
            connection.send(request("GET", "/health"))
            assert connection.answer().status == 200
        connection.send(request("GET", "/health").replace(b"HTTP/1.1", version.encode()))
        answer = connection.answer()
        assert answer.status == 400 and answer.code == "malformed_request"
        assert answer.version == "HTTP/1.1" and answer.headers["connection"] == "close"
        assert connection.closed()


# -- heads ------------------------------------------------------------------------------------------------------------


def _headers(size: int) -> list[str]:
    """Return headers of ``size`` bytes together, none of which is too long by itself."""
    lines = []
    while size > 0:
        name = f"x-{len(lines)}: "
        lines.append(name + "a" * (min(size, 16_000) - len(name) - 2))
        size -= 16_000
    return lines


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size", [HEAD + 1000, 30 * HEAD])
def test_headers_that_are_too_long_together_are_refused_before_a_key_is_asked_for(
    server: RunningSystem, size: int, whole: bool
) -> None:
    head = request("GET", "/v1/models", *_headers(size))
    with RawConnection(server.url) as connection:
        began = time.monotonic()
        connection.send(head if whole else head[:-2])
        answer = connection.answer()
        assert answer.status == 400 and answer.code == "malformed_request"
        assert f"{HEAD:,} bytes" in answer.json["error"]["message"]
        assert connection.closed()
        assert time.monotonic() - began < 2 + AT_ONCE_S


def test_those_of_a_later_request_are_too(server: RunningSystem) -> None:
    with RawConnection(server.url) as connection:
        for size, status in ((HEAD - 1000, 401), (HEAD - 1000, 401), (HEAD + 1000, 400)):
            connection.send(request("GET", "/v1/models", *_headers(size)))
            assert connection.answer().status == status
        assert connection.closed()


def test_bodies_do_not_count_as_headers(server: RunningSystem) -> None:
    body = b'{"prompt": 1}'.ljust(LIMIT)
    with RawConnection(server.url) as connection:
        for _ in range(3):
            connection.send(_post(f"Content-Length: {LIMIT}", *_headers(HEAD - 2000)) + body)
            assert connection.answer().code != "malformed_request"
            connection.send(_post("Transfer-Encoding: chunked"))
            for at in range(0, LIMIT, 64):
                connection.send(b"40\r\n" + body[at : at + 64] + b"\r\n")
            connection.send(b"0\r\n\r\n")
            assert connection.answer().code != "malformed_request"


def test_headers_behind_a_body_are_bounded_as_well(server: RunningSystem) -> None:
    with RawConnection(server.url) as connection:
        connection.send(_post("Transfer-Encoding: chunked", "Expect: 100-continue"))
        assert connection.answer().status == 100, "the body is being read"
        connection.send(b"2\r\n{}\r\n0\r\n" + "\r\n".join(_headers(20 * HEAD)).encode())
        answer = connection.answer()
        assert answer.status == 400 and answer.code == "malformed_request"


def test_headers_without_end_fill_no_memory(server: RunningSystem) -> None:
    before = memory(server)
    data = request("GET", "/version", *_headers(30 * HEAD))[:-2]
    with contextlib.ExitStack() as open_ones:
        for _ in range(100):
            connection = open_ones.enter_context(RawConnection(server.url))
            connection.send(data)
            assert connection.answer().status == 400
        assert memory(server) - before < 40 * MIB, "188 MiB were sent"


def test_more_headers_than_anybody_sends_are_refused(server: RunningSystem) -> None:
    for count, status in ((128, 401), (129, 400)):
        headers = (f"x-{at}: y" for at in range(count - 1))  # Host is one more
        assert ask(server.url, request("GET", "/v1/models", *headers)).status == status


# -- answers that are not read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", pytest.param("/v1/models", marks=pytest.mark.whole), "/nowhere"])
def test_a_client_that_reads_no_small_answers_is_cut_and_one_that_reads_slowly_is_not(
    tmp_path: Path, path: str
) -> None:
    asked = request("GET", path) * 500
    with coordinator(tmp_path, "--client-timeout", "1") as system:
        port = urlsplit(system.url).port or 0
        with socket.socket() as unread, socket.socket() as slow:
            for each in (unread, slow):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                each.connect(("127.0.0.1", port))
                each.setblocking(False)
            give_up = time.monotonic() + scaled(20.0)
            while time.monotonic() < give_up:
                try:
                    for each in (slow, unread):
                        with contextlib.suppress(BlockingIOError):
                            each.send(asked)
                    with contextlib.suppress(BlockingIOError):
                        assert slow.recv(2048)
                except ConnectionError:
                    break
                time.sleep(0.02)
            else:
                pytest.fail("the connection is kept")
            slow.setblocking(True)
            assert slow.recv(2048), "the other one is kept"
        shown = ask(system.url, request("GET", "/metrics", "Connection: close")).body.decode()
        assert 'tandem_clients_cut_off_total{while="reading"} 1.0' in shown


# -- connections that have ended --------------------------------------------------------------------------------------


def test_connections_that_were_reset_are_forgotten_before_the_next_look_at_connections(tmp_path: Path) -> None:
    burst = request("GET", "/v1/models", *_headers(HEAD - 1000)) * 3 + _post("Content-Length: 8000000") + bytes(100_000)
    with coordinator(tmp_path, "--api-key", KEY, "--client-timeout", "600") as system:
        for connections in (300, 1_500):
            before = memory(system)
            for _ in range(connections):
                with RawConnection(system.url) as connection:
                    connection.send(request("GET", "/health"))
                    assert connection.answer().status == 200
                    connection.reset_when_closed()
                    connection.send(burst)
        assert ask(system.url, request("GET", "/health")).status == 200
        assert memory(system) - before < 12 * MIB, "dead connections are held"


# -- bodies that do not end -------------------------------------------------------------------------------------------


def test_heads_that_stay_unfinished_are_bounded_together_and_others_are_served(tmp_path: Path) -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections, head = 1_200, request("GET", "/health", *_headers(HEAD - 2000))
    if most != resource.RLIM_INFINITY and most < connections + 200:
        pytest.skip(f"only {most} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, connections + 200), most))  # the server inherits it
    try:
        with coordinator(tmp_path) as system, contextlib.ExitStack() as open_ones:
            before = memory(system)
            for _ in range(connections):
                last = open_ones.enter_context(RawConnection(system.url))
                last.send(head[:-2])
            assert last.answer().code == "server_is_overloaded"
            assert memory(system) - before < 100 * MIB, "72 MiB were sent, which take twice that"
            for whole in (
                request("GET", "/health", *_headers(6000)),
                request("POST", "/tokenize", body=b'{"prompt": "x"}'),
            ):
                assert ask(system.url, whole).status == 200
            with RawConnection(system.url) as connection:
                connection.send(request("GET", "/health")[:-10])
                time.sleep(0.05)
                connection.send(request("GET", "/health")[-10:])
                assert connection.answer().status == 200
            open_ones.close()
            with RawConnection(system.url) as connection:  # the closed connections' share of the budget is free again
                connection.send(head[:-2])
                time.sleep(0.05)
                connection.send(head[-2:])
                assert connection.answer().status == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


def test_small_bodies_that_stay_unfinished_are_bounded_and_others_are_served(tmp_path: Path) -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections, size = 6_000, 16_383
    if most != resource.RLIM_INFINITY and most < connections + 200:
        pytest.skip(f"only {most} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, connections + 200), most))  # the server inherits it
    try:
        with coordinator(tmp_path) as system, contextlib.ExitStack() as open_ones:
            flood = [open_ones.enter_context(RawConnection(system.url)) for _ in range(connections)]
            for connection in flood:
                connection.send(request("POST", "/tokenize", f"Content-Length: {size + 1}") + b" " * size)
            assert flood[-1].answer().status == 429
            for body in (b'{"prompt": "x"}', b'{"prompt": "x"}'.ljust(100_000)):
                answer = ask(system.url, request("POST", "/tokenize", f"Content-Length: {len(body)}") + body)
                assert answer.status == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
