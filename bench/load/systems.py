"""Runs ``tandem up`` with given pools as a child process while it is measured."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence

from bench.load.processes import started
from common.core.errors import StartError
from common.net.http_client import HttpClient

READY_S = 300.0
_URL = re.compile(r"http://[\w.\[\]:]+:\d+")
_SYSTEM = re.compile(r"(\d+)p(\d+)d|(\d+)c")


def counts(system: str) -> tuple[int, int, int]:
    """Return the numbers of prefill, decode and colocated workers of a system such as ``2p1d`` or ``2c``.

    Raises StartError for any other text, and for a system that cannot serve a request."""
    match = _SYSTEM.fullmatch(system)
    if match is None:
        why = "a system is for example 1p1d (prefill, decode) or 2c (colocated)"
        raise StartError(f"{system} is not a system", why, "correct --systems")
    prefill, decode, colocated = (int(number or 0) for number in match.groups())
    if not prefill + colocated:
        raise StartError(f"{system} cannot serve", "prompts need a prefill worker", "correct --systems")
    if not decode + colocated:
        raise StartError(f"{system} cannot serve", "tokens after the first need a decode worker", "correct --systems")
    return prefill, decode, colocated


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def usual_systems(cores: int) -> str:
    """Return the default of ``--systems``: a 1p1d system, colocated workers and, if there is a core for a third worker,
    systems with three workers."""
    return "1p1d,1c,2c" if cores <= 2 else "1p1d,1c,2c,2p1d,1p2d,3c"


def pools(system: str) -> list[str]:
    """Return the flags of ``tandem up`` for a system."""
    prefill, decode, colocated = counts(system)
    if colocated:
        return ["--colocated", str(colocated)]
    return ["--prefill", str(prefill), "--decode", str(decode)]


@contextlib.contextmanager
def running(model: str, system: str, flags: Sequence[str] = (), *, ready_s: float = READY_S) -> Iterator[str]:
    """Run ``tandem up`` with the pools of ``system``, and yield its URL once it is ready.

    If it does not start within ``ready_s`` seconds, StartError is raised with the reason that it printed."""
    words = [*([model] if model else []), *pools(system), "--port", "0", "--control-port", "0", *flags]
    with started(system, [sys.executable, "-m", "deploy.cli", "up", *words]) as process:

        def url() -> str | None:
            said = _URL.search(process.said())
            return said.group() if said and is_ready(said.group(), "/ready") else None

        yield process.wait(url, ready_s, "try the same tandem up")


def is_ready(url: str, path: str) -> bool:
    """Return whether the server answers ``path`` with 200."""
    try:
        return HttpClient(url, timeout_s=5).get(path)[0] == 200
    except OSError:
        return False
