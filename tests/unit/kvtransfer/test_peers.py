"""Peers of a hand-off: which ones get a grant, and which are cut off."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from common.core.errors import WireError
from common.core.ids import BlockId, Incarnation, TransferId, WorkerName, new_incarnation, new_request_id, pack_tokens
from common.net import keys
from common.net.keys import Party
from common.net.messages import Ack, Cancel, Commit, Grant, Heard, Open, Peer, ToPrefill
from common.net.peer_ban_list import STRIKES
from common.net.sockets import DROPPED_PARTS, Channels, receive, send
from common.net.wire import seal
from kvtransfer.frames import FrameHeader, Rectangle, checksum_of, fold
from kvtransfer.peer_proof import proof, proven, proves
from kvtransfer.receiver import Receiver, TransferFailed
from kvtransfer.sender import Sender, SendFailed
from tests.fakes.oracle import OracleEngine
from tests.unit.gateway_harness import QUIET_S, WAIT_S, until
from tests.unit.parts import counted, many


@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("key", ["prefill", "decode", None])
def test_only_the_chosen_prefill_is_granted_a_hand_off(cluster_key: Path, key: Party | None, encrypt: bool) -> None:
    """With CURVE, a wrong key gets no connection. Without, every peer can connect, and the token decides."""
    engine = OracleEngine(blocks=8)
    inside, outside = (
        Channels(keys.load(cluster_key, "decode"), encrypt_kv=encrypt),
        Channels(key and keys.load(cluster_key, key), encrypt_kv=encrypt),
    )
    receiver = Receiver(inside, engine.memory, "here", "tcp://127.0.0.1:*", transport="zmq")
    transfer, token, layout = TransferId(new_request_id(), 1), b"t" * 16, engine.layout
    peer = Peer(WorkerName("prefill-0"), Incarnation("sender"), "", "there", layout.dtype, token)
    receiver.expect(transfer, 16, 0, [0], peer, time.monotonic())
    socket = outside.dealer(receiver.address, b"peer", to="decode")
    words = transfer.request, transfer.attempt, "sender", 16, layout.fingerprint, layout.dtype, "there", "", 8, 16, 1

    def say(shown: bytes, *, answered: bool) -> Any:
        send(socket, Open(*words, shown))  # type: ignore[arg-type]
        give_up = time.monotonic() + (WAIT_S if answered else QUIET_S)
        while time.monotonic() < give_up:
            receiver.pump(time.monotonic, 0.01)
            if socket.poll(5):
                return receive(socket, ToPrefill)
        return None

    try:
        assert say(proof(b"wrong", transfer, "open"), answered=False) is None
        may_connect = key == "prefill" or not encrypt
        if may_connect:
            until(lambda: receiver.pump(time.monotonic, 0.01) or receiver.bad_messages, "it is counted")
        assert receiver.bad_messages == (1 if may_connect else 0)
        grant = say(proof(token, transfer, "open"), answered=may_connect)
        assert (grant is not None) == may_connect
        if grant is not None:
            assert proves(grant.proof, token, transfer, "grant") and not proves(grant.proof, b"", transfer, "grant")
            for _ in range(2 * STRIKES):  # damage on the way is not the peer's fault
                socket.send_multipart([b"x", b"y"])
            until(
                lambda: receiver.pump(time.monotonic, 0.01) or receiver.bad_messages == 1 + 2 * STRIKES, "all counted"
            )
            assert not receiver.ban_list.cut_off and say(proof(token, transfer, "open"), answered=True)
            outside_of_it = FrameHeader(transfer, 0, Rectangle(0, 99, 0, 16), 64, 0).pack()
            for _ in range(STRIKES):
                socket.send_multipart([outside_of_it, b"y"])
            until(lambda: receiver.pump(time.monotonic, 0.01), "what it was sending has failed")
            assert socket.poll(int(WAIT_S * 1000)) and isinstance(receive(socket, ToPrefill), Cancel), (
                "and it gets a Cancel"
            )
            assert receiver.ban_list.cut_off == 1 and say(proof(token, transfer, "open"), answered=False) is None
    finally:
        socket.close(0)
        receiver.close()
        outside.close()
        inside.close()
        engine.memory.close()


@pytest.mark.parametrize("first", [True, False])
def test_replayed_announcement_cannot_ship(first: bool) -> None:
    """Without CURVE, over a connection of its own, before the blocks are reserved. A thief that announces after the
    sender is ignored. One that announces ``first`` is granted, but its Commit is rejected."""
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
            send(thief, announced)  # its Cancel had no effect
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
        assert isinstance(ended[0], TransferFailed) and receiver.ban_list.cut_off == 1
    finally:
        for socket in (thief, sender):
            socket.close(0)
        receiver.close()
        here.close()
        there.close()
        engine.memory.close()


def test_a_message_of_too_many_parts_does_not_hold_a_receiver_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of pump reads as much as its time budget allows, and the messages behind are read later."""
    engine, here, there, received = OracleEngine(blocks=8), Channels(), Channels(), counted(monkeypatch)
    receiver = Receiver(here, engine.memory, "here", "tcp://127.0.0.1:*", transport="zmq")
    layout, ticks = engine.layout, itertools.count()
    words = "sender", 16, layout.fingerprint, layout.dtype, "there", "", 8, 16, 1
    bad, good = (there.dealer(receiver.address, name, to="decode") for name in (b"bad", b"good"))

    def pump() -> None:
        before = len(received)
        receiver.pump(lambda: 0.001 * next(ticks), 0.0015)  # time for two messages, or for two pieces of one
        assert len(received) - before <= 2 * DROPPED_PARTS

    try:
        for strike in range(1, STRIKES + 1):
            bad.send_multipart(many(8 * DROPPED_PARTS))
            until(lambda strike=strike: pump() or receiver.bad_messages == strike, "it is counted")
            assert receiver._socket.dropping
            send(good, Open(new_request_id(), 1, *words))  # type: ignore[arg-type]
            until(lambda: pump() or good.poll(0), "what others say is heard")
            assert isinstance(receive(good, ToPrefill), Heard) and not receiver._socket.dropping
        assert receiver.ban_list.cut_off == 1 and receiver.bad_messages == STRIKES
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
        assert isinstance(lost, SendFailed) and lost.cancelled_by_peer and lost.reason == "said behind it"
        assert sender.bad_messages == 1 and not sender.ban_list.cut_off
    finally:
        sender.close()
        router.close(0)
        channels.close()
        engine.memory.close()


def test_a_decode_worker_that_talks_nonsense_is_cut_off_by_the_sender() -> None:
    """It is cut off at its third invalid message; the hand-off to another decode worker goes on."""
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
                assert not ended and not sender.ban_list.cut_off
                router.send_multipart([who, seal(b"\x93")])
        until(pump, "the third is one too many")
        (lost,) = ended
        assert isinstance(lost, SendFailed) and lost.transfer == transfers["bad"] and not lost.cancelled_by_peer
        assert "make no sense" in lost.reason and sender.ban_list.cut_off == 1
        assert transfers["good"] in sender and transfers["bad"] not in sender
        with pytest.raises(WireError, match="bad is banned"):
            sender.open(TransferId(new_request_id(), 1), peers["bad"], 16, [0], time.monotonic())
    finally:
        sender.close()
        for router, _ in routers.values():
            router.close(0)
        channels.close()
        engine.memory.close()
