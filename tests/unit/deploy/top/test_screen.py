"""``tandem top`` on a terminal: it draws, follows the size and the keys, and gives the terminal back as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.live_server import LiveServer, request, system, worker
from tests.pace import scaled

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[4]
FRAME_END = "\x1b[?2026l"


class Terminal:
    """A pseudo-terminal with ``tandem top`` in it."""

    def __init__(self, url: str, term: str = "xterm-256color") -> None:
        self.ours, theirs = pty.openpty()
        self.resize(24, 100)
        self.usual = termios.tcgetattr(theirs)
        self.theirs = theirs
        command = [sys.executable, "-m", "deploy.cli", "top", "--url", url]
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
        seen = len(self.written)
        while not (found := [each for each in frames(self.written[:seen]) if shows(each)]):
            self.until(FRAME_END)
            seen = self.written.rindex(FRAME_END) + len(FRAME_END)
        return found[-1]

    def end(self) -> int:
        """Wait for the process; check that the terminal is as it was."""
        code = self.process.wait(scaled(20))
        while select.select([self.ours], [], [], 0)[0]:
            self.written += os.read(self.ours, 65536).decode(errors="replace")
        assert termios.tcgetattr(self.theirs) == self.usual
        assert self.written.rstrip().endswith("\x1b[?25h\x1b[?1049l"), self.written[-200:]
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer.running() as found:
        found.requests = [request("r-1")]
        yield found


@pytest.fixture
def terminal(server: LiveServer) -> Iterator[Terminal]:
    found = Terminal(server.url)
    yield found
    found.close()


def frames(written: str) -> list[str]:
    whole = [each.partition(FRAME_END) for each in written.split("\x1b[?2026h")[1:]]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text) for text, end, _ in whole if end]


def test_the_view_follows_events_keys_and_size(server: LiveServer, terminal: Terminal) -> None:
    first = terminal.until(FRAME_END)
    assert first.startswith("\x1b[?1049h\x1b[?25l") and "tiny" in first and "prefill-0" in first and "r-1" in first
    server.until_connected(2)  # the second connection follows
    server.send("worker", {"name": "decode-0", "state": "lost", "why": "silent for 2 s", "t": 1764571200.0})
    server.send("system", system(workers=[worker("prefill-0")], absent=[{"id": "decode-0", "why": "killed"}]))
    terminal.until("killed")
    terminal.press("3")
    terminal.frame(lambda shown: "silent for 2 s" in shown and "r-1" not in shown)
    terminal.press(" ")
    terminal.frame(lambda shown: "paused" in shown)
    server.send("system", system(model="unseen"))
    terminal.resize(40, 60)  # a new size is drawn, even of a view that is paused
    terminal.process.send_signal(signal.SIGWINCH)
    last = terminal.frame(lambda shown: len(shown.splitlines()) == 40).splitlines()
    assert max(map(len, last)) <= 60 and not any("unseen" in line for line in last)
    terminal.press("q")
    assert terminal.end() == 0


@pytest.mark.parametrize("how", ["\x03", "\x04", signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_given_back(terminal: Terminal, how: str | signal.Signals) -> None:
    terminal.until("q quit")
    if isinstance(how, str):
        terminal.press(how)
        if how == "\x03":  # the session has no foreground group here, to which the terminal would send the signal
            terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.process.send_signal(how)
    assert terminal.end() in (0, 130)


def test_a_stopped_view_gives_the_terminal_back_and_takes_it_again(terminal: Terminal) -> None:
    terminal.until("q quit")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.until("\x1b[?1049l")
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until("q quit")
    terminal.press("q")
    assert terminal.end() == 0


def test_a_lost_server_is_shown_until_q(server: LiveServer, terminal: Terminal) -> None:
    terminal.until("q quit")
    server.until_connected(2)
    server.status = 503
    server.hang_up()
    terminal.until("no connection")
    terminal.press("q")
    assert terminal.end() == 0


def test_a_dumb_terminal_gets_one_snapshot(server: LiveServer) -> None:
    terminal = Terminal(server.url, term="dumb")
    try:
        assert "r-1" in terminal.until("prefill-0 > decode-0")
        assert terminal.process.wait(scaled(20)) == 0
        assert "\x1b" not in terminal.written
    finally:
        terminal.close()
