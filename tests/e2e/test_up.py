"""The real ``tandem up`` with the built-in model: it serves, restarts workers, drains, and leaves nothing behind.

Tests about processes and signals start it as an operator does; the others use the spawner.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.load.processes import cpu_seconds
from common import builtin
from common.net.http_client import HttpClient, HttpError
from deploy.launcher.supervisor import ONE_SIGNAL_S
from tests import leaked_keys
from tests.e2e.spawner import Spawner
from tests.pace import scaled

pytestmark = pytest.mark.e2e
START_S = 90.0


class Up:
    """One running ``tandem up`` on free ports, with its output in a file."""

    def __init__(self, directory: Path, popen: type[subprocess.Popen[Any]], *words: str) -> None:
        self._output = directory / "up.log"
        leaked_keys.watch(self._output)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        command = [sys.executable, "-m", "deploy.cli", "up", "--port", "0", "--control-port", "0", *words]
        with self._output.open("wb") as output:
            self.process = popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=clean,
            )

    @property
    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def server(self) -> HttpClient:
        """Return a client of the server, once the start-up screen has been printed."""
        wait_for(lambda: "try: tandem chat" in self.said or self.process.poll() is not None, START_S)
        found = re.search(r"serving \S+ on (http://\S+)", self.said)
        assert found is not None, self.said
        return HttpClient(found[1], timeout_s=60.0)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        leaked_keys.search(self._output)


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def ask(server: HttpClient, tokens: int) -> Iterator[dict[str, Any]]:
    messages = [{"role": "user", "content": "Hello"}]
    return server.chat({"model": server.model(), "messages": messages, "max_tokens": tokens, "ignore_eos": True})


def workers(server: HttpClient) -> dict[str, dict[str, Any]]:
    """Return the ready workers by name."""
    status, body = server.get("/admin/workers")
    assert status == 200
    return {worker["id"]: worker for worker in body["workers"] if worker["state"] == "ready"}


def send_prompt(server: HttpClient) -> None:
    """Send a long prompt that is not cached; return when it has been computed."""
    prompt = [random.randrange(1000, 2000) for _ in range(1500)]
    server.post("/v1/completions", {"model": server.model(), "prompt": prompt, "max_tokens": 1})


def borrowed_s(server: HttpClient) -> float:
    """Return the core-seconds that workers have borrowed from each other so far."""
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        found = re.search(r"^tandem_borrowed_core_seconds_total (\S+)", page.read().decode(), re.M)
    assert found is not None
    return float(found[1])


def long_prompt_was_helped_with(server: HttpClient) -> bool:
    """Send a prompt that is not cached; return whether prefill has borrowed decode's core so far."""
    send_prompt(server)
    return borrowed_s(server) > 0


def coordinator_of(up: Up) -> int:
    """Return the coordinator's process id."""
    children = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
    (found,) = (
        each
        for each in children
        if b"deploy.launcher.process\0coordinator" in Path(f"/proc/{each}/cmdline").read_bytes()
    )
    return int(found)


def sockets_nearby(coordinator: int) -> int:
    """Count the Unix sockets by which local workers reach this process."""
    sockets = psutil.Process(coordinator).net_connections("unix")
    return sum(each.laddr.startswith("@tandem-127.0.0.1:") for each in sockets)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@contextmanager
def starting(cache: Path, popen: type[subprocess.Popen[Any]]) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start_one(*words: str) -> Up:
        directory = cache / f"up-{time.monotonic_ns()}"
        directory.mkdir()
        started.append(Up(directory, popen, "--num-kv-blocks", "1024", *words))
        return started[-1]

    try:
        yield start_one
    finally:
        for up in started:
            up.end()


@pytest.fixture
def start(cache: Path) -> Iterator[Callable[..., Up]]:
    """Start ``tandem up`` as an operator does."""
    with starting(cache, subprocess.Popen) as start_one:
        yield start_one


@pytest.fixture
def start_quickly(cache: Path, one_spawner: Spawner) -> Iterator[Callable[..., Up]]:
    """Start ``tandem up`` with workers that share one import of torch and transformers."""
    with starting(cache, one_spawner.popen()) as start_one:
        yield start_one


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core, on which all are")
def test_the_coordinator_runs_beside_streams_while_prompts_pile_up(start_quickly: Callable[..., Up]) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    up = start_quickly("--cpus", f"{first},{second}", "--max-num-batched-tokens", "256")
    server = up.server()
    decode, coordinator = workers(server)["decode-0"]["pid"], coordinator_of(up)
    seen = threading.Event()

    def is_beside_streams() -> bool:
        return os.sched_getaffinity(coordinator) == os.sched_getaffinity(decode)

    def send_prompts() -> None:
        while not seen.is_set():
            send_prompt(server)

    assert not is_beside_streams()
    with ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(send_prompts) for _ in range(16)]
        try:
            wait_for(is_beside_streams, START_S)
        finally:
            seen.set()
    for client in clients:
        client.result()
    wait_for(lambda: not is_beside_streams(), START_S)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core, on which all are")
def test_many_streams_are_helped_with_while_no_prompt_is_computed(start_quickly: Callable[..., Up]) -> None:
    server = start_quickly().server()
    begun, ended = threading.Barrier(21), threading.Event()

    def stream() -> None:
        # at most what the pool holds of 20 streams: recomputing preempted ones would borrow cores in any case
        chunks = ask(server, 700)
        for _ in range(3):  # past prefill's first token, so prefill has finished this prompt
            next(chunks)
        begun.wait(START_S)
        ended.wait(START_S)

    with ThreadPoolExecutor(20) as pool:
        clients = [pool.submit(stream) for _ in range(20)]
        try:
            begun.wait(START_S)
            before = borrowed_s(server)
            wait_for(lambda: borrowed_s(server) > before + 0.2, START_S)  # more than prefill borrowed but reported late
        finally:
            ended.set()
    for client in clients:
        client.result()


@pytest.mark.parametrize("words", [pytest.param("--threads 1", marks=pytest.mark.whole), "--colocated 1 --threads 2"])
def test_idle_processes_use_no_cpu(words: str, start_quickly: Callable[..., Up]) -> None:
    """After a prompt and an answer all processes together are nearly idle: none polls, and no thread spins for long."""
    up = start_quickly(*words.split())
    server = up.server()
    send_prompt(server)
    assert list(ask(server, 4))

    def is_quiet() -> bool:
        began, before = time.monotonic(), cpu_seconds(up.process.pid)
        time.sleep(1.0)  # measures that nothing happens
        return cpu_seconds(up.process.pid) - before < 0.1 * (time.monotonic() - began)

    wait_for(is_quiet, START_S)


def test_it_serves_heals_and_drains(start: Callable[..., Up]) -> None:
    up = start()
    server = up.server()
    assert server.model() == builtin.NAME
    chunks = list(ask(server, 4))
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [None] * 4 + ["length"]

    if len(os.sched_getaffinity(0)) > 1:
        wait_for(lambda: long_prompt_was_helped_with(server), START_S)

    before = workers(server)
    assert set(before) == {"prefill-0", "decode-0"}
    # a listener, and per worker the event loop's and the heartbeat's
    wait_for(lambda: sockets_nearby(coordinator_of(up)) == 1 + 2 * 2, 5)
    if len(os.sched_getaffinity(0)) > 1:
        decode = os.sched_getaffinity(before["decode-0"]["pid"])
        assert decode and not decode & os.sched_getaffinity(coordinator_of(up)), (
            "no other process's turn delays a token"
        )
    os.kill(before["decode-0"]["pid"], signal.SIGKILL)

    def healed() -> bool:
        now = workers(server).get("decode-0")
        return now is not None and now["incarnation"] != before["decode-0"]["incarnation"]

    wait_for(healed, START_S)
    assert "decode-0 exited (SIGKILL" in up.said
    assert len(list(ask(server, 4))) == len(chunks)

    family = up.children()
    assert len(family) >= 3
    running = ask(server, 200)
    next(running)
    up.process.send_signal(signal.SIGINT)
    assert len(list(running)) >= 199  # running requests are finished first
    assert up.process.wait(scaled(30)) == 0
    assert not any(child.is_running() for child in family)


def test_a_signal_to_all_of_its_processes_drains_as_one_to_it_does(start: Callable[..., Up]) -> None:
    """systemd and timeout signal all processes, so each child gets that signal and the launcher's."""
    up = start("--drain-timeout", str(scaled(60.0)))
    running = ask(up.server(), 800)
    # up to a token from decode: a draining worker accepts nothing new, and must have this request by then
    for _ in range(3):
        next(running)
    family = up.children()
    for process in (*family, up.process):
        process.send_signal(signal.SIGTERM)
    assert len(list(running)) >= 797
    assert up.process.wait(scaled(30)) == 0
    assert not any(child.is_running() for child in family)


@pytest.mark.alone
def test_a_worker_that_hangs_is_replaced_and_its_stream_ends_whole(start: Callable[..., Up]) -> None:
    up = start("--failure-timeout", "0.5")
    server = up.server()
    before = workers(server)["decode-0"]
    running = ask(server, 200)
    next(running)
    os.kill(before["pid"], signal.SIGSTOP)
    assert len(list(running)) == 200
    assert re.search(r"decode-0 hangs \(silent for \S+ s\): killed; restarting it in 0.5 s", up.said), up.said
    after = workers(server)["decode-0"]
    assert after["pid"] != before["pid"] and not psutil.pid_exists(before["pid"])
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(scaled(30)) == 0


@pytest.mark.alone
def test_a_worker_that_hangs_when_the_coordinator_comes_back_is_replaced(start_quickly: Callable[..., Up]) -> None:
    """The new coordinator has never heard of the hung worker, but the launcher has."""
    up = start_quickly("--failure-timeout", "0.5")
    server = up.server()
    before = workers(server)
    coordinator = next(child for child in up.children() if "coordinator" in child.cmdline())
    os.kill(before["decode-0"]["pid"], signal.SIGSTOP)
    coordinator.kill()
    words = r"decode-0 hangs \(no Hello to this coordinator for \S+ s\): killed; restarting it in 0.5 s"
    wait_for(lambda: re.search(words, up.said), START_S)
    wait_for(lambda: server.get("/ready")[0] == 200, START_S)
    after = workers(server)
    assert after["decode-0"]["pid"] != before["decode-0"]["pid"] and not psutil.pid_exists(before["decode-0"]["pid"])
    assert after["prefill-0"]["pid"] == before["prefill-0"]["pid"], "a worker that joins again stays"
    assert len(list(ask(server, 4))) == 5
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(scaled(30)) == 0


def test_a_second_signal_does_not_wait(start: Callable[..., Up]) -> None:
    """A second signal ends the drain at once, unless it comes within ``ONE_SIGNAL_S`` of the first: then it is the same
    one, forwarded by make to its whole group."""
    up = start("--colocated", "1", "--drain-timeout", "60")
    server = up.server()
    assert set(workers(server)) == {"colocated-0"}
    family = up.children()
    running = ask(server, 2000)
    next(running)
    up.process.send_signal(signal.SIGTERM)
    up.process.send_signal(signal.SIGHUP)  # two signals of one kind may be merged into one
    wait_for(lambda: "stopping" in up.said, 5)
    reported_at = time.monotonic()
    for _ in running:  # it still streams after the signal that did not count as a second one
        if time.monotonic() > reported_at + ONE_SIGNAL_S:
            break
    assert up.process.poll() is None
    up.process.send_signal(signal.SIGTERM)
    up.process.wait(scaled(10))
    assert not any(child.is_running() for child in family)
    with pytest.raises(HttpError):
        list(running)


@pytest.mark.parametrize("said", ["tandem: ", "importing"], ids=["before the kernel knows", "while they import"])
def test_nothing_survives_a_killed_launcher(said: str, start: Callable[..., Up]) -> None:
    """The kernel kills a child that has set its parent-death signal; a younger child checks for its parent itself."""
    up = start()
    wait_for(lambda: len(up.children()) == 3 and said in up.said, 30)
    family = up.children()
    up.process.kill()
    up.process.wait()
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in family), 10)


def test_a_worker_that_cannot_start_ends_it_in_words(start_quickly: Callable[..., Up], cache: Path) -> None:
    model = cache / "broken"
    shutil.copytree(builtin.path(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}))
    up = start_quickly(str(model))
    assert up.process.wait(scaled(START_S)) == 1
    last = up.said.strip().splitlines()[-3:]
    assert [line.split(":")[0].strip() for line in last] == ["error", "why", "do"], up.said
    assert "Traceback" not in up.said


def test_it_grows_and_shrinks_under_load_without_a_failed_request(start_quickly: Callable[..., Up]) -> None:
    up = start_quickly("--drain-timeout", "1", "--max-model-len", "512", "--threads", "1")
    server = up.server()
    over, answered, failed = threading.Event(), [], []

    def load() -> None:
        while not over.is_set():
            try:
                answered.append(len(list(ask(server, 100))))
            except HttpError as error:
                failed.append(str(error))

    def scale(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy.cli", "scale", "--url", server.url, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)

    clients = [threading.Thread(target=load) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        grown = scale("--prefill", "2", "--decode", "2")
        assert (grown.returncode, grown.stdout) == (0, "prefill 2, decode 2\n"), grown.stderr
        wait_for(lambda: set(workers(server)) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}, 10)
        before = len(answered)
        wait_for(lambda: len(answered) >= before + 8, 60)
        both = [subprocess.Popen([sys.executable, "-m", "deploy.cli", "scale", "--url", server.url, *words],
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for words in (("--decode", "1"), ("--decode", "1", "--prefill", "1"))]  # fmt: skip
        said = [child.communicate(timeout=START_S) for child in both]
        assert all(child.returncode == 0 for child in both), said
        assert "prefill 1, decode 1\n" in [out for out, _ in said], "the second waits for the first"
        assert any(err.startswith("scaling to decode 1: new workers load") for _, err in said)
        assert set(workers(server)) == {"prefill-0", "decode-0"}
        before = len(answered)
        wait_for(lambda: len(answered) >= before + 4, 60)
    finally:
        over.set()
        for client in clients:
            client.join(START_S)
    assert not failed
    assert set(answered) == {101}
    refused = scale("--decode", "0")
    assert refused.returncode == 1 and "--decode" in refused.stderr
    assert server.get("/ready")[0] == 200


def test_a_change_that_hangs_can_be_taken_back(start_quickly: Callable[..., Up]) -> None:
    up = start_quickly("--max-model-len", "512", "--threads", "1")
    server = up.server()
    launcher = psutil.Process(up.process.pid)
    there = set(launcher.children())

    def scale(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "deploy.cli", "scale", "--url", server.url, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    grown = scale("--decode", "2")
    wait_for(lambda: set(launcher.children()) - there, START_S)
    for child in set(launcher.children()) - there:
        child.send_signal(signal.SIGSTOP)
    same = scale("--decode", "2")
    back = scale("--decode", "1")
    said, _ = back.communicate(timeout=START_S)
    assert (back.returncode, said) == (0, "prefill 1, decode 1\n")
    _, why = grown.communicate(timeout=START_S)
    assert grown.returncode == 1 and "decode-1 did not start" in why and "a later request to scale" in why
    same.communicate(timeout=START_S)  # it may be applied before or after the request that takes it back
    assert server.get("/ready")[0] == 200 and "decode-0" in workers(server)
