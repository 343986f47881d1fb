"""Malformed requests put none of their bytes into a log or an answer and cause no flood of log lines; no command shows
a key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.system import RunningSystem, tandem
from tests.leaked_keys import new_key
from tests.security.outside import RawConnection, ask, coordinator, request

STORM = 10_000
MOST_LINES = 4
"""Most log lines of a storm: the first, one per ten seconds, and one at the end."""


@dataclass
class Attacked:
    system: RunningSystem
    key: str


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    key = new_key()
    with coordinator(tmp_path_factory.mktemp("logs"), "--api-key", key, "--log-level", "debug") as system:
        yield Attacked(system, key)


def _with(*headers: bytes, start: bytes = b"POST /v1/completions HTTP/1.1") -> Callable[[bytes], bytes]:
    def make(key: bytes) -> bytes:
        lines = [start, b"Host: localhost", b"Authorization: Bearer KEY", *headers, b"", b""]
        return b"\r\n".join(lines).replace(b"KEY", key)

    return make


CHUNKED = b"Transfer-Encoding: chunked"
MALFORMED: dict[str, Callable[[bytes], bytes]] = {
    "control character in a header": _with(b"x-api-key: KEY\x01KEY"),
    "carriage return in a header": _with(b"x-api-key: KEY\rx: KEY"),
    "folded header": _with(b"x-api-key:", b" KEY"),
    "header without a colon": _with(b"KEY"),
    "bare line feeds": lambda key: b"GET / HTTP/1.1\nHost: localhost\nAuthorization: Bearer " + key + b"\n\n",
    "no version": _with(start=b"GET /KEY KEY"),
    "another version": _with(start=b"GET /KEY HTTP/9.9"),
    "an older version": _with(start=b"GET /KEY HTTP/0.9"),
    "a target with a version in it": lambda key: b"GET /v1/" + key + b"TTP/1.1\r\nHost: localhost\r\n\r\n",
    "an unknown method": _with(start=b"KEY / HTTP/1.1"),
    "HTTP/2": lambda key: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0" + key,
    "TLS": lambda key: bytes.fromhex("16030100a5010000a10303") + key * 10,
    "SSH": lambda key: b"SSH-2.0-" + key + b"\r\n",
    "bytes": lambda key: b"\0\xff" + key + b"\r\n\r\n",
    "a target that is no URL": _with(start=b"GET http://[KEY HTTP/1.1"),
    "a port that is no number": _with(start=b"GET http://KEY:xx/ HTTP/1.1"),
    "a host that is no name": _with(start=b"GET http://xn--a/KEY HTTP/1.1"),
    "a target of other bytes": _with(start=b"GET \xff\xfe/KEY HTTP/1.1"),
    "a long header": _with(b"x-api-key: " + b"KEY" * 2000),
    "a long target": lambda key: b"GET /" + key * 2000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "many headers": _with(*(b"x-%d: KEY" % at for at in range(400))),
    "two hosts": _with(b"Host: KEY"),
    "no host": lambda key: b"GET / HTTP/1.1\r\nAuthorization: Bearer " + key + b"\r\n\r\n",
    "two lengths": _with(b"Content-Length: 3", b"Content-Length: 4"),
    "a length and chunks": _with(b"Content-Length: 3", CHUNKED),
    "a length without end": _with(b"Content-Length: 99999999999999999999999999"),
    "a chunk without a size": lambda key: _with(CHUNKED)(key) + key + b"\r\n",
    "a chunk longer than it says": lambda key: _with(CHUNKED)(key) + b"2\r\n{}" + key + b"\r\n",
    "a chunk without end": lambda key: _with(CHUNKED)(key) + b"ffffffffffffffffff\r\n",
    "a malformed trailer": lambda key: _with(CHUNKED)(key) + b"2\r\n{}\r\n0\r\n" + key + b"\1\r\n\r\n",
    "garbage behind a good request": lambda key: request("GET", "/health") + b"\0" + key + b"\r\n\r\n",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_request_is_refused_without_a_byte_of_it(attacked: Attacked, what: str) -> None:
    key = attacked.key.encode()
    answer = ask(attacked.system.url, MALFORMED[what](key))
    assert answer.version == "HTTP/1.1" and answer.status == 400 and answer.code == "malformed_request"
    assert key not in answer.raw and b"aiohttp" not in answer.raw and b"Python" not in answer.raw
    text = attacked.system.process.text
    assert attacked.key not in text and "Traceback" not in text
    assert ask(attacked.system.url, request("GET", "/health")).status == 200


@pytest.mark.parametrize("rest", [b"%b\r\n", b"2\r\n{}%b\r\n", b"2\r\n{}\r\n0\r\n%b\1\r\n\r\n"])
def test_a_body_that_goes_wrong_later_is_refused_too(attacked: Attacked, rest: bytes) -> None:
    key = attacked.key.encode()
    with RawConnection(attacked.system.url) as connection:
        connection.send(_with(CHUNKED, b"Expect: 100-continue")(key))
        assert connection.answer().status == 100, "the body is being read"
        connection.send(rest % key)
        answer = connection.answer()
        assert answer.status == 400 and answer.code == "malformed_request" and key not in answer.raw
        assert connection.closed()
    text = attacked.system.process.text
    assert attacked.key not in text and "Traceback" not in text


def test_garbage_after_an_answer_is_answered_once(attacked: Attacked) -> None:
    with RawConnection(attacked.system.url) as connection:
        connection.send(request("GET", "/health"))
        assert connection.answer().status == 200
        connection.send(b"\0" + attacked.key.encode() + b"\r\n\r\n")
        assert connection.answer().code == "malformed_request"
        assert connection.closed()
    assert attacked.key not in attacked.system.process.text


@pytest.mark.slow
def test_a_storm_of_malformed_requests_is_a_handful_of_lines_with_a_count(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    key = new_key()
    data = b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + key.encode() + b"\x01\r\n\r\n"
    with coordinator(tmp_path_factory.mktemp("storm"), "--api-key", key, "--log-level", "debug") as system:
        for _ in range(STORM):
            assert ask(system.url, data).status == 400
    lines = [line for line in system.process.text.splitlines() if "malformed" in line]
    counted = sum(int(count) for count in re.findall(r" (\d+) more malformed requests", "\n".join(lines)))
    assert counted + 1 == STORM
    seconds = _span_s(lines)
    assert len(lines) <= MOST_LINES + seconds / 10, lines
    assert len(system.process.text.splitlines()) < len(lines) + 6


def test_clients_that_hang_up_are_a_handful_of_lines_with_a_count_and_without_their_ids(tmp_path: Path) -> None:
    key, hang_ups = new_key(), 300
    head = request("POST", "/tokenize", "Content-Length: 100", "Expect: 100-continue", f"X-Request-Id: {key}")
    with coordinator(tmp_path) as system:
        for _ in range(hang_ups):
            with RawConnection(system.url) as connection:
                connection.send(head)
                assert connection.answer().status == 100, "its body is waited for"
        assert ask(system.url, request("GET", "/health")).status == 200
    lines = [line for line in system.process.text.splitlines() if " disconnected" in line]
    counted = sum(int(count) for count in re.findall(r" (\d+) more clients disconnected", "\n".join(lines)))
    assert counted + 1 == hang_ups and f"{counted} POST /tokenize" in lines[-1]
    assert len(lines) <= MOST_LINES + _span_s(lines) / 10, lines
    assert key not in system.process.text


def _span_s(lines: list[str]) -> float:
    """Return the seconds from the first of these log lines to the last."""
    clocks = [line[:8].split(":") for line in (lines[0], lines[-1])]
    first, last = (int(hour) * 3600 + int(minute) * 60 + int(second) for hour, minute, second in clocks)
    return (last - first) % 86_400


COMMANDS = {
    "chat": ("chat", "hello"),
    "scale": ("scale", "--decode", "2"),
    "eval": ("eval",),
    "bench serve": ("bench", "serve", "--num-prompts", "1"),
    "bench goodput": ("bench", "goodput", "--num-prompts", "1"),
}


@pytest.mark.parametrize("wrong", ["KEY\x01", "KEY\nx: y", "KEY\u20ac"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_no_header_can_carry_is_refused_unseen(attacked: Attacked, command: str, wrong: str) -> None:
    key = new_key()
    done = tandem(*COMMANDS[command], "--url", attacked.system.url, "--api-key", wrong.replace("KEY", key))
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert key not in done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_key_is_not_repeated(attacked: Attacked, command: str) -> None:
    key = new_key()
    done = tandem(*COMMANDS[command], "--url", attacked.system.url, "--api-key", key, "--debug-nothing")
    assert done.returncode != 0 and key not in done.stdout + done.stderr, "the flag is unknown"
    done = tandem(*COMMANDS[command], "--url", attacked.system.url, "--api-key", key)
    assert done.returncode != 0 and key not in done.stdout + done.stderr
    done = tandem(*COMMANDS[command], "--url", f"http://user:{key}@127.0.0.1:9/v1?api_key={key}")
    assert done.returncode != 0 and key not in done.stdout + done.stderr


def test_a_header_with_a_key_is_not_repeated(attacked: Attacked) -> None:
    key = new_key()
    for word in (f"Authorization Bearer {key}", f"Authorization=Bearer {key}"):
        done = tandem("bench", "serve", "--url", attacked.system.url, "--num-prompts", "1", "--header", word)
        assert done.returncode != 0 and key not in done.stdout + done.stderr
    done = tandem("config", "bench", "serve", "--header", f"Authorization=Bearer {key}", "--api-key", key)
    assert done.returncode == 0 and key not in done.stdout + done.stderr
