"""Neither answers larger than their requests nor unread answers fill the coordinator's memory."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.system import RunningSystem
from tests.fakes.checkpoint import fake_checkpoint
from tests.pace import scaled
from tests.security.outside import ask, request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TOKENS = 600_000
LONG_TOKEN = 3
"""The id of ``<|assistant|>`` in :mod:`tests.fakes.checkpoint`."""
MOST_BODY = 8 << 20
CLIENT_TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """A coordinator without workers, whose model has a context longer than any body."""
    directory: Path = tmp_path_factory.mktemp("repeated")
    model = fake_checkpoint(directory / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    words: list[Any] = [
        "coordinator",
        model,
        "--port",
        "0",
        "--control-port",
        "0",
        "--served-model-name",
        RunningSystem.name,
    ]
    limits = ["--client-timeout", str(CLIENT_TIMEOUT_S), "--max-body-bytes", str(MOST_BODY)]
    with RunningSystem.running(directory / "log", *words, *limits, until_ready=False) as system:
        yield system


def _cut(server: RunningSystem) -> float:
    """Return how many clients were disconnected because they did not read."""
    page = ask(server.url, request("GET", "/metrics", "Connection: close")).body.decode()
    found = re.search(r'^tandem_clients_cut_off_total\{while="reading"\} (\S+)', page, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/tokenize", {"prompt": "a1 " * (TOKENS // 3), "return_token_strs": True}),
        ("/detokenize", {"tokens": [LONG_TOKEN] * TOKENS}),
    ],
)
def test_server_closes_connection_of_client_that_reads_nothing(
    server: RunningSystem, path: str, asked: dict[str, Any]
) -> None:
    before, place = _cut(server), urlsplit(server.url)
    sent = request("POST", path, body=json.dumps(asked, separators=(",", ":")).encode())
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((place.hostname, place.port))
        connection.sendall(sent)
        until = time.monotonic() + scaled(20)
        while _cut(server) == before:
            assert time.monotonic() < until, "it is still there"
            time.sleep(0.1)  # polls another process


@pytest.mark.parametrize("fields", [{"echo": True}, {"return_token_ids": True}])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_answer_does_not_repeat_more_than_a_body_may_hold(
    server: RunningSystem, fields: dict[str, Any], as_ids: bool
) -> None:
    prompt: Any = [LONG_TOKEN] * 5_000 if as_ids else "additional Properties " * 1_000
    asked = {"prompt": [prompt] * 64, "n": 16, "max_tokens": 1, **fields}
    answer = ask(server.url, request("POST", "/v1/completions", body=json.dumps(asked).encode()))
    assert answer.status == 400, answer.raw[:500]
    assert answer.json["error"]["param"] == "n" and answer.code == "invalid_value"
    few = {**asked, "n": 1, "prompt": [prompt] * 2}
    assert ask(server.url, request("POST", "/v1/completions", body=json.dumps(few).encode())).status == 503


def test_a_text_of_ids_is_no_longer_than_a_body_may_be(server: RunningSystem) -> None:
    asked = {"tokens": [LONG_TOKEN] * (MOST_BODY // len("<|assistant|>") + 1)}
    answer = ask(server.url, request("POST", "/detokenize", body=json.dumps(asked).encode()))
    assert answer.status == 400 and answer.json["error"]["param"] == "tokens", answer.raw[:500]
    asked["tokens"].pop()
    assert ask(server.url, request("POST", "/detokenize", body=json.dumps(asked).encode())).status == 200
