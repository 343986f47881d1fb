"""``tandem top`` on a terminal: it draws, follows the size and the keys, and gives the terminal back as it was."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.fakes.live_server import LiveServer, request, system, worker
from tests.fakes.terminal import FRAME_END, Terminal
from tests.pace import scaled

pytestmark = pytest.mark.processes


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
