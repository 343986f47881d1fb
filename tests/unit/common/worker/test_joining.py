"""Joining a coordinator: a worker is refused, comes too early, finds its name taken, and is let in at last."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.net import keys
from common.net.keys import Party
from common.net.messages import Goodbye, Welcome
from common.net.socket_monitor import Handshakes
from common.net.sockets import Channels, HeartbeatThread, identity
from common.worker.membership import Membership
from tests.unit.gateway_harness import QUIET_S, WAIT_S, GatewayHarness, hello_of, until


class JoiningMember:
    """A worker's membership, which the test runs beside the coordinator endpoint that it dials."""

    def __init__(self, cluster_key: Path | None, harness: GatewayHarness, party: Party = "decode") -> None:
        self.channels = Channels(cluster_key and keys.load(cluster_key, party))
        self.membership = Membership(self.channels, harness.gateway.address, hello_of("decode"))
        self.welcomes = 0

    def turn(self, harness: GatewayHarness) -> None:
        harness.gateway._read()
        self.membership.reconnect()
        self.welcomes += sum(isinstance(message, Welcome) for message in self.membership.receive())
        self.channels.poll(0.005)

    def until_refused(self, harness: GatewayHarness, words: str) -> None:
        until(lambda: self.turn(harness) or words in self.membership.refusal, f"not refused with {words!r}")

    def until_welcome(self, harness: GatewayHarness) -> None:
        before = self.welcomes
        until(lambda: self.turn(harness) or self.welcomes > before, "no Welcome")
        assert not self.membership.refusal

    def close(self) -> None:
        self.membership.close()
        self.channels.close()


@pytest.mark.parametrize(
    ("mine", "theirs", "party", "words"),
    [
        ("", "cluster", "decode", "it requires a key: give this worker the cluster's --cluster-key-file"),
        ("cluster", "", "decode", "it has no keys"),
        ("other", "cluster", "decode", "keys of another tandem keygen"),
        ("cluster", "cluster", "coordinator", "does not admit this worker's key"),
    ],
)
def test_refused_worker_gets_reason(
    cluster_key: Path, other: Path, mine: str, theirs: str, party: Party, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"": None, "cluster": cluster_key, "other": other}
    harness = GatewayHarness(files[theirs])
    member = JoiningMember(files[mine], harness, party)
    try:
        member.until_refused(harness, words)
        assert not member.membership.joined

        def is_logged() -> bool:
            member.turn(harness)
            harness.gateway._watch()
            harness.gateway._complaints.log_due(1e9)
            return "handshakes that failed" in caplog.text

        until(is_logged, "the coordinator's log says nothing of it")
    finally:
        member.close()
        harness.close()


@pytest.mark.parametrize("mine", ["cluster", "another role's"])
def test_a_refusal_is_heard_however_soon_it_comes(
    cluster_key: Path, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq's I/O thread may be rejected for good before the dialing thread runs on."""
    connect = zmq.Socket.connect

    def connect_and_be_away(socket: zmq.Socket[Any], address: str) -> None:
        connect(socket, address)
        if address.startswith("tcp:"):
            time.sleep(QUIET_S)

    harness = GatewayHarness(None if mine == "cluster" else cluster_key)
    monkeypatch.setattr(zmq.Socket, "connect", connect_and_be_away)
    member = JoiningMember(cluster_key, harness, "decode" if mine == "cluster" else "coordinator")
    try:
        member.until_refused(harness, "key")
    finally:
        member.close()
        harness.close()


def test_a_worker_whose_name_is_taken_joins_when_it_is_free(
    cluster_key: Path, harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.membership.RETRY_S", 0.1)
    first = JoiningMember(cluster_key, harness)
    first.until_welcome(harness)
    second = JoiningMember(cluster_key, harness)
    try:
        second.until_refused(harness, "give every worker a name of its own")
        assert not second.membership.joined
        first.close()
        second.until_welcome(harness)
    finally:
        second.close()


@pytest.mark.parametrize("wrong", ["none", "other"])
def test_a_worker_joins_when_its_coordinator_has_been_corrected(
    cluster_key: Path, other: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a worker that had joined before: its coordinator restarts with a wrong key file, then with the right one."""
    monkeypatch.setattr("common.worker.membership.RECONNECT_S", 0.1)
    harness = GatewayHarness(cluster_key)
    port = harness.port
    member = JoiningMember(cluster_key, harness)
    try:
        member.until_welcome(harness)
        harness.close()
        harness = GatewayHarness(other if wrong == "other" else None, port)
        member.until_refused(harness, "keys")
        harness.close()
        harness = GatewayHarness(cluster_key, port)
        member.until_welcome(harness)
        until(lambda: member.turn(harness) or harness.beats >= 2, "its heartbeats arrive here")
    finally:
        member.close()
        harness.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_worker_started_before_coordinator_joins_once(
    cluster_key: Path, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.membership.RECONNECT_S", 0.1)
    key = cluster_key if encrypted else None
    harness = GatewayHarness(key)
    port = harness.port
    harness.close()
    member = JoiningMember(key, harness)
    try:
        alone_until = time.monotonic() + 1.0
        while time.monotonic() < alone_until:
            member.membership.reconnect()
            member.channels.poll(0.005)
        monkeypatch.setattr("common.worker.membership.RECONNECT_S", 60.0)  # a slow Welcome causes no second Hello
        harness = GatewayHarness(key, port)
        member.until_welcome(harness)
        until(lambda: member.turn(harness) or harness.beats >= 3, "its heartbeats arrive")
        assert (harness.joins, member.welcomes) == (1, 1)
    finally:
        member.close()
        harness.close()


def test_a_hello_that_was_lost_with_its_connection_is_said_again_over_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.worker.membership.RECONNECT_S", 0.1)
    deaf = Channels()
    router, address = deaf.router("tcp://127.0.0.1:*")
    harness = GatewayHarness(None)
    monkeypatch.setattr(harness.gateway, "address", address)
    member = JoiningMember(None, harness)
    harness.close()
    try:
        assert router.poll(int(WAIT_S * 1000))
        router.close(0)  # while its Hello is unread
        deaf.close()  # returns when the address is free
        harness = GatewayHarness(None, int(address.rpartition(":")[2]))
        member.until_welcome(harness)
    finally:
        member.close()
        harness.close()


def test_heartbeat_thread_reconnects_to_corrected_coordinator(cluster_key: Path) -> None:
    """Of a worker's two connections, only the heartbeat's has met the wrong coordinator."""
    harness = GatewayHarness(None)
    channels, hello, dials = Channels(keys.load(cluster_key, "decode")), hello_of("decode"), []

    def dial() -> tuple[zmq.Socket[Any], Handshakes]:
        dials.append(1)
        name = identity(hello.name, hello.incarnation, beats=True)
        return channels.watched_dealer(f"tcp://127.0.0.1:{harness.port}", name)

    heartbeats = HeartbeatThread(dial, 0.02, lambda _: Goodbye(hello.incarnation, "a beat"))
    try:
        until(lambda: len(dials) > 2, "it is refused, and dials again")
        port = harness.port
        harness.close()
        heard: list[Any] = []
        harness = GatewayHarness(cluster_key, port)
        harness.gateway._reception.stranger = lambda *said: heard.append(said)  # type: ignore[method-assign]
        until(lambda: harness.gateway._read() or heard, "its beat arrives")
    finally:
        heartbeats.stop()
        channels.close()
        harness.close()
