"""A system on a read-only root, as a user without rights and without capabilities to write: what the images promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests import leaked_keys
from tests.e2e.system import COMMAND, READY_S, ROOT, SMALL, STOP_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts"),
    pytest.mark.skipif(not (shutil.which("unshare") and shutil.which("setpriv")), reason="needs unshare and setpriv"),
]

_READ_ONLY = """
set -e
mount --make-rprivate /
while read -r _ where kind _; do
    case $kind in proc|sysfs|cgroup*|devpts|mqueue) ;; *) mount -o remount,ro,bind "$where" 2>/dev/null || true;; esac
done </proc/self/mounts
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /mnt # /cache of the images
if touch "$PWD/written" 2>/dev/null; then echo "the root can be written"; exit 3; fi
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --bounding-set=-all,+dac_read_search \
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search "$@"
"""
"""Reading everything is allowed, since the interpreter may be in root's home, unlike in an image."""


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=READY_S) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False


def test_it_serves_with_a_cache_and_a_temporary_folder_only(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    if Path("/tmp") in ROOT.parents:
        pytest.skip("this tree lies in the temporary folder")
    log = tmp_path / "up.log"
    leaked_keys.watch(log)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    places = {
        "HOME": "/mnt",
        "TANDEM_CACHE": "/mnt/tandem",
        "HF_HOME": "/mnt/huggingface",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = ["up", "--port", "0", "--control-port", "0", *SMALL]
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["unshare", "-m", "bash", "-c", _READ_ONLY, "bash", *COMMAND, *words],
            stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, env=inherited | places,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_S
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) or not _is_ready(found[0]):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        body = json.dumps({"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}).encode()
        asked = urllib.request.Request(f"{found[0]}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=READY_S) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 8
        assert Path(f"/proc/{process.pid}/status").read_text().split("Uid:")[1].split()[0] == "10001"
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0, log.read_text()
        assert "Read-only" not in log.read_text() and "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()
