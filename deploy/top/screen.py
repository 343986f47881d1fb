"""The terminal of the view: its alternate screen, its keys and its size.

Each frame is written at once over the last one, so that nothing flickers over a slow connection. The terminal is put
back as it was, however the view ends, and while it is stopped by Ctrl-Z.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from rich.console import Console

from deploy.top.feed import Feed
from deploy.top.lines import Size, view
from deploy.top.state import State

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h\x1b[H", "\x1b[J\x1b[?2026l"
"""Around a frame: draw it as a whole, from the top left; clear what is below it."""
FOCUS = "01234"
LEAST_S = 0.2
"""Least time between two frames, in which events are gathered."""


def can_draw(stdin: TextIO, stdout: TextIO) -> bool:
    """Return whether both are terminals on which lines can be overwritten."""
    return stdin.isatty() and stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """Draws ``state`` on a terminal until q or Ctrl-C."""

    def __init__(self, state: State, feed: Feed, stdin: TextIO = sys.stdin, stdout: TextIO = sys.stdout) -> None:
        self._state, self._feed, self._in, self._out = state, feed, stdin.fileno(), stdout
        self._console = Console(file=stdout, force_terminal=True, highlight=False)
        self._plain = not _is_unicode(stdout)
        self._focus = "0"
        self._held: State | None = None
        """What is shown while the view is paused."""
        self._resized, self._resizes = os.pipe()
        os.set_blocking(self._resizes, False)

    def run(self) -> None:
        """Draw at every change, at most every ``LEAST_S``, and react to keys, until the view is to end."""
        try:
            with _signals(self._on_resize, self._suspend), self._raw():
                self._draw()
                while self._wait():
                    self._draw()
        except KeyboardInterrupt:
            pass
        finally:
            os.close(self._resized)
            os.close(self._resizes)

    def _wait(self) -> bool:
        """Wait for a key, a change or a new size. Return whether to go on."""
        ready, _, _ = select.select([self._in, self._feed.wakes, self._resized], [], [])
        if self._in in ready:
            keys = os.read(self._in, 64).decode(errors="replace")
            if not keys or "q" in keys.lower() or "\x04" in keys:
                return False
            self._press(keys)
        elif self._resized in ready:
            os.read(self._resized, 64)
        else:
            select.select([self._in, self._resized], [], [], LEAST_S)  # more events may come; a key need not wait
            self._feed.settle()
        return True

    def _press(self, keys: str) -> None:
        for key in keys:
            if key in FOCUS:
                self._focus = key
            elif key in " p":
                with self._feed.lock:
                    self._held = self._state.paused() if self._held is None else None

    def _draw(self) -> None:
        columns, rows = os.get_terminal_size(self._out.fileno())
        with self._feed.lock:
            lines = view(self._held or self._state, Size(columns, rows), self._focus, self._plain)
        self._console.width = columns
        with self._console.capture() as frame:
            for number, line in enumerate(lines):
                end = "" if number == len(lines) - 1 else "\n"
                self._console.print(line, end=end, no_wrap=True, overflow="crop", crop=True)
        text = frame.get().replace("\n", "\x1b[K\r\n")
        self._write(f"{_BEGIN}{text}\x1b[K{_END}")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    # -- the terminal -------------------------------------------------------------------------------------------------

    @contextmanager
    def _raw(self) -> Iterator[None]:
        """Read keys one by one without showing them, on a screen of our own, within the block."""
        self._usual = termios.tcgetattr(self._in)
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        tty.setcbreak(self._in)
        self._write(_ENTER)

    def _leave(self) -> None:
        self._write(_LEAVE)
        termios.tcsetattr(self._in, termios.TCSADRAIN, self._usual)

    def _on_resize(self, *_: object) -> None:
        try:
            os.write(self._resizes, b"x")
        except BlockingIOError:
            pass

    def _suspend(self, *_: object) -> None:
        """Give the terminal back, stop, and take it again when the shell continues this process."""
        self._leave()
        usual = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, usual)
        self._enter()
        self._on_resize()


@contextmanager
def _signals(on_resize: Callable[..., None], on_stop: Callable[..., None]) -> Iterator[None]:
    """Handle changes of size, Ctrl-Z, and the end of the terminal or of the session within the block."""

    def end(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers: dict[signal.Signals, Callable[..., None]] = {
        signal.SIGWINCH: on_resize, signal.SIGTSTP: on_stop, signal.SIGTERM: end, signal.SIGHUP: end,
        signal.SIGINT: end,  # shells start what is in the background with it ignored
    }  # fmt: skip
    usual = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _is_unicode(stdout: TextIO) -> bool:
    return (stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf16")
