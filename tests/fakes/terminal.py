"""A pseudo-terminal with ``tandem top`` in it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from tests.pace import scaled

ROOT = Path(__file__).parents[2]
FRAME_END = "\x1b[?2026l"


class Terminal:
    """``tandem top`` with ``flags``, on a terminal of 24 lines and 100 columns."""

    def __init__(self, url: str, *flags: str, term: str = "xterm-256color") -> None:
        self.ours, theirs = pty.openpty()
        self.resize(24, 100)
        self.usual = termios.tcgetattr(theirs)
        self.theirs = theirs
        command = [sys.executable, "-m", "deploy.cli", "top", "--url", url, *flags]
        environment = {**os.environ, "TERM": term, "PYTHONIOENCODING": "utf-8"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True
        )
        self.written = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def until(self, part: str) -> str:
        """Read until ``part`` has been written since the last call; return what was."""
        deadline, start = time.monotonic() + scaled(30), len(self.written)
        while part not in self.written[start:]:
            ready, _, _ = select.select([self.ours], [], [], deadline - time.monotonic())
            assert ready, f"{part!r} was not written: {self.written[start:][-3000:]!r}"
            try:
                self.written += os.read(self.ours, 65536).decode(errors="replace")
            except OSError:  # all processes have left the terminal
                raise AssertionError(f"{part!r} was not written: {self.written[start:]!r}") from None
        return self.written[start:]

    def frame(self, shows: Callable[[str], bool]) -> str:
        """Read until a whole frame is as wanted; return it without escape sequences."""
        seen, deadline = len(self.written), time.monotonic() + scaled(40)
        while not (found := [each for each in frames(self.written[:seen]) if shows(each)]):
            assert time.monotonic() < deadline, f"no frame is as wanted: {frames(self.written)[-1]}"
            self.until(FRAME_END)
            seen = self.written.rindex(FRAME_END) + len(FRAME_END)
        return found[-1]

    def end(self) -> int:
        """Wait for the process, and read what it writes meanwhile: it could not end with a full terminal. Check that
        the terminal is as it was."""
        deadline = time.monotonic() + scaled(20)
        while (code := self.process.poll()) is None or self._has_more(0):
            assert time.monotonic() < deadline, f"it does not end: {self.written[-3000:]!r}"
            if self._has_more(0.02):
                self.written += os.read(self.ours, 65536).decode(errors="replace")
        assert termios.tcgetattr(self.theirs) == self.usual
        assert self.written.rstrip().endswith("\x1b[?25h\x1b[?1049l"), self.written[-200:]
        return code

    def _has_more(self, seconds: float) -> bool:
        return bool(select.select([self.ours], [], [], seconds)[0])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def frames(written: str) -> list[str]:
    whole = [each.partition(FRAME_END) for each in written.split("\x1b[?2026h")[1:]]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text) for text, end, _ in whole if end]
