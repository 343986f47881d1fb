"""Runs a server as a child process while it is measured: starts it, waits until it is ready, stops its process group.

The server ends with the ``with`` block that started it, and with this process, however this process ends. Its output is
kept for the error message when it does not start.
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
from pathlib import Path
from typing import IO, TypeVar

from common.core.errors import StartError, reason

STOP_S, POLL_S = 60.0, 0.05
_PR_SET_PDEATHSIG = 1
T = TypeVar("T")


class Process:
    """A running server, called ``name`` in messages. ``pid`` leads its own process group."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.name, self.pid, self._popen, self._log = name, popen.pid, popen, log

    def said(self) -> str:
        """Return everything it has written so far to stdout and stderr."""
        log = self._log.fileno()  # pread: the server shares the file position, which must not move
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def wait(self, look: Callable[[], T | None], within_s: float, todo: str) -> T:
        """Poll ``look`` until it returns something other than None, and return that.

        Raises StartError, with the server's last output, if the server exits first or ``within_s`` seconds pass."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self._popen.poll() is not None:
                raise StartError(f"{self.name} did not start", last_words(self.said()), todo)
            if (found := look()) is not None:
                return found
            time.sleep(POLL_S)
        raise StartError(f"{self.name} is not ready after {within_s:g} s", last_words(self.said()), todo)

    def pause(self) -> None:
        """Stop the whole process group with SIGSTOP until :meth:`resume`.

        If this process dies meanwhile, the kernel sends SIGHUP and SIGCONT to the group, as to every orphaned group
        with stopped members, and so ends it. That does not happen to a group that is stopped after it was orphaned;
        therefore this returns only when the leader is stopped."""
        self._signal(signal.SIGSTOP)
        if self._popen.poll() is None:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue the process group after :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self) -> None:
        """Send SIGTERM to the leader, wait up to ``STOP_S`` for it, then kill the rest of its group.

        If the wait is interrupted, the group is killed at once."""
        try:
            if self._popen.poll() is None:
                self._popen.terminate()
                self.resume()  # a stopped process does not handle SIGTERM
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_S)
        finally:
            self._signal(signal.SIGKILL)
            self._popen.wait()


@contextlib.contextmanager
def started(name: str, words: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Process]:
    """Run the command ``words`` with our environment and ``environ``, and stop it at the end of the block.

    Raises StartError if the program cannot be executed."""
    with tempfile.TemporaryFile() as log:
        try:
            popen = subprocess.Popen(
                words,
                env=os.environ | (environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C reaches only this process, which then stops the server
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
    """Return why a server ended, from its output: the text of our own errors if there is one, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reasons = [line.partition(":")[2].strip() for line in lines if line.startswith(("error:", "why:"))]
    return ": ".join(reasons) or (lines[-1] if lines else "it printed nothing")


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to the calling process when its parent ends, however the parent ends.

    Also resets SIGHUP to its default action, in case the parent runs under nohup: an orphaned, stopped group must end
    on SIGHUP (see :meth:`Process.pause`)."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def cpu_seconds(root: int) -> float:
    """Return the user and system time, in seconds, of the process ``root`` and of its living descendants."""
    ticks, parents = dict[int, int](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # proc(5), from the state on
        except OSError:  # the process has ended meanwhile
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def belongs(pid: int) -> bool:
        return pid == root or (pid in parents and belongs(parents[pid]))

    return sum(ticks[pid] for pid in ticks if belongs(pid)) / os.sysconf("SC_CLK_TCK")
