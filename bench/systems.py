"""``tandem up`` in processes of its own, for as long as it is measured."""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from common.client import Server
from common.errors import StartError

READY_S, STOP_S, POLL_S = 300.0, 60.0, 0.05
_PR_SET_PDEATHSIG = 1
_URL = re.compile(r"http://[\w.\[\]:]+:\d+")
_SYSTEM = re.compile(r"(\d+)p(\d+)d|(\d+)c")


def counts(system: str) -> tuple[int, int, int]:
    """How many prefill, decode and colocated workers ``2p1d`` or ``2c`` has. StartError for anything else."""
    match = _SYSTEM.fullmatch(system)
    if match is None:
        why = "a system is for example 1p1d (prefill, decode) or 2c (colocated)"
        raise StartError(f"there is no system {system}", why, "correct --systems")
    prefill, decode, colocated = (int(number or 0) for number in match.groups())
    if not decode + colocated:
        raise StartError(f"{system} serves nobody", "tokens after the first need a decode worker", "correct --systems")
    return prefill, decode, colocated


def pools(system: str) -> list[str]:
    """The flags of ``tandem up`` for a system."""
    prefill, decode, colocated = counts(system)
    if colocated:
        return ["--colocated", str(colocated)]
    return ["--prefill", str(prefill), "--decode", str(decode)]


@contextlib.contextmanager
def running(model: str, system: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a ready ``tandem up`` with the pools of ``system``; StartError with its own reason if it does not
    start. It ends with the block, and with this process, however that ends."""
    words = [*([model] if model else []), *pools(system), "--port", "0", "--control-port", "0", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C is for us; we stop it
            preexec_fn=_die_with_us,
        )
        try:
            yield _ready(process, log, system)
        finally:
            _stop(process)


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ready(process: subprocess.Popen[bytes], log: IO[bytes], system: str) -> str:
    """Waits until it serves; its URL."""
    deadline = time.monotonic() + READY_S
    url = None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(f"{system} did not start", _last_words(log), "try the same tandem up")
        url = url or _said_url(log)
        if url and _is_ready(url):
            return url
        time.sleep(POLL_S)
    raise StartError(f"{system} is not ready after {READY_S:g} s", _last_words(log), "try the same tandem up")


def _is_ready(url: str) -> bool:
    try:
        return Server(url, timeout_s=5).get("/ready")[0] == 200
    except OSError:
        return False


def _said_url(log: IO[bytes]) -> str | None:
    log.seek(0)
    match = _URL.search(log.read().decode(errors="replace"))
    return match.group() if match else None


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    reasons = [line.partition(":")[2].strip() for line in lines if line.startswith(("error:", "why:"))]
    return ": ".join(reasons) or (lines[-1] if lines else "it said nothing")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
