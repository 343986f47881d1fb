"""A server in a process of its own, for as long as it is measured: started, awaited, and stopped with all its children.

It ends with the block that started it and with this process, however that ends. What it says is kept, because that is
where the reason stands when it does not start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TypeVar

from common.core.errors import StartError, reason

STOP_S, POLL_S = 60.0, 0.05
_PR_SET_PDEATHSIG = 1
T = TypeVar("T")


class Process:
    """A running server, ``name`` in messages. ``pid`` leads a process group of its own."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.name, self.pid, self._popen, self._log = name, popen.pid, popen, log

    def said(self) -> str:
        """All it has written so far, errors included."""
        log = self._log.fileno()  # whose position is the server's, too: to move it would have it write elsewhere
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def wait(self, look: Callable[[], T | None], within_s: float, todo: str) -> T:
        """What ``look`` finds, once it finds something. StartError with the server's own reason if it ends before or
        has not come so far after ``within_s`` seconds."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self._popen.poll() is not None:
                raise StartError(f"{self.name} did not start", last_words(self.said()), todo)
            if (found := look()) is not None:
                return found
            time.sleep(POLL_S)
        raise StartError(f"{self.name} is not ready after {within_s:g} s", last_words(self.said()), todo)

    def pause(self) -> None:
        """Halts its whole group, until :meth:`resume`. (If this process dies meanwhile, the kernel ends the group: one
        that is orphaned and halted is told to hang up and to go on.)

        Returns once the leader is halted: a group that is orphaned first, and halted then, stays so for ever."""
        self._signal(signal.SIGSTOP)
        if self._popen.poll() is None:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self) -> None:
        """Asks the leader to leave, and ends whatever is left of its group: at once if whoever waits is interrupted."""
        try:
            if self._popen.poll() is None:
                self._popen.terminate()
                self.resume()  # who is halted hears nothing
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_S)
        finally:
            self._signal(signal.SIGKILL)
            self._popen.wait()


@contextlib.contextmanager
def started(name: str, words: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Process]:
    """The process of ``words``, whose environment is ours and ``environ``. StartError if there is no such program."""
    with tempfile.TemporaryFile() as log:
        try:
            popen = subprocess.Popen(
                words,
                env=os.environ | (environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C is for us; we stop it
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise StartError(f"{name} cannot be started as {words[0]}", reason(error), "correct its path") from error
        process = Process(name, popen, log)
        try:
            yield process
        finally:
            process.stop()


def last_words(said: str) -> str:
    """Why a server ended, in its own words: those of our own errors, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reasons = [line.partition(":")[2].strip() for line in lines if line.startswith(("error:", "why:"))]
    return ": ".join(reasons) or (lines[-1] if lines else "it said nothing")


def die_with_parent() -> None:
    """The calling process is asked to leave as soon as the one that started it has ended, however that came about; what
    is told to hang up does, also where that one had nohup before it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
