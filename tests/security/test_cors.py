"""Only web pages of the origins in ``--allowed-origins`` may call the API and read its answers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.system import RunningSystem, tandem
from tests.leaked_keys import new_key
from tests.security.outside import RawAnswer, ask, coordinator, request

PAGE, OTHER = "https://a.example", "http://b.example:3000"
EVIL = "https://evil.example"
KEY = new_key()


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    flags = ("--allowed-origins", f'["{PAGE}"]', "--allowed-origins", OTHER, "--api-key", KEY)
    with coordinator(tmp_path_factory.mktemp("named"), *flags) as system:
        yield system


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    with coordinator(tmp_path_factory.mktemp("keyless"), "--allowed-origins", f"{PAGE},{OTHER}") as system:
        yield system


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    with coordinator(tmp_path_factory.mktemp("everyone"), "--allowed-origins", "*", "--api-key", KEY) as system:
        yield system


def preflight(system: RunningSystem, origin: str, path: str = "/v1/chat/completions", *headers: str) -> RawAnswer:
    wanted = ("Access-Control-Request-Method: POST", *headers)
    return ask(system.url, request("OPTIONS", path, f"Origin: {origin}", *wanted))


def allowed(answer: RawAnswer) -> str | None:
    assert "access-control-allow-credentials" not in answer.headers
    return answer.headers.get("access-control-allow-origin")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models", "/tokenize", "/metrics", "/health", "/admin/drain"]
)
@pytest.mark.parametrize("origin", [PAGE, OTHER])
def test_a_preflight_is_answered_without_a_key(
    named: RunningSystem, keyless: RunningSystem, origin: str, path: str
) -> None:
    asked = "authorization,content-type,x-stainless-os"
    for system in (named, keyless):
        answer = preflight(system, origin, path, f"Access-Control-Request-Headers: {asked}")
        assert answer.status == 204 and answer.body == b"" and allowed(answer) == origin
        assert answer.headers["access-control-allow-methods"] == "GET, POST, OPTIONS"
        assert answer.headers["access-control-allow-headers"] == asked
        assert answer.headers["access-control-max-age"] == "600"
        assert "Origin" in answer.headers["vary"] and "Access-Control-Request-Headers" in answer.headers["vary"]


@pytest.mark.parametrize(
    "origin", [EVIL, "null", f"{PAGE}.evil.example", "http://a.example", f"{PAGE}:444", "*", "", PAGE.upper()]
)
def test_another_origin_gets_no_leave(named: RunningSystem, keyless: RunningSystem, origin: str) -> None:
    answer = preflight(named, origin)
    assert answer.code == "invalid_api_key" and allowed(answer) is None and answer.headers["vary"] == "Origin"
    answer = preflight(keyless, origin)
    assert answer.code == "forbidden_origin" and allowed(answer) is None and answer.headers["vary"] == "Origin"
    answer = ask(named.url, request("GET", "/v1/models", f"Origin: {origin}", f"x-api-key: {KEY}"))
    assert answer.status == 200 and allowed(answer) is None, (
        "a key is a key; the browser keeps the answer from the page"
    )


def test_strange_header_names_are_not_repeated(named: RunningSystem) -> None:
    for strange in ("<script>", "a" * 3000, "a,,b", "a b"):
        answer = preflight(named, PAGE, "/v1/models", f"Access-Control-Request-Headers: {strange}")
        assert answer.status == 204 and strange not in answer.headers["access-control-allow-headers"]
        assert "Authorization" in answer.headers["access-control-allow-headers"]


def test_errors_can_be_read_too(named: RunningSystem) -> None:
    for data, status in (
        (request("GET", "/v1/models", f"Origin: {PAGE}"), 401),
        (request("GET", "/nowhere", f"Origin: {PAGE}", f"x-api-key: {KEY}"), 404),
        (request("PUT", "/v1/models", f"Origin: {PAGE}", f"x-api-key: {KEY}"), 405),
        (request("OPTIONS", "/v1/models", f"Origin: {PAGE}", f"x-api-key: {KEY}"), 405),
        (
            request("POST", "/v1/completions", f"Origin: {PAGE}", f"x-api-key: {KEY}", "Content-Length: 99000000000"),
            413,
        ),
        (request("POST", "/v1/completions", f"Origin: {PAGE}", f"x-api-key: {KEY}", body=b"{"), 400),
        (request("GET", "/ready", f"Origin: {PAGE}"), 503),
    ):
        answer = ask(named.url, data)
        assert answer.status == status and allowed(answer) == PAGE
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "retry-after-ms"} <= set(exposed)


def test_caches_keep_origins_apart(named: RunningSystem, everyone: RunningSystem) -> None:
    for headers, expected in (((), None), ((f"Origin: {PAGE}",), PAGE), ((f"Origin: {EVIL}",), None)):
        answer = ask(named.url, request("GET", "/", f"x-api-key: {KEY}", *headers))
        assert allowed(answer) == expected and answer.headers["vary"] == "Accept, Origin"
    answer = ask(everyone.url, request("GET", "/", f"x-api-key: {KEY}", f"Origin: {EVIL}"))
    assert allowed(answer) == "*" and answer.headers["vary"] == "Accept", "the same for all"


def test_all_origins_when_said(everyone: RunningSystem) -> None:
    for origin in (PAGE, EVIL, "null"):
        answer = preflight(everyone, origin)
        assert answer.status == 204 and allowed(answer) == "*"
    assert allowed(ask(everyone.url, request("GET", "/v1/models", f"Origin: {EVIL}"))) == "*"


def test_a_server_that_every_page_may_use_says_so(
    tmp_path_factory: pytest.TempPathFactory, everyone: RunningSystem
) -> None:
    with coordinator(tmp_path_factory.mktemp("warned"), "--allowed-origins", "*") as system:
        assert ask(system.url, request("GET", "/v1/models", f"Origin: {EVIL}")).status == 200
        assert "warning: any web page" in system.process.text
    assert "any web page" not in everyone.process.text


def test_two_origins_are_none(named: RunningSystem, keyless: RunningSystem) -> None:
    for system in (named, keyless):
        answer = preflight(system, PAGE, "/v1/models", f"Origin: {EVIL}")
        assert answer.status in (401, 403) and allowed(answer) is None


def test_an_allowed_page_calls_a_server_without_keys(keyless: RunningSystem) -> None:
    body = b'{"prompt": "a"}'
    answer = ask(keyless.url, request("POST", "/tokenize", f"Origin: {PAGE}", body=body))
    assert answer.status == 200 and allowed(answer) == PAGE
    assert ask(keyless.url, request("POST", "/tokenize", f"Origin: {EVIL}", body=body)).code == "forbidden_origin"
    rebound = request("POST", "/tokenize", f"Origin: {PAGE}", host="evil.example", body=body)
    assert ask(keyless.url, rebound).code == "forbidden_origin", "an origin is no host"


def test_without_the_flag_nothing_is_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    with coordinator(tmp_path_factory.mktemp("off"), "--api-key", KEY) as system:
        for data in (
            request("OPTIONS", "/v1/models", f"Origin: {PAGE}", "Access-Control-Request-Method: GET"),
            request("GET", "/v1/models", f"Origin: {PAGE}", f"x-api-key: {KEY}"),
        ):
            answer = ask(system.url, data)
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert "vary" not in answer.headers


def test_a_stream_can_be_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("stream")
    flags = ["--threads", "1", "--num-kv-blocks", "64", "--max-model-len", "256", "--allowed-origins", PAGE]
    words = ["up", "--colocated", "1", "--port", "0", "--control-port", "0", *flags]
    with RunningSystem.running(directory / "up.log", *words) as system:
        body = b'{"prompt": "a", "max_tokens": 2, "stream": true}'
        answer = ask(system.url, request("POST", "/v1/completions", f"Origin: {PAGE}", body=body))
        assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream"
        assert allowed(answer) == PAGE and answer.headers["vary"] == "Origin"


NO_ORIGINS = [
    "null", "a.example", "https://a.example/path", '["https://a.example"', "[]", "[1]", '{"a": 1}', "https://*.example",
    "https://user@a.example", "https://a.example?x",
]  # fmt: skip


@pytest.mark.parametrize("given", NO_ORIGINS)
def test_start_refuses_invalid_origin(given: str) -> None:
    done = _config("--allowed-origins", given)
    assert done.returncode == 1 and "--allowed-origins cannot be" in done.stderr


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((f'["{PAGE}", "{OTHER}"]',), f"{PAGE},{OTHER}"),
        ((f"{PAGE},{OTHER}",), f"{PAGE},{OTHER}"),
        ((f"{PAGE} {OTHER}",), f"{PAGE},{OTHER}"),
        ((PAGE, OTHER, PAGE), f"{PAGE},{OTHER}"),
        ((f'["{PAGE}"]', f'["{OTHER}"]'), f"{PAGE},{OTHER}"),
        (("HTTPS://A.example:443/",), PAGE),
        (('["*"]',), "*"),
        ((PAGE, "*"), "*"),
    ],
)
def test_origins_are_spelled_as_one_likes(words: tuple[str, ...], shown: str) -> None:
    done = _config(*(word for each in words for word in ("--allowed-origins", each)))
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("allowed_origins"))
    assert row.split() == ["allowed_origins", shown, "--allowed-origins"]


def _config(*words: str) -> subprocess.CompletedProcess[str]:
    return tandem("config", "coordinator", *words)
