"""Cluster keys: the file, who is let in with which key, and who is cut off."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from common.config.coordinator import CoordinatorConfig
from common.config.worker import WorkerConfig
from common.core.errors import StartError, WireError
from common.core.ids import BlockId, Incarnation, TransferId, WorkerName, new_incarnation, new_request_id, pack_tokens
from common.net import keys
from common.net.keys import PARTIES, Party
from common.net.messages import (
    PROTOCOL,
    Ack,
    Cancel,
    Commit,
    Drain,
    Goodbye,
    Grant,
    Heard,
    NameTaken,
    Open,
    Peer,
    Rejoin,
    ToPrefill,
    ToWorker,
    Turned,
    Welcome,
)
from common.net.peer_ban_list import REMEMBERED, STRIKES, Strikes
from common.net.socket_monitor import Handshakes
from common.net.sockets import DROPPED_PARTS, Channels, Heart, identity, receive, send
from common.net.wire import seal
from common.worker.membership import Membership
from coordinator.cluster.gateway import MOST_ASKED, Gateway
from coordinator.cluster.registry import Registry
from deploy.cli import main as cli
from deploy.launcher import process
from kvtransfer.frames import FrameHeader, Rectangle, checksum_of, fold
from kvtransfer.peer_proof import proof, proven, proves
from kvtransfer.receiver import Failed, Receiver
from kvtransfer.sender import Lost, Sender
from tests.fakes.oracle import OracleEngine
from tests.fakes.worker import FakeWorker
from tests.leaked_keys import keygen
from tests.pace import scaled
from tests.unit.coordinator.cluster.test_registry import beat
from tests.unit.parts import counted, many

WAIT_S = 10.0
QUIET_S = 0.3
"""Long enough for a handshake on this machine: who has not come in by then was turned away."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keygen(tmp_path_factory.mktemp("keys") / "cluster.key")


def until(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + scaled(WAIT_S)
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.005)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_keygen_writes_a_file_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = tmp_path / "cluster.key", tmp_path / "decode.key"
    assert cli.main(["keygen", "--out", str(whole)]) == 0
    assert cli.main(["keygen", "--role", "decode", "--cluster-key-file", str(whole), "--out", str(part)]) == 0
    assert whole.stat().st_mode & 0o777 == part.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["cluster.key", "decode.key"], "no temporary file is left"
    secrets = json.loads(whole.read_text())["secret"]
    assert set(secrets) == set(PARTIES)
    text = part.read_text()
    assert secrets["decode"] in text and not any(secrets[each] in text for each in PARTIES if each != "decode")
    assert all(secret not in capsys.readouterr().out for secret in secrets.values())
    assert keys.load(part, "decode") == keys.load(whole, "decode")
    with pytest.raises(StartError, match="cannot be used by a prefill process"):
        keys.load(part, "prefill")


def test_keygen_overwrites_nothing_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.key"
    assert cli.main(["keygen", "--out", str(path)]) == 0
    before = path.read_text()
    assert cli.main(["keygen", "--out", str(path)]) == 1
    assert path.read_text() == before and "--overwrite" in capsys.readouterr().err
    assert cli.main(["keygen", "--out", str(path), "--overwrite"]) == 0
    assert path.read_text() != before
    assert cli.main(["keygen", "--out", str(tmp_path / "no" / "such" / "place")]) == 1
    assert cli.main(["keygen", "--role", "decode"]) == 1, "one role's keys must come from somewhere"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_open_is_refused(cluster: Path, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open.key"
    path.write_bytes(cluster.read_bytes())
    path.chmod(mode)
    with pytest.raises(StartError, match="other users") as caught:
        keys.load(path, "decode")
    assert "chmod 600" in caught.value.todo


def _swapped(content: Any) -> None:
    content["secret"]["decode"], content["secret"]["prefill"] = (
        content["secret"]["prefill"],
        content["secret"]["decode"],
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.clear(),
        lambda content: content["public"].pop("decode"),
        lambda content: content["public"].update(decode=content["public"]["prefill"]),
        lambda content: content["secret"].update(decode="too short"),
        lambda content: content["secret"].update(decode=" " * 40),
        lambda content: content["secret"].update(decode=7),
        lambda content: content.update(secret=[]),
        lambda content: content.update(tandem_cluster_keys=2),
        _swapped,
    ],
)
def test_a_spoilt_file_is_refused_in_words(cluster: Path, tmp_path: Path, spoil: Callable[[Any], None]) -> None:
    content = json.loads(cluster.read_text())
    spoil(content)
    path = tmp_path / "spoilt.key"
    path.write_text(json.dumps(content))
    path.chmod(0o600)
    with pytest.raises(StartError, match="no file of cluster keys"):
        keys.load(path, "decode")
    path.write_bytes(b"\xff\x00")
    with pytest.raises(StartError, match="no JSON"):
        keys.load(path, "decode")
    with pytest.raises(StartError, match="cannot read"):
        keys.load(tmp_path / "nowhere", "decode")


@pytest.mark.parametrize("member", ["public", "secret"])
def test_a_key_in_place_of_a_role_is_not_shown(cluster: Path, tmp_path: Path, member: str) -> None:
    content = json.loads(cluster.read_text())
    key = content["secret"]["decode"]
    content[member] = {key: "decode", **content[member]}
    path = tmp_path / "swapped.key"
    path.touch(0o600)
    path.write_text(json.dumps(content))
    with pytest.raises(StartError, match="a key is of no role") as refused:
        keys.load(path, "decode")
    assert key not in "".join(traceback.format_exception(refused.value))


def test_keys_open_other_addresses_than_loopback(cluster: Path) -> None:
    CoordinatorConfig(model="m", control_host="10.0.0.1", cluster_key_file=str(cluster)).check_binds()
    WorkerConfig(role="decode", model="m", host="10.0.0.1", cluster_key_file=str(cluster)).check_binds()
    with pytest.raises(StartError) as caught:
        WorkerConfig(role="decode", model="m", host="10.0.0.1").check_binds()
    assert "--cluster-key-file" in caught.value.todo and "tandem keygen" in caught.value.todo
    with pytest.raises(StartError, match="needs keys"):
        WorkerConfig(role="decode", model="m", kv_encryption="curve").check_binds()
    nixl = WorkerConfig(role="decode", model="m", kv_transport="nixl", cluster_key_file=str(cluster))
    for host in ("127.0.0.1", "10.0.0.1"):
        for accepted in (False,) if host == "127.0.0.1" else (False, True):
            with pytest.raises(StartError, match="cannot encrypt"):
                dataclasses.replace(nixl, host=host, insecure_cluster=accepted).check_binds()
    dataclasses.replace(nixl, kv_encryption="none").check_binds()
    dataclasses.replace(nixl, insecure_cluster=True).check_binds()


def test_minted_keys_reach_a_child_and_no_text() -> None:
    minted = keys.mint()
    assert {party: each.party for party, each in minted.items()} == {party: party for party in PARTIES}
    for each in minted.values():
        assert zmq.curve_public(each.secret) == each.public[each.party]
    launch = process.Launch("worker", {}, keys=minted["decode"])
    assert msgspec.json.decode(msgspec.json.encode(launch), type=process.Launch) == launch
    assert minted["decode"].secret.decode() not in repr(launch)
    sent = {party for party, each in minted.items() if base64.b64encode(each.secret) in msgspec.json.encode(launch)}
    assert sent == {"decode"}


# -- who is let in ----------------------------------------------------------------------------------------------------


class Door:
    """The coordinator's gateway, turned by hand, and dealers with keys of their own."""

    def __init__(self, cluster: Path | None, port: int = 0) -> None:
        self.cluster = cluster
        self.registry = Registry(None)
        channels = Channels(cluster and keys.load(cluster, "coordinator"))
        self.gateway = Gateway(self.registry, "127.0.0.1", port, channels=channels)
        self.gateway._events = self  # type: ignore[assignment]
        self.lost_workers: list[str] = []
        self.channels: list[Channels] = []
        self.sockets: list[zmq.Socket[Any]] = []

    @property
    def port(self) -> int:
        return int(self.gateway.address.rpartition(":")[2])

    def joined(self, worker: Any) -> None:
        self.joins += 1

    def beat(self, worker: Any) -> None:
        self.beats += 1

    def lost(self, worker: Any, how: Any) -> None:
        self.lost_workers.append(worker.hello.name)

    def died(self, worker: Incarnation) -> None: ...

    def returned(self, worker: Incarnation) -> None: ...

    def dial(self, party: Party | None, name: bytes, cluster: Path | None = None) -> zmq.Socket[Any]:
        path = cluster or self.cluster
        self.channels.append(Channels(party and path and keys.load(path, party)))
        self.sockets.append(self.channels[-1].dealer(self.gateway.address, name))
        return self.sockets[-1]

    def answer(self, socket: zmq.Socket[Any]) -> Any:
        """The next message to ``socket``, or None after QUIET_S without one."""
        give_up = time.monotonic() + (WAIT_S if self.expected else QUIET_S)
        while time.monotonic() < give_up:
            self.gateway._read()
            if socket.poll(5):
                return receive(socket, ToWorker)
        return None

    expected = True
    beats = joins = 0

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)
        for channels in self.channels:
            channels.close()
        self.gateway.close()


@pytest.fixture
def door(cluster: Path) -> Iterator[Door]:
    door = Door(cluster)
    yield door
    door.close()


def hello_of(role: Party) -> Any:
    fake = FakeWorker(role, "tcp://127.0.0.1:1", "f", name=f"{role}-0")  # type: ignore[arg-type]
    return fake.hello


@pytest.mark.parametrize("key", ["prefill", "decode", "colocated"])
@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_a_worker_joins_only_in_the_role_of_its_key(door: Door, key: Party, role: Party) -> None:
    hello = hello_of(role)
    socket = door.dial(key, identity(hello.name, hello.incarnation))
    send(socket, hello)
    answer = door.answer(socket)
    if key == role:
        assert isinstance(answer, Welcome)
    else:
        assert isinstance(answer, Turned) and f"key is that of {key}" in answer.reason
        assert not list(door.registry) and door.gateway.bad_messages == 1


def test_the_name_of_a_live_worker_cannot_be_taken_with_a_valid_key(door: Door) -> None:
    """Neither by another process of that name, nor under the identity of its sockets as far as others know it."""
    hello = hello_of("decode")
    worker = door.dial("decode", identity(hello.name, hello.incarnation, "its own"))
    send(worker, hello)
    assert isinstance(door.answer(worker), Welcome)
    (here,) = door.registry
    other = msgspec.structs.replace(hello, incarnation="another")
    newcomer = door.dial("decode", identity(other.name, other.incarnation))
    for _ in range(STRIKES + 1):  # it may try again and again
        send(newcomer, other)
        answer = door.answer(newcomer)
        assert isinstance(answer, NameTaken) and f"process {hello.pid} of {hello.host}" in answer.reason
    thief = door.dial("decode", identity(hello.name, hello.incarnation))
    for said in (hello, beat(hello.incarnation, draining=True), Goodbye(hello.incarnation, "stolen")):
        send(thief, said)
    until(lambda: door.gateway._read() or door.gateway.bad_messages == 3, "all three are dropped")
    assert list(door.registry) == [here] and here.ready and not door.lost_workers
    assert not thief.poll(0) or isinstance(receive(thief, ToWorker), NameTaken)
    door.gateway.send(here, Drain(1))
    until(lambda: door.gateway._read() or worker.poll(5), "it is still reached")
    worker.close(0)

    def follows() -> bool:
        send(newcomer, other)
        return isinstance(door.answer(newcomer), Welcome)

    until(follows, "a process that has died is followed at once, whatever the monitor has said so far")
    assert [each.id for each in door.registry] == [other.incarnation]


def test_who_was_away_for_a_moment_keeps_its_name_and_its_identity(door: Door) -> None:
    """Its connection breaks, and its heart is heard before it can say Hello."""
    hello = hello_of("decode")
    name = identity(hello.name, hello.incarnation, "its own")
    worker, heart = door.dial("decode", name), door.dial("decode", name + b"|hb")
    send(worker, hello)
    assert isinstance(door.answer(worker), Welcome)
    (here,) = door.registry
    door.gateway._remove(here)
    door.gateway._miss(here)
    thief = door.dial("decode", identity(hello.name, hello.incarnation))
    for said in (hello, Goodbye(hello.incarnation, "stolen")):
        send(thief, said)
    until(lambda: door.gateway._read() or door.gateway.bad_messages == 1, "its Hello is not believed")
    door.gateway._look_for_missing()
    send(heart, beat(hello.incarnation))
    assert isinstance(door.answer(worker), Rejoin)
    other = msgspec.structs.replace(hello, incarnation="another")
    newcomer = door.dial("decode", identity(other.name, other.incarnation))
    send(newcomer, other)
    assert isinstance(door.answer(newcomer), NameTaken)
    send(worker, hello)
    assert isinstance(door.answer(worker), Welcome)


@pytest.mark.parametrize("keyed", [True, False])
def test_why_a_worker_is_refused_is_told_to_those_with_a_key_alone_and_logged_in_few_lines(
    cluster: Path, keyed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(cluster if keyed else None)
    try:
        door.registry.fingerprint = "served"
        hello = msgspec.structs.replace(hello_of("decode"), fingerprint="mine\n2026 forged line")
        socket = door.dial("decode", identity(hello.name, hello.incarnation, "secret"))
        for _ in range(50):
            send(socket, hello)
            answer = door.answer(socket)
            assert isinstance(answer, Turned)
            assert ("fingerprint" in answer.reason) is keyed and ("served" in answer.reason) is keyed
        door.gateway._complain(1e9)
        told = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
        assert len(told) == 2 and "fingerprint" in told[0] and told[1].endswith(" (49 times)")
        assert "secret" not in caplog.text and not any("\n" in line for line in told)
    finally:
        door.close()


VERSIONS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "newer": lambda row: row,
    "newer, with more fields": lambda row: [*row, "more", {"of": [b"other", 1.5, None]}],
    "newer, with other fields": lambda row: [*row[:2], *reversed(row[2:])],
    "older, with fewer fields": lambda row: [row[0], 1, *row[2:5]],
    "with nothing but its number": lambda row: row[:2],
}
"""What another version's Hello may look like: a tag and a number, and whatever it has."""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_worker_of_another_version_is_told_so_whatever_its_hello_looks_like(door: Door, version: str) -> None:
    hello = hello_of("decode")
    socket = door.dial("decode", identity(hello.name, hello.incarnation))
    row = VERSIONS[version](["hello", PROTOCOL + 1, *msgspec.structs.astuple(hello)[1:]])
    for _ in range(STRIKES + 1):  # it may try again and again
        socket.send(seal(msgspec.msgpack.encode(row)))
        answer = door.answer(socket)
        words = f"protocol {row[1]}, but this coordinator speaks {PROTOCOL}: run the same version of Tandem"
        assert isinstance(answer, Turned) and answer.reason == words
    assert not list(door.registry) and not door.gateway.bad_messages


def test_the_heart_of_a_stranger_in_a_long_step_tells_that_it_does_not_hang(door: Door) -> None:
    hello, clock = hello_of("decode"), door.gateway.clock
    name = identity(hello.name, hello.incarnation)
    control, heart = door.dial("decode", name), door.dial("decode", name + b"|hb")
    door.registry.awaits(hello.name, hello.host, hello.pid, clock() - 7)

    def answered() -> (
        bool
    ):  # the first beat may be read before the other connection is there, over which it is answered
        send(heart, beat(hello.incarnation, turn_ms=60_000, expected_ms=20_000))
        door.gateway._read()
        return bool(control.poll(20))

    until(answered, "the stranger is asked for its Hello")
    assert isinstance(receive(control, ToWorker), Rejoin)
    assert not door.registry.hung.overdue(clock() + 2)
    assert [hang.pid for hang in door.registry.hung.overdue(clock() + 10)] == [hello.pid]


def test_a_worker_of_another_version_that_had_joined_a_coordinator_of_its_own_is_told_so(door: Door) -> None:
    """What it goes on saying means nothing here; it is asked for its Hello, as any stranger is."""
    hello = hello_of("decode")
    name = identity(hello.name, hello.incarnation)
    control, heart = door.dial("decode", name), door.dial("decode", name + b"|hb")
    said = [["news"], ["heartbeat"], ["heartbeat", hello.incarnation, {"of": [b"other", 1.5, None]}], ["tokens", 1]]
    for row in said * STRIKES:
        socket = heart if row[0] == "heartbeat" else control
        socket.send(seal(msgspec.msgpack.encode(row)))
        assert isinstance(door.answer(control), Rejoin)
    control.send(seal(msgspec.msgpack.encode(["hello", PROTOCOL - 1, *msgspec.structs.astuple(hello)[1:-1]])))
    answer = door.answer(control)
    assert isinstance(answer, Turned) and answer.reason.startswith(f"protocol {PROTOCOL - 1}, but this coordinator")
    assert door.gateway.bad_messages == len(said) * STRIKES and not door.gateway.strikes.cut_off


def test_a_stranger_that_never_says_hello_is_cut_off_at_last(door: Door) -> None:
    hello = hello_of("decode")
    socket = door.dial("decode", identity(hello.name, hello.incarnation))
    for _ in range(MOST_ASKED + STRIKES):
        socket.send(seal(msgspec.msgpack.encode(["news"])))
    until(lambda: door.gateway._read() or door.gateway.strikes.cut_off == 1, "it is cut off")
    assert door.gateway.bad_messages == MOST_ASKED + STRIKES


@pytest.mark.parametrize("said", [[], [1, "heartbeat"], "heartbeat", {"kind": "heartbeat"}, ["x" * 129]])
def test_a_stranger_that_says_no_message_of_any_version_is_cut_off(door: Door, said: Any) -> None:
    hello = hello_of("decode")
    socket = door.dial("decode", identity(hello.name, hello.incarnation))
    for _ in range(STRIKES):
        socket.send(seal(msgspec.msgpack.encode(said)))
    until(lambda: door.gateway._read() or door.gateway.strikes.cut_off == 1, "it is cut off")
    assert not socket.poll(50)


@pytest.mark.parametrize("protocol", [PROTOCOL, "1", 1.5, None])
def test_a_hello_that_makes_no_sense_is_a_strike(door: Door, protocol: Any) -> None:
    """One of our own version, or of none."""
    hello = hello_of("decode")
    socket = door.dial("decode", identity(hello.name, hello.incarnation))
    row = ["hello", protocol, *msgspec.structs.astuple(hello)[1:], "more"]
    for _ in range(STRIKES):
        socket.send(seal(msgspec.msgpack.encode(row)))
    until(lambda: door.gateway._read() or door.gateway.strikes.cut_off == 1, "it is cut off")
    assert not list(door.registry) and not socket.poll(50)


@pytest.mark.parametrize("who", ["no key", "another cluster", "coordinator"])
def test_strangers_do_not_get_in(door: Door, other: Path, who: str) -> None:
    door.expected = False
    hello = hello_of("decode")
    party: Party | None = {"no key": None, "another cluster": "decode", "coordinator": "coordinator"}[who]  # type: ignore[assignment]
    socket = door.dial(party, identity(hello.name, hello.incarnation), other if who == "another cluster" else None)
    send(socket, hello)
    assert door.answer(socket) is None
    assert not list(door.registry) and not door.gateway.bad_messages, "nothing has arrived"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The keys of another cluster."""
    return keygen(tmp_path / "other.key")


class Member:
    """A worker's membership, turned by hand beside the doors that it knocks at."""

    def __init__(self, cluster: Path | None, door: Door, party: Party = "decode") -> None:
        self.channels = Channels(cluster and keys.load(cluster, party))
        self.membership = Membership(self.channels, door.gateway.address, hello_of("decode"))
        self.welcomes = 0

    def turn(self, door: Door) -> None:
        door.gateway._read()
        self.membership.knock()
        self.welcomes += sum(isinstance(message, Welcome) for message in self.membership.receive())
        self.channels.poll(0.005)

    def until_refused(self, door: Door, words: str) -> None:
        until(lambda: self.turn(door) or words in self.membership.refusal, f"not refused with {words!r}")

    def until_welcome(self, door: Door) -> None:
        before = self.welcomes
        until(lambda: self.turn(door) or self.welcomes > before, "no Welcome")
        assert not self.membership.refusal

    def close(self) -> None:
        self.membership.close()
        self.channels.close()


@pytest.mark.parametrize(
    ("mine", "theirs", "party", "words"),
    [
        ("", "cluster", "decode", "it asks for a key: give this worker the cluster's --cluster-key-file"),
        ("cluster", "", "decode", "it has no keys"),
        ("other", "cluster", "decode", "those of another keygen"),
        ("cluster", "cluster", "coordinator", "does not admit this worker's key"),
    ],
)
def test_a_worker_that_is_turned_away_knows_why(
    cluster: Path, other: Path, mine: str, theirs: str, party: Party, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"": None, "cluster": cluster, "other": other}
    door = Door(files[theirs])
    member = Member(files[mine], door, party)
    try:
        member.until_refused(door, words)
        assert not member.membership.joined

        def told() -> bool:
            member.turn(door)
            door.gateway._watch()
            door.gateway._complain(1e9)
            return "handshakes that failed" in caplog.text

        until(told, "the coordinator's log says nothing of it")
    finally:
        member.close()
        door.close()


@pytest.mark.parametrize("mine", ["cluster", "another role's"])
def test_a_refusal_is_heard_however_soon_it_comes(cluster: Path, mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq's thread may have been turned away for good before the one that dials runs on."""
    connect = zmq.Socket.connect

    def connect_and_be_away(socket: zmq.Socket[Any], address: str) -> None:
        connect(socket, address)
        if address.startswith("tcp:"):
            time.sleep(QUIET_S)

    door = Door(None if mine == "cluster" else cluster)
    monkeypatch.setattr(zmq.Socket, "connect", connect_and_be_away)
    member = Member(cluster, door, "decode" if mine == "cluster" else "coordinator")
    try:
        member.until_refused(door, "key")
    finally:
        member.close()
        door.close()


def test_a_worker_whose_name_is_taken_joins_when_it_is_free(
    cluster: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.membership.RETRY_S", 0.1)
    first = Member(cluster, door)
    first.until_welcome(door)
    second = Member(cluster, door)
    try:
        second.until_refused(door, "give every worker a name of its own")
        assert not second.membership.joined
        first.close()
        second.until_welcome(door)
    finally:
        second.close()


@pytest.mark.parametrize("wrong", ["none", "other"])
def test_a_worker_joins_when_its_coordinator_has_been_corrected(
    cluster: Path, other: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that had joined before: its coordinator comes back with a wrong file, and then with the right one."""
    monkeypatch.setattr("common.worker.membership.KNOCK_S", 0.1)
    door = Door(cluster)
    port = door.port
    member = Member(cluster, door)
    try:
        member.until_welcome(door)
        door.close()
        door = Door(other if wrong == "other" else None, port)
        member.until_refused(door, "keys")
        door.close()
        door = Door(cluster, port)
        member.until_welcome(door)
        until(lambda: member.turn(door) or door.beats >= 2, "its heart beats here")
    finally:
        member.close()
        door.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_worker_that_knocked_long_before_its_coordinator_came_joins_once(
    cluster: Path, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.membership.KNOCK_S", 0.1)
    key = cluster if encrypted else None
    door = Door(key)
    port = door.port
    door.close()
    member = Member(key, door)
    try:
        alone_until = time.monotonic() + 1.0
        while time.monotonic() < alone_until:
            member.membership.knock()
            member.channels.poll(0.005)
        monkeypatch.setattr(
            "common.worker.membership.KNOCK_S", 60.0
        )  # a slow Welcome is no reason for one more Hello here
        door = Door(key, port)
        member.until_welcome(door)
        until(lambda: member.turn(door) or door.beats >= 3, "its heart beats")
        assert (door.joins, member.welcomes) == (1, 1)
    finally:
        member.close()
        door.close()


def test_a_hello_that_was_lost_with_its_connection_is_said_again_over_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.worker.membership.KNOCK_S", 0.1)
    deaf = Channels()
    router, address = deaf.router("tcp://127.0.0.1:*")
    door = Door(None)
    monkeypatch.setattr(door.gateway, "address", address)
    member = Member(None, door)
    door.close()
    try:
        assert router.poll(int(WAIT_S * 1000))
        router.close(0)  # with the Hello unread
        deaf.close()  # waits until the address is free
        door = Door(None, int(address.rpartition(":")[2]))
        member.until_welcome(door)
    finally:
        member.close()
        door.close()


def test_a_heart_that_was_turned_away_beats_at_the_corrected_door(cluster: Path) -> None:
    """Of a worker's two connections only that of the heart has met the wrong coordinator."""
    door = Door(None)
    channels, hello, dials = Channels(keys.load(cluster, "decode")), hello_of("decode"), []

    def dial() -> tuple[zmq.Socket[Any], Handshakes]:
        dials.append(1)
        name = identity(hello.name, hello.incarnation, beats=True)
        return channels.watched_dealer(f"tcp://127.0.0.1:{door.port}", name)

    heart = Heart(dial, 0.02, lambda _: Goodbye(hello.incarnation, "a beat"))
    try:
        until(lambda: len(dials) > 2, "it is turned away, and dials again")
        port = door.port
        door.close()
        heard: list[Any] = []
        door = Door(cluster, port)
        door.gateway._stranger = lambda *said: heard.append(said)  # type: ignore[method-assign]
        until(lambda: door.gateway._read() or heard, "its beat arrives")
    finally:
        heart.stop()
        channels.close()
        door.close()


def test_another_key_cannot_speak_in_a_workers_name(door: Door) -> None:
    hello = hello_of("decode")
    name = identity(hello.name, hello.incarnation)
    worker = door.dial("decode", name)
    send(worker, hello)
    assert isinstance(door.answer(worker), Welcome)
    thief = door.dial("prefill", name + b"|hb")
    for _ in range(STRIKES):
        send(thief, Goodbye(hello.incarnation, "stolen"))
    door.expected = False
    assert door.answer(worker) is None and door.gateway.bad_messages == STRIKES
    assert door.registry.get(hello.incarnation) is not None and not door.lost_workers, "the thief is cut off, not it"
    assert door.gateway.strikes.cut_off == 1


def test_three_bad_messages_cut_a_worker_off(door: Door) -> None:
    hello = hello_of("decode")
    worker = door.dial("decode", identity(hello.name, hello.incarnation))
    send(worker, hello)
    assert isinstance(door.answer(worker), Welcome)
    for part in (b"x", b"\xc1", b"\x93"):
        worker.send(seal(part))
    answer = door.answer(worker)
    assert isinstance(answer, Turned) and "made no sense" in answer.reason
    assert not list(door.registry) and door.lost_workers == ["decode-0"]
    send(worker, hello)
    until(lambda: door.gateway._read() or door.gateway.bad_messages == STRIKES + 1, "the same incarnation is not heard")
    assert not list(door.registry)
    again = msgspec.structs.replace(hello, incarnation="a new one")
    socket = door.dial("decode", identity(again.name, again.incarnation))
    send(socket, again)
    assert isinstance(door.answer(socket), Welcome), "its next incarnation is"


@pytest.mark.parametrize("keyed", [True, False])
def test_a_message_of_too_many_parts_is_a_strike_and_silences_nobody(
    cluster: Path, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is, a turn reads a bounded number of parts, and the others' silence meanwhile is our lag."""
    door, received = Door(cluster if keyed else None), counted(monkeypatch)
    gateway = door.gateway
    try:
        hello = hello_of("decode")
        worker = door.dial("decode", identity(hello.name, hello.incarnation))
        send(worker, hello)
        assert isinstance(door.answer(worker), Welcome)
        began = gateway.clock()
        assert gateway.sweep(began)
        bad = door.dial("prefill", b"bad|1")
        for strike in range(1, STRIKES + 1):
            bad.send_multipart(many(5 * DROPPED_PARTS))
            until(lambda: gateway._read() or gateway._socket.dropping, "it arrives")
            assert gateway.bad_messages == strike
            send(worker, beat(hello.incarnation))
            before, beats, emptied = len(received), door.beats, gateway.times_emptied
            assert not gateway.sweep(began + 20 * strike - 10), "whoever is silent now may have spoken"
            assert 0 < len(received) - before <= DROPPED_PARTS and gateway.times_emptied == emptied
            while gateway._socket.dropping:
                before = len(received)
                gateway._read()
                assert len(received) - before <= DROPPED_PARTS
            until(lambda beats=beats: gateway._read() or door.beats > beats, "what came behind it is heard")
            worker_here = door.registry.get(hello.incarnation)
            assert worker_here is not None and worker_here.beat is not None
            read_at = began + 20 * (strike - 1)  # not later than what came before it
            door.registry.beat(worker_here, worker_here.beat, read_at)
            assert gateway.sweep(began + 20 * strike) and not door.lost_workers
        assert gateway.strikes.cut_off == 1 and door.registry.get(hello.incarnation) is not None
    finally:
        door.close()


def test_strikes_are_counted_per_peer_and_forgotten_in_order() -> None:
    strikes = Strikes()
    assert [strikes.strike("a") for _ in range(4)] == [False, False, True, False]
    assert strikes.out("a") and not strikes.out("b") and strikes.cut_off == 1
    for peer in range(REMEMBERED):
        strikes.strike(peer)
    assert not strikes.out("a") and len(strikes._counts) == REMEMBERED


# -- hand-offs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("key", ["prefill", "decode", None])
def test_only_the_chosen_prefill_is_granted_a_hand_off(cluster: Path, key: Party | None, encrypt: bool) -> None:
    """With CURVE a wrong key gets no connection; without, everybody does, and the token decides."""
    engine = OracleEngine(blocks=8)
    inside, outside = (
        Channels(keys.load(cluster, "decode"), encrypt_kv=encrypt),
        Channels(key and keys.load(cluster, key), encrypt_kv=encrypt),
    )
    receiver = Receiver(inside, engine.memory, "here", "tcp://127.0.0.1:*", transport="zmq")
    transfer, token, layout = TransferId(new_request_id(), 1), b"t" * 16, engine.layout
    peer = Peer(WorkerName("prefill-0"), Incarnation("sender"), "", "there", layout.dtype, token)
    receiver.expect(transfer, 16, 0, [0], peer, time.monotonic())
    socket = outside.dealer(receiver.address, b"peer", to="decode")
    words = transfer.request, transfer.attempt, "sender", 16, layout.fingerprint, layout.dtype, "there", "", 8, 16, 1

    def say(shown: bytes) -> Any:
        send(socket, Open(*words, shown))  # type: ignore[arg-type]
        give_up = time.monotonic() + QUIET_S
        while time.monotonic() < give_up:
            receiver.pump(time.monotonic, 0.01)
            if socket.poll(5):
                return receive(socket, ToPrefill)
        return None

    try:
        assert say(proof(b"wrong", transfer, "open")) is None
        may_connect = key == "prefill" or not encrypt
        assert receiver.bad_messages == (1 if may_connect else 0)
        grant = say(proof(token, transfer, "open"))
        assert (grant is not None) == may_connect
        if grant is not None:
            assert proves(grant.proof, token, transfer, "grant") and not proves(grant.proof, b"", transfer, "grant")
            for _ in range(2 * STRIKES):  # what a bad line makes of a header is nobody's fault
                socket.send_multipart([b"x", b"y"])
            until(
                lambda: receiver.pump(time.monotonic, 0.01) or receiver.bad_messages == 1 + 2 * STRIKES, "all counted"
            )
            assert not receiver.strikes.cut_off and say(proof(token, transfer, "open")) is not None
            outside_of_it = FrameHeader(transfer, 0, Rectangle(0, 99, 0, 16), 64, 0).pack()
            for _ in range(STRIKES):
                socket.send_multipart([outside_of_it, b"y"])
            until(lambda: receiver.pump(time.monotonic, 0.01), "what it was sending has failed")
            assert socket.poll(int(WAIT_S * 1000)) and isinstance(receive(socket, ToPrefill), Cancel), "and it is told"
            assert receiver.strikes.cut_off == 1 and say(proof(token, transfer, "open")) is None
    finally:
        socket.close(0)
        receiver.close()
        outside.close()
        inside.close()
        engine.memory.close()


@pytest.mark.parametrize("first", [True, False])
def test_who_has_read_an_announcement_and_repeats_it_cannot_ship(first: bool) -> None:
    """Without CURVE, over a connection of its own, before the blocks are reserved. If it is later than the sender it is
    not heard, and if it is ``first`` it is granted, and its Commit is not believed."""
    engine, here, there = OracleEngine(blocks=8), Channels(), Channels()
    receiver = Receiver(here, engine.memory, "here", "tcp://127.0.0.1:*", transport="zmq")
    transfer, token, layout = TransferId(new_request_id(), 1), b"t" * 16, engine.layout
    words = transfer.request, transfer.attempt, "sender", 16, layout.fingerprint, layout.dtype, "there", "", 8, 16, 1
    announced = Open(*words, proof(token, transfer, "open"))  # type: ignore[arg-type]
    thief, sender = (there.dealer(receiver.address, name, to="decode") for name in (b"thief", b"sender"))

    def hear(socket: zmq.Socket[Any]) -> Any:
        until(lambda: receiver.pump(time.monotonic, 0.01) or socket.poll(0), "there is an answer")
        return receive(socket, ToPrefill)

    try:
        for socket in (thief, sender) if first else (sender, thief):
            send(socket, announced)
            assert isinstance(hear(socket), Heard)
        send(thief, Cancel(*transfer, "not its own"))
        peer = Peer(WorkerName("prefill-0"), Incarnation("sender"), "", "there", layout.dtype, token)
        if not first:
            send(thief, announced)  # after its Cancel, which took nothing away
            assert isinstance(hear(thief), Heard)
            receiver.expect(transfer, 16, 0, [BlockId(0)], peer, time.monotonic())
            assert isinstance(hear(sender), Grant) and not thief.poll(0)
            return
        send(thief, announced)
        assert isinstance(hear(thief), Heard)
        receiver.expect(transfer, 16, 0, [BlockId(0)], peer, time.monotonic())
        assert isinstance(hear(thief), Grant)
        size = layout.range_bytes(0, len(layout.layers), 16)
        header = FrameHeader(
            transfer, 0, Rectangle(0, len(layout.layers), 0, 16), size, checksum_of(np.zeros(size, "u1"))
        )
        thief.send_multipart([header.pack(), bytes(size)])
        assert isinstance(hear(thief), Ack)
        counts = (16, 0, 1, size, fold(0, header.checksum), layout.fingerprint)
        commit = Commit(*transfer, *counts, pack_tokens([666]), (0,), (-1,))
        own = proven(commit, token)
        for forged in (commit, proven(commit, b"guessed"), msgspec.structs.replace(own, first=pack_tokens([667]))):
            send(thief, forged)
        ended: list[Any] = []
        until(lambda: ended.extend(receiver.pump(time.monotonic, 0.01)) or ended, "it is cut off")
        assert isinstance(ended[0], Failed) and receiver.strikes.cut_off == 1
    finally:
        for socket in (thief, sender):
            socket.close(0)
        receiver.close()
        here.close()
        there.close()
        engine.memory.close()


def test_a_message_of_too_many_parts_does_not_hold_a_receiver_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, a look reads as much as its budget lets it; what others say is heard behind it."""
    engine, here, there, received = OracleEngine(blocks=8), Channels(), Channels(), counted(monkeypatch)
    receiver = Receiver(here, engine.memory, "here", "tcp://127.0.0.1:*", transport="zmq")
    layout, ticks = engine.layout, itertools.count()
    words = "sender", 16, layout.fingerprint, layout.dtype, "there", "", 8, 16, 1
    bad, good = (there.dealer(receiver.address, name, to="decode") for name in (b"bad", b"good"))

    def pump() -> None:
        before = len(received)
        receiver.pump(lambda: 0.001 * next(ticks), 0.0015)  # time for two messages, or two pieces of one
        assert len(received) - before <= 2 * DROPPED_PARTS

    try:
        for strike in range(1, STRIKES + 1):
            bad.send_multipart(many(8 * DROPPED_PARTS))
            until(lambda strike=strike: pump() or receiver.bad_messages == strike, "it is counted")
            assert receiver._socket.dropping
            send(good, Open(new_request_id(), 1, *words))  # type: ignore[arg-type]
            until(lambda: pump() or good.poll(0), "what others say is heard")
            assert isinstance(receive(good, ToPrefill), Heard) and not receiver._socket.dropping
        assert receiver.strikes.cut_off == 1 and receiver.bad_messages == STRIKES
    finally:
        for socket in (bad, good):
            socket.close(0)
        receiver.close()
        here.close()
        there.close()
        engine.memory.close()


def test_an_answer_of_too_many_parts_does_not_hold_a_sender_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, channels, received = OracleEngine(blocks=8), Channels(), counted(monkeypatch)
    router, address = channels.router("tcp://127.0.0.1:*")
    sender = Sender(channels, engine.memory, new_incarnation(), "here", transport="zmq")
    peer = Peer(WorkerName("d"), Incarnation("d"), address, "", engine.layout.dtype)
    transfer = TransferId(new_request_id(), 1)
    ended: list[Any] = []

    def pump() -> list[Any]:
        before = len(received)
        ended.extend(sender.pump(0.0))
        assert len(received) - before <= DROPPED_PARTS + 2, "its first two, and a piece of the rest"
        return ended

    try:
        sender.open(transfer, peer, 16, [BlockId(0)], 0.0)
        assert router.poll(int(WAIT_S * 1000))
        who = router.recv_multipart()[0]
        router.send_multipart([who, *many(8 * DROPPED_PARTS)])
        send(router, Cancel(*transfer, "said behind it"), who)
        until(pump, "what comes behind it is heard")
        (lost,) = ended
        assert isinstance(lost, Lost) and lost.told and lost.reason == "said behind it"
        assert sender.bad_messages == 1 and not sender.strikes.cut_off
    finally:
        sender.close()
        router.close(0)
        channels.close()
        engine.memory.close()


def test_a_decode_worker_that_talks_nonsense_is_cut_off_by_the_sender() -> None:
    """At its third message; another decode worker's hand-off goes on."""
    engine, channels = OracleEngine(blocks=8), Channels()
    routers = {name: channels.router("tcp://127.0.0.1:*") for name in ("bad", "good")}
    sender = Sender(channels, engine.memory, new_incarnation(), "here", transport="zmq")
    peers = {
        name: Peer(WorkerName(name), Incarnation(name), address, "", engine.layout.dtype)
        for name, (_, address) in routers.items()
    }
    transfers = {name: TransferId(new_request_id(), 1) for name in ("bad", "good")}
    ended: list[Any] = []

    def pump() -> list[Any]:
        ended.extend(sender.pump(time.monotonic()))
        return ended

    try:
        for name, transfer in transfers.items():
            sender.open(transfer, peers[name], 16, [0], time.monotonic())
        for name, (router, _) in routers.items():
            assert router.poll(int(WAIT_S * 1000))
            who = router.recv_multipart()[0]
            if name == "bad":
                for part in (b"x", b"\xc1"):
                    router.send_multipart([who, seal(part)])
                until(lambda: pump() or sender.bad_messages == 2, "two are counted")
                assert not ended and not sender.strikes.cut_off
                router.send_multipart([who, seal(b"\x93")])
        until(pump, "the third is one too many")
        (lost,) = ended
        assert isinstance(lost, Lost) and lost.transfer == transfers["bad"] and not lost.told
        assert "make no sense" in lost.reason and sender.strikes.cut_off == 1
        assert transfers["good"] in sender and transfers["bad"] not in sender
        with pytest.raises(WireError, match="bad is cut off"):
            sender.open(TransferId(new_request_id(), 1), peers["bad"], 16, [0], time.monotonic())
    finally:
        sender.close()
        for router, _ in routers.values():
            router.close(0)
        channels.close()
        engine.memory.close()
