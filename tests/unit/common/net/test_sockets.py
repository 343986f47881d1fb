"""Sockets with limits and behavior that libzmq does not have by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_connection, create_server
from typing import Any

import pytest
import zmq

from common.core.errors import StartError, WireError
from common.net import keys
from common.net import sockets as channel
from common.net.keys import PARTIES, Party
from common.net.messages import Ping, ToHeartbeatThread
from common.net.sockets import (
    DROPPED_PARTS,
    KV_HIGH_WATER_MESSAGES,
    MAX_FRAME_BYTES,
    BoundedSocket,
    Channels,
    bind_router,
    connect_dealer,
    is_local,
    nearby,
    send,
)
from common.net.wire import decode
from tests.leaked_keys import keygen
from tests.threads import running_threads, started_by_libzmq, until_ended
from tests.unit.parts import counted, many

PATIENCE_MS = 60_000
"""How long a message that must come may take on a machine that does much else."""
ROUNDS = 400
"""A turn of an I/O thread moves at least 8 KiB (libzmq's batch) of a 1 MiB frame: 128 turns at each end."""


@pytest.fixture
def cluster_key(tmp_path: Path) -> Path:
    return keygen(tmp_path / "cluster.key")


@pytest.mark.parametrize("party", PARTIES)
def test_every_role_can_bind_a_router_with_its_key(cluster_key: Path, party: Party) -> None:
    channels = Channels(keys.load(cluster_key, party))
    try:
        _, address = channels.router("tcp://127.0.0.1:*")
        assert is_local(address)
    finally:
        channels.close()


@pytest.mark.parametrize("keyed", [False, True])
def test_a_router_is_also_reached_nearby_by_the_same_keys_alone(cluster_key: Path, keyed: bool) -> None:
    def party(name: Party) -> Channels:
        return Channels(keys.load(cluster_key, name) if keyed else None)

    here, prefill = party("coordinator"), party("prefill")
    stranger = Channels(None if keyed else keys.load(cluster_key, "prefill"))
    try:
        router, address = here.router("tcp://127.0.0.1:*", near=True)
        port = address.rpartition(":")[2]
        near = nearby(f"tcp://127.0.0.1:{port}")
        assert is_local(near)
        with router, stranger.dealer(near, b"stranger") as unheard:
            unheard.send(b"in")
            for each, name in ((address, b"far"), (near, b"near")):
                with prefill.dealer(each, name) as dealer:
                    dealer.send(b"message")
                    assert router.poll(30_000)
                    assert here.take(router) == ("prefill" if keyed else None, [name, b"message"])
                    router.send_multipart([name, b"answer"])
                    assert dealer.poll(30_000) and dealer.recv() == b"answer"
            assert not router.poll(100)
    finally:
        for each in (here, prefill, stranger):
            each.close()


@pytest.mark.skipif(nearby("tcp://127.0.0.1:1") == "tcp://127.0.0.1:1", reason="there are no such sockets here")
def test_router_refuses_taken_local_address() -> None:
    """Otherwise another process would receive the workers' messages."""
    with contextlib.closing(Channels()) as channels, contextlib.closing(Channels()) as others:
        with create_server(("127.0.0.1", 0)) as free:
            asked = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        with socket_at(others, nearby(asked)), pytest.raises(StartError, match="cannot listen on ipc://"):
            channels.router(asked, near=True)


def socket_at(channels: Channels, address: str) -> zmq.Socket[bytes]:
    socket = channels.context.socket(zmq.PULL)
    socket.bind(address)
    return socket


def test_channels_close_after_failed_open(cluster_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ADMITS", {})
    channels = Channels(keys.load(cluster_key, "decode"))
    with pytest.raises(KeyError):
        channels.router("tcp://127.0.0.1:*")
    closing = threading.Thread(target=channels.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_router_reads_reconnected_peer_before_old_disconnect() -> None:
    """While the listener is in a long step, a peer whose connection was cut may dial again; the listener then learns of
    the new connection and of the end of the old one in any order."""
    with zmq.Context() as context, bind_router(context, "tcp://127.0.0.1:*") as router:
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        with router.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connected:
            old = connect_dealer(context, address, b"peer")
            old.send(b"before")
            assert router.poll(30_000) and router.recv_multipart() == [b"peer", b"before"]
            assert connected.poll(30_000) and connected.recv_multipart()
            with connect_dealer(context, address, b"peer") as new:
                assert connected.poll(30_000)  # the router has not processed this and knows only the old connection
                router.disable_monitor()
                old.close(linger=0)
                new.send(b"after")
                assert router.poll(30_000) and router.recv_multipart() == [b"peer", b"after"]
                router.send_multipart([b"peer", b"answer"])
                assert new.poll(30_000) and new.recv() == b"answer"


def test_heartbeat_thread_answers_ping_at_once() -> None:
    channels = Channels()
    router, address = channels.router("tcp://127.0.0.1:*")
    heartbeat_thread = channels.heartbeat_thread(address, b"heartbeats", 3600.0, Ping)
    try:
        for number in (0, 5):
            assert router.poll(30_000)
            peer, beat = router.recv_multipart()
            assert decode(beat, ToHeartbeatThread) == Ping(number)
            assert send(router, Ping(5), peer)
    finally:
        heartbeat_thread.stop()
        channels.close()


_HEARTBEAT_PROCESS = """
import sys
from common.net.sockets import Channels
from common.net.messages import Ping
thread = Channels().heartbeat_thread(sys.argv[1], b"heartbeats", 0.05, Ping)
for _ in sys.stdin:
    print(thread.stood_still_s(), flush=True)
"""


@pytest.mark.processes
def test_heartbeat_thread_measures_stopped_time() -> None:
    channels = Channels()
    router, address = channels.router("tcp://127.0.0.1:*")
    command = [sys.executable, "-c", _HEARTBEAT_PROCESS, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def stood_still_s() -> float:
            assert process.stdin is not None and process.stdout is not None
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        try:
            assert router.poll(20_000), "it beats"
            before = stood_still_s()
            process.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            time.sleep(1.0)  # the time to be measured
            process.send_signal(signal.SIGCONT)
            assert 0.9 <= stood_still_s() - before <= time.monotonic() - stopped_at
        finally:
            process.kill()
            channels.close()


def test_kv_socket_bounds_unread_frames_without_loss() -> None:
    """A peer sends frame after frame while the worker is in a long step.

    Whether the peer is stopped cannot be told by the time that it waits: on a busy machine the I/O threads, which have
    a high niceness, may not run for seconds. So the same two I/O threads carry messages to a second router; the peer
    is stopped if it cannot send while they carry ROUNDS of those, more than a frame takes turns of theirs."""
    here, there = Channels(), Channels()
    router, address = here.router("tcp://127.0.0.1:*", kv=True)
    second, second_address = here.router("tcp://127.0.0.1:*", kv=True)
    dealer, beside = there.dealer(address, b"peer", to="decode"), there.dealer(second_address, b"beside", to="decode")
    dealer.setsockopt(zmq.SNDHWM, 1)  # applies to connections made from here on
    dealer.disconnect(address)
    dealer.connect(address)

    def stopped() -> bool:
        for _ in range(ROUNDS):
            if dealer.poll(0, zmq.POLLOUT):
                return False
            beside.send_multipart([b"header", b""])
            assert second.poll(PATIENCE_MS) and second.recv_multipart()[0] == b"beside"
        return True

    frame, sent, most = bytes(1 << 20), 0, KV_HIGH_WATER_MESSAGES + 64
    while sent < most and not stopped():
        dealer.send_multipart([b"header", frame])
        sent += 1
    assert KV_HIGH_WATER_MESSAGES <= sent < most, "the rest waits at its sender"
    for _ in range(sent):
        assert router.poll(PATIENCE_MS) and len(router.recv_multipart(copy=False)) == 3
    dealer.send_multipart([b"header", bytes(MAX_FRAME_BYTES + 1)])
    with there.dealer(address, b"other", to="decode") as other:
        other.send_multipart([b"header", frame])
        assert router.poll(PATIENCE_MS) and router.recv_multipart()[0] == b"other"
        assert not router.poll(100), "what no frame can be is not read at all"
    for socket in (router, dealer, second, beside):
        socket.close(linger=0)
    here.close()
    there.close()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness belongs to the process here")
@pytest.mark.parametrize("encrypted", [False, True])
def test_threads_that_carry_kv_stand_back_and_those_of_control_messages_do_not(
    cluster_key: Path, encrypted: bool
) -> None:
    def started(before: set[int]) -> dict[int, int]:
        return {each: os.getpriority(os.PRIO_PROCESS, each) for each in started_by_libzmq(before, 2)}

    before, ours = running_threads(), os.getpriority(os.PRIO_PROCESS, 0)
    channels = Channels(keys.load(cluster_key, "decode"), encrypt_kv=encrypted)
    sockets = [channels.dealer("tcp://127.0.0.1:1", b"us")]
    control = started(before)
    assert set(control.values()) == {ours}
    router, address = channels.router("tcp://127.0.0.1:*", kv=True)
    sockets += [router, channels.dealer(address, b"peer", to="decode")]
    niceness = channel.CURVE_NICENESS if encrypted else channel.KV_NICENESS
    kv = started(before | control.keys())
    assert set(kv.values()) == {min(19, ours + niceness)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours
    for socket in sockets:
        socket.close()
    channels.close()
    until_ended([*control, *kv])


def test_a_router_of_kv_asks_for_keys_as_one_of_control_messages_does(cluster_key: Path) -> None:
    decode, prefill = (Channels(keys.load(cluster_key, party)) for party in ("decode", "prefill"))
    stranger = Channels()
    router, address = decode.router("tcp://127.0.0.1:*", kv=True)
    unknown, peer = stranger.dealer(address, b"unknown", to="decode"), prefill.dealer(address, b"peer", to="decode")
    try:
        with contextlib.suppress(zmq.Again):  # it may have been rejected already
            unknown.send(b"from whom", zmq.NOBLOCK)
        peer.send(b"known")
        assert router.poll(30_000)
        assert decode.take(router) == ("prefill", [b"peer", b"known"])
        assert not router.poll(100)
    finally:
        for socket in (router, unknown, peer):
            socket.close(linger=0)
        for channels in (decode, prefill, stranger):
            channels.close()


# -- messages of too many parts ---------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channels, Channels]]:
    here, there = Channels(), Channels()
    yield here, there
    for channels in (here, there):
        channels.close()


def read(socket: BoundedSocket, received: list[int], copy: bool = True) -> list[Any]:
    """Return the next message, or [] while one is being dropped; the number of parts read must be bounded."""
    before = len(received)
    assert socket.poll(30_000)
    parts = socket.recv_multipart(zmq.NOBLOCK, copy)
    assert len(received) - before <= max(DROPPED_PARTS, socket.most_parts + 1)
    return [part if copy else part.bytes for part in parts]


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("kv", [True, False])
def test_of_a_message_of_too_many_parts_the_first_are_taken_and_the_rest_is_dropped_in_pieces(
    ends: tuple[Channels, Channels], monkeypatch: pytest.MonkeyPatch, kv: bool, copy: bool
) -> None:
    """No message of another peer is lost, before it or behind it, nor the sender's next message."""
    received = counted(monkeypatch)
    router, address = ends[0].router("tcp://127.0.0.1:*", kv=kv)
    good = [b"header", b"payload"] if kv else [b"message"]
    with router, ends[1].dealer(address, b"bad") as bad, ends[1].dealer(address, b"other") as other:
        heard: list[list[Any]] = []
        for socket in (bad, other):
            socket.send_multipart(good)
            heard.append(read(router, received, copy))
        bad.send_multipart(many(3 * DROPPED_PARTS))
        assert len(read(router, received, copy)) == router.most_parts + 1, "which shows that there were more"
        bad.send_multipart(good)
        other.send_multipart(good)
        pieces = 0
        while router.dropping:
            assert read(router, received, copy) == []
            pieces += 1
        assert pieces == 3
        heard += [read(router, received, copy) for _ in range(2)]
        assert sorted(heard) == sorted(2 * [[b"bad", *good], [b"other", *good]])
        assert not router.poll(100)


@pytest.mark.parametrize("extra", [1, 2, DROPPED_PARTS, DROPPED_PARTS + 1, DROPPED_PARTS + 2])
def test_a_message_behind_one_of_too_many_parts_begins_where_it_begins(
    ends: tuple[Channels, Channels], monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    received = counted(monkeypatch)
    router, address = ends[0].router("tcp://127.0.0.1:*")
    with router, ends[1].dealer(address, b"name") as dealer:
        dealer.send(b"before")
        assert read(router, received) == [b"name", b"before"]
        for sender, to, reader in ((dealer, [], router), (router, [b"name"], dealer)):
            sender.send_multipart([*to, *many(1 + extra)])
            sender.send_multipart([*to, b"behind"])
            assert len(read(reader, received)) == reader.most_parts + 1
            while (parts := read(reader, received)) == []:
                pass
            assert parts[-1] == b"behind" and len(parts) == reader.most_parts and not reader.poll(50)


def test_router_reads_peer_that_reconnects_during_oversized_message(
    ends: tuple[Channels, Channels], monkeypatch: pytest.MonkeyPatch
) -> None:
    received = counted(monkeypatch)
    router, address = ends[0].router("tcp://127.0.0.1:*")
    with router, router.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connected:
        old = ends[1].dealer(address, b"name")
        old.send_multipart(many(2 * DROPPED_PARTS))
        assert len(read(router, received)) == router.most_parts + 1 and connected.recv_multipart()
        with ends[1].dealer(address, b"name") as new:
            new.send(b"after")
            assert connected.poll(30_000)
            old.close(linger=0)
            while (parts := read(router, received)) == []:
                pass
            assert parts == [b"name", b"after"]
        router.disable_monitor()


def test_a_stranger_that_says_nothing_is_hung_up_on(cluster_key: Path) -> None:
    channels = Channels(keys.load(cluster_key, "coordinator"))
    try:
        router, address = channels.router("tcp://127.0.0.1:*")
        with router, create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=12) as stranger:
            while stranger.recv(1024):  # the greeting; libzmq by itself would wait for 30 s
                pass
    finally:
        channels.close()


def test_connect_reports_exhausted_sockets_as_wire_error() -> None:
    """The error is the same as for an invalid address: the worker gives up one hand-off and goes on."""
    with zmq.Context() as context:
        context.max_sockets = 1
        with context.socket(zmq.PAIR), pytest.raises(WireError, match="Too many open files"):
            connect_dealer(context, "tcp://127.0.0.1:1", b"name")
