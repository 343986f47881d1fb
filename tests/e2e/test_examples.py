"""Each example works, against a real ``tandem up`` or with processes of its own."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.net.http_client import HttpClient, HttpError
from tests.e2e.spawner import Spawner
from tests.e2e.test_up import START_S, Up, wait_for, workers
from tests.pace import scaled

pytestmark = pytest.mark.e2e
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, one_spawner: Spawner) -> Iterator[HttpClient]:
    up = Up(tmp_path_factory.mktemp("up"), one_spawner.popen(), "--decode", "2", "--num-kv-blocks", "1024")
    try:
        yield up.server()
    finally:
        up.end()


def run(name: str, *words: str) -> str:
    command = [sys.executable, EXAMPLES / name, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_every_example_is_tried() -> None:
    tried = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{example.name}"' in tried for example in EXAMPLES.iterdir() if example.is_file())


def test_the_openai_client_chats(server: HttpClient) -> None:
    answer, story = run("openai_client.py", server.url).split("\n", 1)
    assert "prompt" in answer
    assert len(story.split()) > 5


def test_a_function_is_called(server: HttpClient) -> None:
    call, answer = run("tool_call.py", server.url).splitlines()
    assert call == 'get_weather({"city": "Oslo"})' and "7 degrees and rainy" in answer


def test_the_openai_client_names_the_package_that_it_lacks() -> None:
    program = f"import runpy, sys; sys.modules['openai'] = None; runpy.run_path({str(EXAMPLES / 'openai_client.py')!r})"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1 and "pip install openai" in ended.stderr


def test_no_token_is_lost_when_a_worker_is_killed(server: HttpClient) -> None:
    shown = run("kill_a_worker.py", server.url)
    assert re.search(r"^decode-\d was killed after \d+ tokens$", shown, re.MULTILINE), shown
    assert "600 of 600 tokens arrived (600 by the server's count)" in shown
    wait_for(lambda: len(workers(server)) == 3, START_S)  # the launcher replaces it


def test_a_cluster_by_hand_serves_and_stops() -> None:
    ports = free_ports(2)
    environ = {**os.environ, "TANDEM": str(Path(sys.executable).parent / "tandem")}
    environ |= {"PORT": str(ports[0]), "CONTROL_PORT": str(ports[1])}
    server = HttpClient(f"http://127.0.0.1:{ports[0]}")
    with subprocess.Popen(
        [EXAMPLES / "by_hand.sh"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as cluster:
        try:
            wait_for(lambda: is_ready(server) or cluster.poll() is not None, START_S)
            assert is_ready(server), cluster.stdout and cluster.stdout.read().decode()
            assert {each["role"] for each in workers(server).values()} == {"prefill", "decode"}
            cluster.terminate()  # not SIGINT, which processes ignore if the test run was started in the background
            cluster.wait(scaled(30))
        finally:
            if cluster.poll() is None:
                os.killpg(cluster.pid, signal.SIGKILL)


def is_ready(server: HttpClient) -> bool:
    try:
        return server.get("/ready")[0] == 200
    except (HttpError, OSError):  # nobody listens yet
        return False


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, below those from which systems choose: another test could get one of them."""
    ports = set[int]()
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)
