"""The feed of ``tandem top`` follows a server through broken connections; a snapshot needs no terminal."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from common.core.errors import StartError
from common.net import http_client
from common.net.http_client import HttpClient
from deploy.cli import main as cli
from deploy.top import feed as feeds
from deploy.top.feed import Feed, snapshot
from deploy.top.state import State
from tests.fakes.live_server import LiveServer, request, system
from tests.pace import scaled


@contextmanager
def following(server: LiveServer, key: str | None = None) -> Iterator[tuple[State, Feed]]:
    state = State(server.url)
    feed = Feed(HttpClient(server.url, key), state)
    feed.start()
    try:
        yield state, feed
    finally:
        feed.stop()


def wait(feed: Feed, until: Callable[[], object]) -> None:
    """Wait for the feed to wake until the condition is true."""
    while not until():
        ready, _, _ = select.select([feed.wakes], [], [], scaled(5))
        assert ready, "nothing came"
        feed.settle()


def test_events_change_the_state() -> None:
    with LiveServer.running() as server:
        server.requests = [request("r-2"), request("r-1")]
        with following(server) as (state, feed):
            wait(feed, lambda: state.system)
            assert list(state.requests) == ["r-1", "r-2"], "the latest arrival last"
            server.send("request", request("r-3"))
            server.send("system", system(model="other"))
            wait(feed, lambda: state.system["model"] == "other")
            assert list(state.requests)[-1] == "r-3" and not state.trouble


def test_a_broken_connection_is_shown_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "BACKOFF_S", (0.0, 0.01))
    with LiveServer.running() as server, following(server) as (state, feed):
        wait(feed, lambda: state.system)
        server.first = system(model="restarted")
        server.hang_up()
        wait(feed, lambda: state.system["model"] == "restarted")
        assert server.connections == 2 and not state.trouble
        server.status = 503
        server.hang_up()
        wait(feed, lambda: "refused" in state.trouble)


def test_a_wrong_key_is_said() -> None:
    with LiveServer.running() as server:
        server.key = "right"
        with following(server, "wrong") as (state, feed):
            wait(feed, lambda: state.trouble)
            assert "does not show its events" in state.trouble
        with pytest.raises(StartError, match="does not show its events") as refused:
            snapshot(HttpClient(server.url), State(server.url))
        assert "--api-key" in refused.value.todo
        snapshot(HttpClient(server.url, "right"), state := State(server.url))
        assert state.system["model"] == "tiny"


def test_a_feed_ends_while_its_server_is_silent() -> None:
    """As does one whose server never answers at all."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        feed = Feed(HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}"), State(""))
        feed.start()
        feed.stop()
    assert all(each.daemon for each in threading.enumerate() if each.name == "events")


def test_one_snapshot_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer.running() as server:
        assert cli.main(["top", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert "tandem 1.0  tiny" in shown and "\x1b" not in shown and "q quit" not in shown


def test_servers_without_a_live_view(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer.running() as server:
        server.status = 404
        assert cli.main(["top", "--url", server.url]) == 1
        assert "has no live view" in capsys.readouterr().err
        server.status, server.first = 200, {}
        server.send("request", request("r-1"))
    assert cli.main(["top", "--url", server.url]) == 1
    assert "cannot reach" in capsys.readouterr().err


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_LINE", 100)
    with LiveServer.running() as server, HttpClient(server.url).events("/admin/events") as stream:
        next_line = iter(stream)
        with pytest.raises(OSError, match="more than 100 bytes"):
            next(next_line)
