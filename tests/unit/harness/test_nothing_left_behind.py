"""The leak check of conftest.py detects every kind of leak, each made in a separate pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import scaled

ROOT = Path(__file__).parents[3]
LEAKS = """
import asyncio, atexit, os, subprocess, threading, zmq

KEEP = []

async def test_tasks():
    KEEP.append(asyncio.create_task(asyncio.sleep(60)))

def test_threads():
    KEEP.append(threading.Timer(3.0, print))
    KEEP[-1].start()

def test_sockets():
    KEEP.append(zmq.Context())
    KEEP.append(KEEP[-1].socket(zmq.DEALER))

def test_descriptors():
    KEEP.append(os.memfd_create("tandem-test"))

def test_segments():
    KEEP.append(open(f"/dev/shm/tandem-test-{os.getpid()}", "w"))
    KEEP[-1].close()
    atexit.register(os.unlink, KEEP[-1].name)

def test_children():
    KEEP.append(subprocess.Popen(["sleep", "10"]))
    atexit.register(KEEP[-1].kill)

def test_nothing():
    pass
"""


@pytest.mark.alone  # tests beside it would report its segment too
def test_each_kind_of_leak_fails_the_test_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    (tmp_path / "conftest.py").write_text(
        "import tests.conftest as rules\nrules.GRACE_S = 0.2\nfrom tests.conftest import nothing_left_behind\n"
    )
    options = [
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        tmp_path,
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path / "test_leaks.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    blamed = re.findall(r"ERROR at teardown of test_(\w+) .*\n(?:.*\n)*?the test left behind\n  (\w+): ", done.stdout)
    kinds = ["tasks", "threads", "sockets", "descriptors", "segments", "children"]
    assert blamed == [(kind, kind) for kind in kinds], done.stdout
    assert "7 passed, 6 errors" in done.stdout, "the tests are fine; what they left are the errors"
