"""A web page in a browser on this machine can neither call a route that needs no key nor read its answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.system import RunningSystem
from tests.leaked_keys import new_key
from tests.security.outside import RawAnswer, ask, coordinator, request


@dataclass
class KeyedServer:
    system: RunningSystem
    client: str = ""
    admin: str = ""

    def ask(self, data: bytes) -> RawAnswer:
        return ask(self.system.url, data)


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    with coordinator(tmp_path_factory.mktemp("keyless")) as system:
        yield KeyedServer(system)


@pytest.fixture(scope="module")
def admin_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    key = new_key()
    with coordinator(tmp_path_factory.mktemp("admin"), "--admin-api-key", key) as system:
        yield KeyedServer(system, admin=key)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    client, admin = new_key(), new_key()
    with coordinator(tmp_path_factory.mktemp("keyed"), "--api-key", client, "--admin-api-key", admin) as system:
        yield KeyedServer(system, client, admin)


@pytest.fixture(scope="module", params=["keyless", "admin_only"])
def open_server(request: pytest.FixtureRequest) -> KeyedServer:
    """A server whose /v1 needs no key."""
    server: KeyedServer = request.getfixturevalue(request.param)
    return server


OPEN = ["GET /", "GET /v1/models", "GET /v1/models/tandem-builtin", "GET /metrics", "GET /version", "GET /nowhere",
        "POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize", "PUT /v1/models",
        "HEAD /v1/models", "OPTIONS /v1/completions"]  # fmt: skip
FOREIGN_HOSTS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example.", "",
    "localhost@evil.example", "evil.example@localhost", "localhost:80@evil.example", "localhost#evil.example",
    "localhost/evil.example", "localhost?evil.example", "[::2]", "[", "]", "[::1]evil.example", "::1", "10.0.0.1",
    "0.0.0.0", "2130706433", "0x7f.1", "localhost evil.example", "localhost,evil.example", "localhost..",
    "l\xf6calhost",
]  # fmt: skip
FOREIGN_ORIGINS = [
    "https://evil.example", "http://evil.example:8000", "null", "", "localhost", "http://", "http://[", "//localhost",
    "http://localhost.evil.example", "http://localhost@evil.example", "http://evil.example@localhost", "file://",
    "http://localhost/evil", "http://localhost http://evil.example", "chrome-extension://abcdefgh", "*",
]  # fmt: skip
OWN = ["localhost", "LOCALHOST", "localhost:9", "localhost.", "localhost.:80", "127.0.0.1", "127.0.0.1:8000",
       "127.1.2.3", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]", "localhost:"]  # fmt: skip


@pytest.mark.parametrize("call", OPEN)
def test_every_route_without_a_key_checks_where_a_request_comes_from(open_server: KeyedServer, call: str) -> None:
    method, path = call.split()
    for headers, host in (((), "evil.example"), (("Origin: https://evil.example",), "localhost")):
        answer = open_server.ask(request(method, path, *headers, host=host))
        assert answer.status == 403
        if method != "HEAD":
            assert answer.code == "forbidden_origin"
            assert "--api-key" in answer.json["error"]["message"]
            assert "--insecure-http" in answer.json["error"]["message"]


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_name_that_was_made_to_point_here_is_refused(open_server: KeyedServer, host: str) -> None:
    for call in ("GET /v1/models", "POST /v1/completions", "GET /metrics"):
        answer = open_server.ask(request(*call.split(), host=host))
        assert answer.status == 403 and answer.code == "forbidden_origin"


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_a_page_of_another_origin_is_refused(open_server: KeyedServer, origin: str) -> None:
    for call in ("GET /v1/models", "POST /v1/completions"):
        answer = open_server.ask(request(*call.split(), f"Origin: {origin}"))
        assert answer.status == 403 and answer.code == "forbidden_origin"


@pytest.mark.parametrize("host", OWN)
def test_this_machine_is_served_under_all_its_names(open_server: KeyedServer, host: str) -> None:
    assert open_server.ask(request("GET", "/v1/models", host=host)).status == 200
    origin = f"Origin: http://{host}"
    assert open_server.ask(request("GET", "/v1/models", origin, host=host)).status == 200
    assert open_server.ask(request("POST", "/tokenize", origin, host=host, body=b'{"prompt": "a"}')).status == 200


def test_one_good_origin_does_not_cover_a_bad_one(open_server: KeyedServer) -> None:
    for origins in (("http://localhost", "https://evil.example"), ("https://evil.example", "http://localhost")):
        headers = [f"Origin: {origin}" for origin in origins]
        assert open_server.ask(request("GET", "/v1/models", *headers)).code == "forbidden_origin"


def test_an_absolute_target_counts_as_a_host(open_server: KeyedServer) -> None:
    foreign = request("GET", "http://evil.example/v1/models")
    assert open_server.ask(foreign).code == "forbidden_origin"
    assert open_server.ask(request("GET", "http://localhost@evil.example/v1/models")).code == "forbidden_origin"
    assert open_server.ask(request("GET", "http://localhost/v1/models")).status == 200
    assert open_server.ask(request("GET", "http://localhost/v1/models", host="evil.example")).status == 403
    assert open_server.ask(b"GET http://evil.example/v1/models HTTP/1.0\r\n\r\n").code == "forbidden_origin"


def test_a_host_is_missing_only_in_http_1_0(open_server: KeyedServer) -> None:
    """Browsers do not use HTTP/1.0."""
    assert open_server.ask(b"GET /v1/models HTTP/1.0\r\n\r\n").status == 200
    assert open_server.ask(b"GET /v1/models HTTP/1.0\r\nHost: evil.example\r\n\r\n").code == "forbidden_origin"
    assert open_server.ask(request("GET", "/v1/models", host=None)).code == "malformed_request"
    assert open_server.ask(request("GET", "/v1/models", "Host: localhost")).code == "malformed_request"


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "TLS/1.2"])
def test_an_upgrade_opens_nothing(open_server: KeyedServer, protocol: str) -> None:
    upgrade = ("Connection: Upgrade", f"Upgrade: {protocol}", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13")
    assert open_server.ask(request("GET", "/v1/models", *upgrade, "Origin: https://evil.example")).status == 403
    assert open_server.ask(request("GET", "/v1/models", *upgrade, host="evil.example")).status == 403
    assert open_server.ask(request("GET", "/v1/models", *upgrade)).status == 200, "and is declined"


def test_a_route_with_a_key_needs_no_check(admin_only: KeyedServer, keyed: KeyedServer) -> None:
    foreign = ("Origin: https://evil.example",)
    for server, path, key in (
        (admin_only, "/admin/workers", admin_only.admin),
        (keyed, "/admin/workers", keyed.admin),
        (keyed, "/v1/models", keyed.client),
        (keyed, "/v1/models", keyed.admin),
    ):
        assert server.ask(request("GET", path, *foreign, host="llm.example")).code == "invalid_api_key"
        bearer = f"Authorization: Bearer {key}"
        assert server.ask(request("GET", path, bearer, *foreign, host="llm.example")).status == 200
    assert keyed.ask(request("GET", "/admin/workers", f"x-api-key: {keyed.client}")).code == "insufficient_permissions"


def test_health_is_asked_under_any_name(open_server: KeyedServer, keyed: KeyedServer) -> None:
    for server in (open_server, keyed):
        assert server.ask(request("GET", "/health", host="10.1.2.3:8000")).status == 200
        assert server.ask(request("GET", "/ready", host="10.1.2.3:8000")).code == "not_ready"


def test_metrics_of_loopback_need_no_key_and_so_a_check(keyed: KeyedServer) -> None:
    assert keyed.ask(request("GET", "/metrics")).status == 200
    assert keyed.ask(request("GET", "/metrics", host="evil.example")).code == "forbidden_origin"
    assert keyed.ask(request("GET", "/metrics", "Origin: https://evil.example")).code == "forbidden_origin"


@pytest.mark.parametrize(
    ("flags", "open_to_all", "named"),
    [
        (("--metrics-access", "key", "--api-key"), False, "loopback, asked for"),
        (("--host", "0.0.0.0", "--api-key"), False, "elsewhere, by default"),
        (("--host", "0.0.0.0", "--metrics-access", "open", "--api-key"), True, "elsewhere, opened"),
        (("--host", "0.0.0.0", "--insecure-http", "--admin-api-key"), True, "no client has a key"),
        (("--metrics-access", "key", "--admin-api-key"), False, "the admin's key"),
    ],
)
def test_metrics_are_open_or_not(
    tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...], open_to_all: bool, named: str
) -> None:
    key = new_key()
    with coordinator(tmp_path_factory.mktemp("metrics"), *flags, key) as system:
        without = ask(system.url, request("GET", "/metrics", host="node.example" if "--host" in flags else "localhost"))
        assert without.status == (200 if open_to_all else 401), named
        for header in (f"Authorization: Bearer {key}", f"x-api-key: {key}"):
            assert ask(system.url, request("GET", "/metrics", header)).status == 200


def test_insecure_http_serves_every_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    with coordinator(tmp_path_factory.mktemp("insecure"), "--insecure-http") as system:
        assert (
            ask(system.url, request("GET", "/v1/models", "Origin: https://a.example", host="b.example")).status == 200
        )


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_a_bearer_token_or_x_api_key(keyed: KeyedServer) -> None:
    good, wrong = keyed.client, new_key()
    right = [
        (f"Authorization: Bearer {good}",), (f"authorization: bearer  {good} ",), (f"x-api-key: {good}",),
        (f"X-API-Key:{good} ",), (f"Authorization: Bearer {good}", f"x-api-key: {good}"),
        ("Authorization: Basic dXNlcg==", f"x-api-key: {good}"), (f"Authorization: Bearer {good}", "x-api-key:"),
    ]  # fmt: skip
    refused = [
        (), ("x-api-key:",), (f"x-api-key: {wrong}",), (f"Authorization: Basic {good}",), (f"Authorization: {good}",),
        (f"x-api-key: Bearer {good}",), (f"Authorization: Bearer {good}", f"x-api-key: {wrong}"),
        (f"Authorization: Bearer {wrong}", f"x-api-key: {good}"), (f"x-api-key: {good}", f"x-api-key: {wrong}"),
        (f"Authorization: Bearer {good}", f"Authorization: Bearer {wrong}"), (f"x-api-key: {good}x",),
        ("x-api-key: \xe9",),
        (f"Authorization: Bearer {good}", f"x-api-key: {keyed.admin}"), (f"x-api-key: {good[:-1]}",),
    ]  # fmt: skip
    for path in ("/", "/v1/models", "/version", "/nowhere"):
        for headers in right:
            assert keyed.ask(request("GET", path, *headers)).status in (200, 404), headers
        for headers in refused:
            answer = keyed.ask(request("GET", path, *headers))
            assert answer.code == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer", headers
    for header in (f"Authorization: Bearer {keyed.admin}", f"x-api-key: {keyed.admin}"):
        assert keyed.ask(request("GET", "/admin/workers", header)).status == 200


SPELLINGS = [
    "/%61dmin/workers", "//admin/workers", "/admin//workers", "/./admin/workers", "/v1/../admin/workers",
    "/ADMIN/workers", "/health/../admin/workers", "/health;/admin/workers", "http://localhost/admin/workers",
    "/admin/workers?x=/health", "/health%2f..%2fadmin/workers",
]  # fmt: skip


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_spelling_of_a_path_goes_past_its_key(admin_only: KeyedServer, keyed: KeyedServer, path: str) -> None:
    for server in (admin_only, keyed):
        assert server.ask(request("GET", path)).status in (401, 404, 403)
    assert keyed.ask(request("GET", path)).status == 401
