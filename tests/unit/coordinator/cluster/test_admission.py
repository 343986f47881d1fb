"""Workers at the coordinator's control port: which keys are let in, and which peers are cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.net.keys import Party
from common.net.messages import PROTOCOL, Drain, Goodbye, NameTaken, Rejected, Rejoin, ToWorker, Welcome
from common.net.peer_ban_list import REMEMBERED, STRIKES, PeerBanList
from common.net.sockets import DROPPED_PARTS, identity, receive, send
from common.net.wire import seal
from coordinator.cluster.reception import MOST_ASKED
from tests.unit.coordinator.cluster.test_registry import beat
from tests.unit.gateway_harness import GatewayHarness, hello_of, until
from tests.unit.parts import counted, many


@pytest.mark.parametrize("key", ["prefill", "decode", "colocated"])
@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_a_worker_joins_only_in_the_role_of_its_key(harness: GatewayHarness, key: Party, role: Party) -> None:
    hello = hello_of(role)
    socket = harness.dial(key, identity(hello.name, hello.incarnation))
    send(socket, hello)
    answer = harness.answer(socket)
    if key == role:
        assert isinstance(answer, Welcome)
    else:
        assert isinstance(answer, Rejected) and f"key is that of {key}" in answer.reason
        assert not list(harness.registry) and harness.gateway.bad_messages == 1


def test_the_name_of_a_live_worker_cannot_be_taken_with_a_valid_key(harness: GatewayHarness) -> None:
    """Neither another process of that name can take it, nor a socket with the part of its identity that others know."""
    hello = hello_of("decode")
    worker = harness.dial("decode", identity(hello.name, hello.incarnation, "its own"))
    send(worker, hello)
    assert isinstance(harness.answer(worker), Welcome)
    (here,) = harness.registry
    other = msgspec.structs.replace(hello, incarnation="another")
    newcomer = harness.dial("decode", identity(other.name, other.incarnation))
    for _ in range(STRIKES + 1):  # a newcomer may try again and again
        send(newcomer, other)
        answer = harness.answer(newcomer)
        assert isinstance(answer, NameTaken) and f"process {hello.pid} of {hello.host}" in answer.reason
    thief = harness.dial("decode", identity(hello.name, hello.incarnation))
    for said in (hello, beat(hello.incarnation, draining=True), Goodbye(hello.incarnation, "stolen")):
        send(thief, said)
    until(lambda: harness.gateway._read() or harness.gateway.bad_messages == 3, "all three are dropped")
    assert list(harness.registry) == [here] and here.ready and not harness.lost_workers
    assert not thief.poll(0) or isinstance(receive(thief, ToWorker), NameTaken)
    harness.gateway.send(here, Drain(1))
    until(lambda: harness.gateway._read() or worker.poll(5), "it is still reached")
    worker.close(0)

    def follows() -> bool:
        send(newcomer, other)
        return isinstance(harness.answer(newcomer), Welcome)

    until(follows, "a process that has died is followed at once, whatever the monitor has said so far")
    assert [each.id for each in harness.registry] == [other.incarnation]


def test_missing_worker_keeps_name_and_identity(harness: GatewayHarness) -> None:
    """Its connection breaks, and its heartbeat arrives before it can send Hello."""
    hello = hello_of("decode")
    name = identity(hello.name, hello.incarnation, "its own")
    worker, heartbeats = harness.dial("decode", name), harness.dial("decode", name + b"|hb")
    send(worker, hello)
    assert isinstance(harness.answer(worker), Welcome)
    (here,) = harness.registry
    harness.gateway._remove(here)
    harness.gateway._miss(here)
    thief = harness.dial("decode", identity(hello.name, hello.incarnation))
    for said in (hello, Goodbye(hello.incarnation, "stolen")):
        send(thief, said)
    until(lambda: harness.gateway._read() or harness.gateway.bad_messages == 1, "its Hello is not believed")
    harness.gateway._look_for_missing()
    send(heartbeats, beat(hello.incarnation))
    assert isinstance(harness.answer(worker), Rejoin)
    other = msgspec.structs.replace(hello, incarnation="another")
    newcomer = harness.dial("decode", identity(other.name, other.incarnation))
    send(newcomer, other)
    assert isinstance(harness.answer(newcomer), NameTaken)
    send(worker, hello)
    assert isinstance(harness.answer(worker), Welcome)


@pytest.mark.parametrize("keyed", [True, False])
def test_refusal_reason_is_sent_only_with_keys_and_logged_once(
    cluster_key: Path, keyed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    harness = GatewayHarness(cluster_key if keyed else None)
    try:
        harness.registry.fingerprint = "served"
        hello = msgspec.structs.replace(hello_of("decode"), fingerprint="mine\n2026 forged line")
        socket = harness.dial("decode", identity(hello.name, hello.incarnation, "secret"))
        for _ in range(50):
            send(socket, hello)
            answer = harness.answer(socket)
            assert isinstance(answer, Rejected)
            assert ("fingerprint" in answer.reason) is keyed and ("served" in answer.reason) is keyed
        harness.gateway._complaints.log_due(1e9)
        reported = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
        assert len(reported) == 2 and "fingerprint" in reported[0] and reported[1].endswith(" (49 times)")
        assert "secret" not in caplog.text and not any("\n" in line for line in reported)
    finally:
        harness.close()


VERSIONS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "newer": lambda row: row,
    "newer, with more fields": lambda row: [*row, "more", {"of": [b"other", 1.5, None]}],
    "newer, with other fields": lambda row: [*row[:2], *reversed(row[2:])],
    "older, with fewer fields": lambda row: [row[0], 1, *row[2:5]],
    "with nothing but its number": lambda row: row[:2],
}
"""Possible forms of another version's Hello: a tag, a number, and any fields."""


@pytest.mark.parametrize("version", VERSIONS)
def test_hello_of_other_version_is_refused_with_reason(harness: GatewayHarness, version: str) -> None:
    hello = hello_of("decode")
    socket = harness.dial("decode", identity(hello.name, hello.incarnation))
    row = VERSIONS[version](["hello", PROTOCOL + 1, *msgspec.structs.astuple(hello)[1:]])
    for _ in range(STRIKES + 1):  # it may try again and again
        socket.send(seal(msgspec.msgpack.encode(row)))
        answer = harness.answer(socket)
        words = f"protocol {row[1]}, but this coordinator speaks {PROTOCOL}: run the same version of Tandem"
        assert isinstance(answer, Rejected) and answer.reason == words
    assert not list(harness.registry) and not harness.gateway.bad_messages


def test_unknown_workers_heartbeat_delays_its_replacement(harness: GatewayHarness) -> None:
    hello, clock = hello_of("decode"), harness.gateway.clock
    name = identity(hello.name, hello.incarnation)
    control, heartbeats = harness.dial("decode", name), harness.dial("decode", name + b"|hb")
    harness.registry.expect_rejoin(hello.name, hello.host, hello.pid, clock() - 7)

    def answered() -> bool:
        # Repeated: the first beat may be read before the control connection, which carries the answer, is open.
        send(heartbeats, beat(hello.incarnation, turn_ms=60_000, expected_ms=20_000))
        harness.gateway._read()
        return bool(control.poll(20))

    until(answered, "the stranger is asked for its Hello")
    assert isinstance(receive(control, ToWorker), Rejoin)
    assert not harness.registry.unresponsive.overdue(clock() + 2)
    assert [hang.pid for hang in harness.registry.unresponsive.overdue(clock() + 10)] == [hello.pid]


def test_messages_of_other_version_get_rejoin_then_refusal(
    harness: GatewayHarness,
) -> None:
    """Its other messages cannot be understood here; it is asked for its Hello, as any unknown peer is."""
    hello = hello_of("decode")
    name = identity(hello.name, hello.incarnation)
    control, heartbeats = harness.dial("decode", name), harness.dial("decode", name + b"|hb")
    said = [["news"], ["heartbeat"], ["heartbeat", hello.incarnation, {"of": [b"other", 1.5, None]}], ["tokens", 1]]
    for row in said * STRIKES:
        socket = heartbeats if row[0] == "heartbeat" else control
        socket.send(seal(msgspec.msgpack.encode(row)))
        assert isinstance(harness.answer(control), Rejoin)
    control.send(seal(msgspec.msgpack.encode(["hello", PROTOCOL - 1, *msgspec.structs.astuple(hello)[1:-1]])))
    answer = harness.answer(control)
    assert isinstance(answer, Rejected) and answer.reason.startswith(f"protocol {PROTOCOL - 1}, but this coordinator")
    assert harness.gateway.bad_messages == len(said) * STRIKES and not harness.gateway.ban_list.cut_off


def test_a_stranger_that_never_says_hello_is_cut_off_at_last(harness: GatewayHarness) -> None:
    hello = hello_of("decode")
    socket = harness.dial("decode", identity(hello.name, hello.incarnation))
    for _ in range(MOST_ASKED + STRIKES):
        socket.send(seal(msgspec.msgpack.encode(["news"])))
    until(lambda: harness.gateway._read() or harness.gateway.ban_list.cut_off == 1, "it is cut off")
    assert harness.gateway.bad_messages == MOST_ASKED + STRIKES


@pytest.mark.parametrize("said", [[], [1, "heartbeat"], "heartbeat", {"kind": "heartbeat"}, ["x" * 129]])
def test_a_stranger_that_says_no_message_of_any_version_is_cut_off(harness: GatewayHarness, said: Any) -> None:
    hello = hello_of("decode")
    socket = harness.dial("decode", identity(hello.name, hello.incarnation))
    for _ in range(STRIKES):
        socket.send(seal(msgspec.msgpack.encode(said)))
    until(lambda: harness.gateway._read() or harness.gateway.ban_list.cut_off == 1, "it is cut off")
    assert not socket.poll(50)


@pytest.mark.parametrize("protocol", [PROTOCOL, "1", 1.5, None])
def test_a_hello_that_makes_no_sense_is_a_strike(harness: GatewayHarness, protocol: Any) -> None:
    """The Hello has our own version number, or none that is valid."""
    hello = hello_of("decode")
    socket = harness.dial("decode", identity(hello.name, hello.incarnation))
    row = ["hello", protocol, *msgspec.structs.astuple(hello)[1:], "more"]
    for _ in range(STRIKES):
        socket.send(seal(msgspec.msgpack.encode(row)))
    until(lambda: harness.gateway._read() or harness.gateway.ban_list.cut_off == 1, "it is cut off")
    assert not list(harness.registry) and not socket.poll(50)


@pytest.mark.parametrize("peer", ["no key", "another cluster", "coordinator"])
def test_strangers_do_not_get_in(harness: GatewayHarness, other: Path, peer: str) -> None:
    harness.expected = False
    hello = hello_of("decode")
    party: Party | None = {"no key": None, "another cluster": "decode", "coordinator": "coordinator"}[peer]  # type: ignore[assignment]
    socket = harness.dial(party, identity(hello.name, hello.incarnation), other if peer == "another cluster" else None)
    send(socket, hello)
    assert harness.answer(socket) is None
    assert not list(harness.registry) and not harness.gateway.bad_messages, "nothing has arrived"


def test_another_key_cannot_speak_in_a_workers_name(harness: GatewayHarness) -> None:
    hello = hello_of("decode")
    name = identity(hello.name, hello.incarnation)
    worker = harness.dial("decode", name)
    send(worker, hello)
    assert isinstance(harness.answer(worker), Welcome)
    thief = harness.dial("prefill", name + b"|hb")
    for _ in range(STRIKES):
        send(thief, Goodbye(hello.incarnation, "stolen"))
    harness.expected = False
    assert harness.answer(worker) is None and harness.gateway.bad_messages == STRIKES
    assert harness.registry.get(hello.incarnation) is not None and not harness.lost_workers, (
        "the thief is cut off, not it"
    )
    assert harness.gateway.ban_list.cut_off == 1


def test_three_bad_messages_cut_a_worker_off(harness: GatewayHarness) -> None:
    hello = hello_of("decode")
    worker = harness.dial("decode", identity(hello.name, hello.incarnation))
    send(worker, hello)
    assert isinstance(harness.answer(worker), Welcome)
    for part in (b"x", b"\xc1", b"\x93"):
        worker.send(seal(part))
    answer = harness.answer(worker)
    assert isinstance(answer, Rejected) and "invalid messages" in answer.reason
    assert not list(harness.registry) and harness.lost_workers == ["decode-0"]
    send(worker, hello)
    until(
        lambda: harness.gateway._read() or harness.gateway.bad_messages == STRIKES + 1,
        "the same incarnation is not heard",
    )
    assert not list(harness.registry)
    again = msgspec.structs.replace(hello, incarnation="a new one")
    socket = harness.dial("decode", identity(again.name, again.incarnation))
    send(socket, again)
    assert isinstance(harness.answer(socket), Welcome), "its next incarnation is"


@pytest.mark.parametrize("keyed", [True, False])
def test_oversized_message_is_strike_and_excuses_other_workers(
    cluster_key: Path, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One turn reads a bounded number of parts however long the message is, and the silence of the others meanwhile
    counts as the coordinator's lag."""
    harness, received = GatewayHarness(cluster_key if keyed else None), counted(monkeypatch)
    gateway = harness.gateway
    try:
        hello = hello_of("decode")
        worker = harness.dial("decode", identity(hello.name, hello.incarnation))
        send(worker, hello)
        assert isinstance(harness.answer(worker), Welcome)
        began = gateway.clock()
        assert gateway.sweep(began)
        bad = harness.dial("prefill", b"bad|1")
        for strike in range(1, STRIKES + 1):
            bad.send_multipart(many(5 * DROPPED_PARTS))
            until(lambda: gateway._read() or gateway._socket.dropping, "it arrives")
            assert gateway.bad_messages == strike
            send(worker, beat(hello.incarnation))
            before, beats, emptied = len(received), harness.beats, gateway.times_emptied
            assert not gateway.sweep(began + 20 * strike - 10), "a silent worker's messages may be unread"
            assert 0 < len(received) - before <= DROPPED_PARTS and gateway.times_emptied == emptied
            while gateway._socket.dropping:
                before = len(received)
                gateway._read()
                assert len(received) - before <= DROPPED_PARTS
            until(lambda beats=beats: gateway._read() or harness.beats > beats, "what came behind it is heard")
            worker_here = harness.registry.get(hello.incarnation)
            assert worker_here is not None and worker_here.beat is not None
            read_at = began + 20 * (strike - 1)  # not after the message in front of it
            harness.registry.beat(worker_here, worker_here.beat, read_at)
            assert gateway.sweep(began + 20 * strike) and not harness.lost_workers
        assert gateway.ban_list.cut_off == 1 and harness.registry.get(hello.incarnation) is not None
    finally:
        harness.close()


def test_strikes_are_counted_per_peer_and_forgotten_in_order() -> None:
    ban_list = PeerBanList()
    assert [ban_list.strike("a") for _ in range(4)] == [False, False, True, False]
    assert ban_list.out("a") and not ban_list.out("b") and ban_list.cut_off == 1
    for peer in range(REMEMBERED):
        ban_list.strike(peer)
    assert not ban_list.out("a") and len(ban_list._counts) == REMEMBERED
