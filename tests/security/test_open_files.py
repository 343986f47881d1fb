"""More connections than the open-file limit allows: existing clients stay served, further ones get an error, and the
log says why."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.system import RunningSystem
from tests.pace import scaled
from tests.security.outside import RawConnection, ask, coordinator, request

FILES = 100
CONNECTIONS = 150
PATIENCE_S = scaled(30.0)
RAISES = "ulimit -n"


@pytest.fixture
def system(tmp_path: Path) -> Iterator[RunningSystem]:
    with coordinator(tmp_path, "--client-timeout", "60") as system:
        yield system


def bound(system: RunningSystem, files: int) -> None:
    """Limit ``system`` to ``files`` open files."""
    hard = resource.prlimit(system.process.popen.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(system.process.popen.pid, resource.RLIMIT_NOFILE, (files, hard))


def lines(system: RunningSystem) -> list[str]:
    return [line for line in system.process.text.splitlines() if RAISES in line]


def wait_for_line(system: RunningSystem, meanwhile: Callable[[], None] = lambda: None) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := lines(system)):
        meanwhile()
        assert time.monotonic() < deadline, system.process.text
        time.sleep(0.05)
    return found[0]


def test_silent_connections_up_to_the_limit_are_one_line(system: RunningSystem) -> None:
    bound(system, FILES)
    with contextlib.ExitStack() as open_ones:
        first = open_ones.enter_context(RawConnection(system.url))
        for _ in range(CONNECTIONS):
            with contextlib.suppress(ConnectionError):
                open_ones.enter_context(RawConnection(system.url))
        line = wait_for_line(system)
        assert f" {FILES} allowed files" in line and "warning" in line
        first.send(request("GET", "/health"))
        assert first.answer().status == 200, "one that was there before is served"
        with RawConnection(system.url) as late:
            answer = late.answer()
            assert answer.status == 429 and answer.code == "server_is_overloaded" and "retry-after" in answer.headers
            assert late.closed()
        assert len(lines(system)) == 1, "the others are counted"
        assert "Traceback" not in system.process.text
    deadline = time.monotonic() + PATIENCE_S
    while ask(system.url, request("GET", "/health")).status != 200:
        assert time.monotonic() < deadline, "they have left"


def test_coordinator_logs_exhausted_file_limit(system: RunningSystem) -> None:
    def leave_none() -> None:
        """Lower the limit to the first free descriptor. This is repeated because a lower one, for example of an earlier
        connection, may be closed meanwhile."""
        taken = {int(each) for each in os.listdir(f"/proc/{system.process.popen.pid}/fd")}
        bound(system, next(number for number in itertools.count() if number not in taken))

    assert re.search(r"connections are reset \(.*open files\)", wait_for_line(system, leave_none))
    bound(system, 1024)


def test_the_limit_is_raised_as_far_as_it_may_be(tmp_path: Path) -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 1024:
        pytest.skip(f"only {most} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))  # the server inherits it
    try:
        with coordinator(tmp_path) as system:
            soft, hard = resource.prlimit(system.process.popen.pid, resource.RLIMIT_NOFILE)
            assert hard == most and soft >= 1024
            assert not lines(system)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
