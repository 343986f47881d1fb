"""The services of deploy/compose.yaml as processes in one network namespace, as Compose runs their containers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import leaked_keys
from tests.e2e.system import COMMAND, READY_S, ROOT, STOP_S
from tests.orchestration.pods import inside
from tests.unit.deploy.test_images import DEPLOY, environment_file, interpolated, make_secrets

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.whole,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace"),
    pytest.mark.skipif(not (shutil.which("nsenter") and shutil.which("ip")), reason="needs nsenter and ip"),
]
NAMES = ("coordinator", "prefill", "decode")
SMALL = {
    "TANDEM_DTYPE": "float32",
    "TANDEM_THREADS": "1",
    "TANDEM_NUM_KV_BLOCKS": "600",
    "TANDEM_MAX_MODEL_LEN": "2048",
}


class Composed:
    """The services ``NAMES``, in the namespace of a process that stands for the service ``pod``."""

    def __init__(self, directory: Path) -> None:
        deploy = make_secrets(directory)
        self.compose = interpolated(DEPLOY / "compose.yaml", environment_file(deploy))
        self.secrets, self._directory = deploy / "secrets", directory
        self._pod = subprocess.Popen(["unshare", "-n", "bash", "-c", "ip link set lo up && exec sleep infinity"])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _enter(self, *words: str | Path) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._pod.pid}/ns/net", *map(str, words)]

    def start(self, name: str) -> None:
        service = self.compose["services"][name]
        assert service["network_mode"] == "service:pod"
        mounts = {f"/run/secrets/{secret}": self.secrets / secret for secret in service["secrets"]}
        words = [inside(word, mounts) for word in service["command"]]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        leaked_keys.watch(self.log(name))
        with self.log(name).open("ab") as out:
            self.processes[name] = subprocess.Popen(
                self._enter(*COMMAND, *words), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                env=inherited | service["environment"] | SMALL,
            )  # fmt: skip

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def until_healthy(self, *names: str) -> None:
        """Run the services' health checks until all pass."""
        deadline = time.monotonic() + READY_S
        for name in names:
            _, script, *words = self.compose["services"][name]["healthcheck"]["test"]
            command = self._enter(script.replace("/app", str(ROOT)), *words)
            while subprocess.run(command, capture_output=True, check=False).returncode:
                assert self.processes[name].poll() is None, self.log(name).read_text()
                assert time.monotonic() < deadline, f"{name} is not healthy:\n{self.log(name).read_text()}"
                time.sleep(0.2)

    def ask(self, path: str, key: str, body: Any = None) -> Any:
        """Send one request from inside the namespace."""
        command = self._enter("curl", "-sS", "--fail-with-body", "-H", f"authorization: Bearer {key}")
        if body is not None:
            command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
        done = subprocess.run([*command, f"http://127.0.0.1:8000{path}"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0, self.log(name).read_text()

    def close(self) -> None:
        for process in (*self.processes.values(), self._pod):
            process.kill()
            process.wait()


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    system = Composed(tmp_path)
    try:
        yield system
    finally:
        system.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_services_find_each_other_share_memory_and_are_restarted_one_by_one(composed: Composed) -> None:
    for name in NAMES:
        composed.start(name)
    composed.until_healthy(*NAMES)
    client, prometheus = (composed.secrets / "api-keys.txt").read_text().split()
    admin = (composed.secrets / "coordinator.yaml").read_text().split()[1]
    body = {"prompt": "word " * 200, "max_tokens": 4, "ignore_eos": True}
    assert composed.ask("/v1/completions", client, body)["usage"]["completion_tokens"] == 4
    workers = {each["id"]: each for each in composed.ask("/admin/workers", admin)["workers"]}
    assert set(workers) == {"prefill-0", "decode-0"}
    assert 'tandem_kv_transfer_bytes_total{transport="shm"}' in composed.ask("/metrics", prometheus)
    for name in "decode", "coordinator":
        composed.stop(name)
        composed.start(name)
        composed.until_healthy(*NAMES)
        assert composed.ask("/v1/completions", client, body)["usage"]["completion_tokens"] == 4
    for name in NAMES:
        composed.stop(name)
