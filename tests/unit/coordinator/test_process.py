"""The coordinator as a process of its own: what it imports, how it starts, how it stops."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.config.coordinator import CoordinatorConfig
from common.core.errors import StartError
from coordinator.app import run
from tests.fakes.checkpoint import fake_checkpoint
from tests.fakes.worker import FakeWorker
from tests.pace import scaled

ROOT = Path(__file__).parents[3]
_PROGRAM = """
import json, sys
HEAVY = ("torch", "transformers", "triton", "opentelemetry")
from common.config.coordinator import CoordinatorConfig
from coordinator.app import run

def ready(url, address):
    heavy = [name for name in HEAVY if name in sys.modules]
    print(json.dumps([url, address, heavy]), flush=True)

code = run(CoordinatorConfig(**json.loads(sys.argv[1])), ready)
print(json.dumps([name for name in HEAVY if name in sys.modules]), flush=True)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_checkpoint(tmp_path_factory.mktemp("served"))


@contextmanager
def coordinator(model: Path, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Start a coordinator; yield the process, its URL and its control address."""
    config = json.dumps({"model": str(model), "port": 0, "control_port": 0, **options})
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, config], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url, address, heavy = json.loads(process.stdout.readline())
            assert heavy == []
            yield process, url, address
        finally:
            process.kill()


def fingerprint(model: Path) -> str:
    from common.checkpoint.files import open_checkpoint

    return open_checkpoint(str(model)).fingerprint


def ask(url: str, **body: Any) -> Any:
    data = json.dumps({"prompt": "hello", **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data), timeout=scaled(20)) as response:
        return json.loads(response.read())


def test_it_serves_without_torch_and_ends_on_sigterm(model: Path) -> None:
    with coordinator(model) as (process, url, address):
        worker = FakeWorker("colocated", address, fingerprint(model)).start()
        try:
            assert worker.joined.wait(scaled(5))
            assert ask(url, max_tokens=3)["usage"]["completion_tokens"] == 3
        finally:
            worker.stop()
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and json.loads(process.stdout.readline()) == []
        assert process.wait(scaled(10)) == 0


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_ipv6_host_makes_an_url_that_works(model: Path) -> None:
    with coordinator(model, host="::1", control_host="::1") as (_, url, address):
        assert url.startswith("http://[::1]:") and address.startswith("tcp://[::1]:")
        with urllib.request.urlopen(f"{url}/health", timeout=scaled(20)) as response:
            assert response.status == 200
        worker = FakeWorker("colocated", address, fingerprint(model)).start()
        try:
            assert worker.joined.wait(scaled(5))
        finally:
            worker.stop()


@pytest.mark.parametrize("ctrl_c", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
def test_second_signal_ends_running_requests(
    model: Path, ctrl_c: signal.Handlers, request: pytest.FixtureRequest
) -> None:
    """Also where SIGINT is ignored, as in background jobs of a shell, and without a launcher."""
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, ctrl_c)))
    with coordinator(model, drain_timeout=60) as (process, url, address):
        worker = FakeWorker("colocated", address, fingerprint(model), delay_s=60).start()
        try:
            assert worker.joined.wait(scaled(5))
            with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
                body = b'{"prompt": "x"}'
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n" + body)
                while not worker.busy:
                    time.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)
                process.send_signal(signal.SIGTERM)
                assert process.wait(scaled(10)) == 0
                assert b"503" in client.recv(100)
        finally:
            worker.stop()


def test_busy_ports_are_failed_starts(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            run(CoordinatorConfig(model=str(model), port=port, control_port=0))
        with pytest.raises(StartError, match=r"cannot listen on tcp://127\.0\.0\.1") as caught:
            run(CoordinatorConfig(model=str(model), port=0, control_port=port))
        assert "--control-port" in caught.value.todo


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"control_host": "0.0.0.0"}, {"max_model_len": 1 << 30}])
def test_coordinator_refuses_unsafe_options(model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(StartError):
        run(CoordinatorConfig(**{"model": str(model), "port": 0, "control_port": 0, **options}))
